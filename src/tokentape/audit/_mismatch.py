"""Compare recorded log-probabilities with an engine's scores of the same ids, and find the cause of differences.

If a rounding, a shift by one token, one temperature or one truncation turns the scores into the recorded logprobs, that
is the cause. With different weights, logprobs differ from the first sampled token on. If they differ only from a later
token on, the ids differed. If most tokens after a difference agree, single logprobs are wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit._deviations import (
    CERTAIN,
    PRECISIONS,
    Cause,
    Compared,
    Deviations,
    Found,
    Grid,
    Precision,
    apart_by,
    obvious_cause,
    scale_cause,
)
from tokentape.audit._rescaling import RAW, Rule, Values, recorded_rules, under
from tokentape.audit._statistics import Numbers, NumbersTally
from tokentape.engines._scoring import AMONG_TOKENS, Scores
from tokentape.types import Logprobs, Trajectory

TOP = 4096
"""The number of alternatives per position to request; servers return fewer."""

LOOK_TOP = AMONG_TOKENS
"""The number of alternatives when a sequence is scored again. Fewer than `TOP`, because hundreds of rules are tried."""

_LOOKED_AT = 4
"""The number of sequences of each group to score again, with alternatives: those with the most differences."""
_TOKENS = 256
_SEQUENCES = 256
"""The number of sequences per group and degree of difference of which all logprobs are kept."""

_EXPLAINED = 0.9

NOT_FINITE = "the recorded logprob is not a finite number"

_CUTS: tuple[dict[str, Any], ...] = (
    *({"top_p": p} for p in (*(n / 20 for n in range(1, 20)), 0.92, 0.97, 0.98, 0.99, 0.995)),
    *({"top_k": k} for k in (1, 2, 3, 4, 5, 8, 10, 16, 20, 30, 32, 40, 50, 64, 100)),
    *({"min_p": p} for p in (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3)),
)

Sampling: TypeAlias = Mapping[int, Mapping[str, Any]]
"""Sampling parameters by turn."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """The causes of differences beyond rounding, for turns with the same weight version and distribution."""

    causes: tuple[Cause, ...]
    """Several if all of them apply, or if it is unknown which of them does."""
    detail: str
    weight_version: str
    expected: str
    """The distribution that the record names, such as `temperature 1`."""
    tokens: int
    apart: int
    """The number of tokens with a larger difference than rounding explains."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A sequence to score again with alternatives: `trajectory.token_ids[:end]`, from `start` on."""

    trajectory: Trajectory
    start: int
    end: int
    positions: npt.NDArray[np.int64]
    scored: list[tuple[_Tokens, _Tokens | None]]
    """Where to add the tokens after scoring, also by `Scores.among_tokens`."""
    rank: tuple[int, int]
    """Its degree of difference, and the number of its tokens with a larger difference than rounding explains."""


class _Tokens(NamedTuple):
    recorded: Values
    own: Values
    """The log-probabilities under the model's own distribution."""
    top: npt.NDArray[np.float32]
    """The largest log-probabilities of each position, shape [tokens, alternatives]."""


@dataclass
class _Group:
    """Tokens with the same distribution and weight version."""

    declared: Rule
    sampled: set[Rule] = field(default_factory=set)
    turns: tuple[list[Compared], ...] = field(default_factory=lambda: ([], [], []))
    """Turns that agree, that differ, and that are `Compared.outlying`."""
    tokens: int = 0
    apart: int = 0
    total: float = 0.0
    blank: bool = True
    """True if all recorded logprobs are 0, also those that can't be compared."""
    skipped: int = 0
    """The number of tokens that can't be compared, because the engine returns too few alternatives."""
    doubts: list[Doubt] = field(default_factory=list)
    scored: list[tuple[_Tokens, _Tokens | None]] = field(default_factory=list)

    def too_far(self, limits: Precision) -> bool:
        many = max(self.tokens, 1)
        # A few outlying turns hardly change the share and the mean.
        return bool(self.turns[2]) or self.apart / many > limits.share or self.total / many > limits.mean

    def joined(self, which: int) -> _Tokens | None:
        scored = [tokens for pair in self.scored if (tokens := pair[which]) is not None]
        if not scored:
            return None
        width = min(tokens.top.shape[1] for tokens in scored)
        parts = [tokens._replace(top=tokens.top[:, :width]) for tokens in scored]
        return _Tokens(*map(np.concatenate, zip(*parts, strict=True)))


class Mismatch:
    """Compares recorded log-probabilities with scores of the same ids: `add`, then `look`, then `causes`."""

    def __init__(self, precision: str, vocab_size: int, adapter: str | None = None) -> None:
        self._limits = PRECISIONS[precision]
        self.adapter = adapter
        """The LoRA adapter that computed the scores; None for the model itself."""
        self._vocab = vocab_size
        self._groups: dict[tuple[str, Rule], _Group] = {}
        self.not_comparable: Counter[str] = Counter()
        """Tokens that were not compared, by reason."""
        self._numbers = NumbersTally()

    def rules(self, trajectory: Trajectory, sampling: Sampling | None = None) -> list[Rule | str]:
        return recorded_rules(trajectory, sampling, self.adapter)

    def top_for(self, trajectory: Trajectory, sampling: Sampling | None = None) -> int:
        """Return the number of alternatives per position that comparing a trajectory needs."""
        return TOP if any(isinstance(rule, Rule) and rule != RAW for rule in self.rules(trajectory, sampling)) else 0

    def add(
        self,
        trajectory: Trajectory,
        mask: npt.NDArray[np.bool_],
        start: int,
        scores: Scores,
        sampling: Sampling | None = None,
        before: int | None = None,
    ) -> tuple[Logprobs, npt.NDArray[np.bool_]]:
        """Compare the tokens in `mask` with `scores` from `start` on.

        Return the expected logprobs, and a mask of the tokens that were compared. Causes are looked for only at tokens
        before the position `before`.
        """
        expected = np.full(len(trajectory.token_ids), np.nan, np.float32)
        compared = np.zeros(len(expected), bool)
        for n, rule in enumerate(self.rules(trajectory, sampling)):
            first, last = int(trajectory.completion_starts[n]), int(trajectory.completion_ends[n])
            positions = np.flatnonzero(mask[first:last]) + first
            positions = positions[(positions >= start) & (positions < start + len(scores.logprobs))]
            finite = np.isfinite(trajectory.logprobs[positions])
            if not finite.all():
                self.not_comparable[NOT_FINITE] += int((~finite).sum())
                positions = positions[finite]
            if not len(positions):
                continue
            if isinstance(rule, str):
                self.not_comparable[rule] += len(positions)
                continue
            top = scores.top[positions - start] if rule != RAW else np.empty((len(positions), 0))
            value, error = under(scores.logprobs[positions - start], top, rule, self._vocab)
            reliable = error <= self._limits.delta / 10
            if not reliable.all():
                why = f"{rule}: this engine returns too few alternatives to normalize with"
                self.not_comparable[why] += int((~reliable).sum())
            expected[positions[reliable]], compared[positions[reliable]] = value[reliable], True
            early = slice(None) if before is None else positions < before
            positions, value, reliable = positions[early], value[early], reliable[early]
            for version, within in _versions(trajectory, positions):
                group = self._groups.setdefault((version, rule), _Group(rule))
                group.sampled |= _sampled_with(trajectory, n, sampling)
                group.skipped += int((within & ~reliable).sum())
                group.blank &= not trajectory.logprobs[positions[within]].any()
                if (within := within & reliable).any():
                    self._count(group, trajectory, positions[within], value[within])
        self._numbers.add((expected.astype(np.float64) - trajectory.logprobs)[compared])
        return expected, compared

    def numbers(self) -> Numbers:
        return self._numbers.numbers()

    def _count(self, group: _Group, trajectory: Trajectory, positions: npt.NDArray[np.int64], value: Values) -> None:
        turn = Compared(trajectory.logprobs[positions].astype(np.float64), value, positions)
        distance = turn.distance()
        apart = distance > self._limits.delta
        group.tokens += len(positions)
        group.apart += int(apart.sum())
        group.total += float(distance[np.isfinite(value)].sum())
        degree = 2 if turn.outlying(self._limits) else int(apart.any() or distance.mean() > self._limits.mean)
        if len(group.turns[degree]) < _SEQUENCES:
            group.turns[degree].append(turn)
        if degree:
            some = positions[:_TOKENS]
            rank = degree, int(apart[:_TOKENS].sum())
            doubt = Doubt(trajectory, int(some[0]), int(some[-1]) + 1, some, group.scored, rank)
            group.doubts = sorted((*group.doubts, doubt), key=lambda doubt: doubt.rank, reverse=True)[:_LOOKED_AT]

    def doubts(self) -> Iterator[Doubt]:
        """Yield sequences to score again, with up to `LOOK_TOP` alternatives."""
        for group in self._groups.values():
            yield from group.doubts if group.too_far(self._limits) else ()

    def look(self, doubt: Doubt, scores: Scores) -> None:
        """Add the scores of a doubt, with alternatives. They begin at `doubt.start`."""
        offsets = doubt.positions - doubt.start
        recorded = doubt.trajectory.logprobs[doubt.positions].astype(np.float64)

        def tokens(scored: Scores) -> _Tokens:
            return _Tokens(recorded, scored.logprobs[offsets].astype(np.float64), scored.top[offsets])

        doubt.scored.append((tokens(scores), tokens(scores.among_tokens) if scores.among_tokens else None))

    def causes(self) -> tuple[Attribution, ...]:
        attributions = []
        for (version, declared), group in self._groups.items():
            if group.too_far(self._limits):
                causes, detail = self._causes_of(version, group)
                attributions.append(Attribution(causes, detail, version, str(declared), group.tokens, group.apart))
        return tuple(attributions)

    def _causes_of(self, version: str, group: _Group) -> Found:
        turns = [turn for of_degree in group.turns for turn in of_degree]
        grid = Grid(np.concatenate([turn.recorded for turn in turns]))
        if (obvious := obvious_cause(turns, grid, self._limits, group.blank, not group.skipped)) is not None:
            return obvious
        # In float32 nothing else fits as exactly. In bfloat16 a temperature may look like a factor.
        scale = scale_cause(turns, grid, self._limits)
        if scale is not None and (not self._limits.share or "not known" in scale[0]):
            return scale
        deviations = Deviations(turns, self._limits)
        unseen = f"{group.skipped} of {group.skipped + group.tokens}" if group.skipped > group.tokens else ""
        if (joined := group.joined(0)) is not None:
            explaining = _Explaining(joined, group, grid, self._limits, self._vocab)
            if (among := group.joined(1)) is not None and explaining.fits(among):
                return ("truncation",), "the sampler excluded ids that are no tokens, and renormalized"
            # Among few tokens, most of them nearly certain, a truncation with any limit fits too often.
            if (rules := explaining.rules()) and not (unseen and np.isnan(rules[0].top_p)):
                causes: list[Cause] = []
                if other := any(abs(rule.temperature - group.declared.temperature) > 1e-6 for rule in rules):
                    causes.append("temperature")
                if any(rule.truncates for rule in rules) or group.declared.truncates:
                    causes.append("truncation")
                # At a higher temperature nearly all logprobs are lower, so being above them is weak evidence.
                if other and np.isnan(rules[0].top_p):
                    causes.append("weights")
                return tuple(causes), f"the recorded logprobs fit {_named(rules)}"
        if scale is not None:
            return scale
        if unseen:
            return ("not known",), f"{unseen} tokens can't be compared, so where differences begin and end is not known"
        found = self._other_cause(version, group, deviations)
        everywhere = deviations.everywhere or found[0] == ("kernels", "weights")
        if joined is None or "not known" in found[0] or (possible := explaining.possible(everywhere)) is None:
            return found
        both: tuple[Cause, ...] = ("temperature", "truncation") if everywhere else ("truncation",)
        return (*both, *(cause for cause in found[0] if cause not in both)), f"{found[1]}; {possible}"

    def _other_cause(self, version: str, group: _Group, deviations: Deviations) -> Found:
        """Return the cause of differences that no rule explains."""
        if not deviations.lasting:
            return deviations.passing_cause()
        others = [sibling for key, sibling in self._groups.items() if key[0] != version and sibling.tokens]
        agree = bool(others) and not any(sibling.too_far(self._limits) for sibling in others)
        return deviations.lasting_cause(version != "unknown", agree and group.apart > group.tokens / 4)


def _named(rules: Sequence[Rule]) -> str:
    """Name rules that fit equally well: the one, or the range of the limit of each kind of truncation."""
    if np.isnan(rules[0].top_p):
        return "a truncation to the likeliest tokens, with an unknown limit"
    if len(rules) == 1:
        return str(rules[0])
    if not rules[0].truncates:
        return f"{rules[0]} or {_named(rules[1:])}"
    ranges = []
    for name, unused in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        values = sorted({getattr(rule, name) for rule in rules} - {unused})
        if values:
            ranges.append(f"{name} {values[0]:.3g}" + (f" to {values[-1]:.3g}" if len(values) > 1 else ""))
    return f"temperature {rules[0].temperature:.3g}, {' or '.join(ranges)}"


def _versions(trajectory: Trajectory, positions: npt.NDArray[np.int64]) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    by_version: dict[str, npt.NDArray[np.bool_]] = {}
    for start, end, version in trajectory.weight_spans:
        within = (positions >= start) & (positions < end)
        if within.any():
            by_version[version] = by_version.get(version, np.zeros(len(positions), bool)) | within
    yield from by_version.items()


def _sampled_with(trajectory: Trajectory, n: int, sampling: Sampling | None) -> set[Rule]:
    """Return the rules that a turn may have been sampled with, by its recorded parameters. They are tried first."""
    of, params = trajectory.sampled_from[n], (sampling or {}).get(trajectory.turns[n])
    if of is None or not of.temperature:
        return set()
    if params is None:
        return {Rule(of.temperature)}
    cut = Rule(1.0, float(params.get("min_p", 0)), int(params.get("top_k", 0)), float(params.get("top_p", 1)))
    return {Rule(of.temperature), cut, Rule(of.temperature, cut.min_p, cut.top_k, cut.top_p)}


class _Explaining:
    """Finds a rule that turns the model's own logprobs into the recorded logprobs."""

    def __init__(self, tokens: _Tokens, group: _Group, grid: Grid, limits: Precision, vocab: int) -> None:
        self._tokens, self._group, self._limits, self._vocab = tokens, group, limits, vocab
        self._slack = grid.slack(tokens.recorded)
        expected, error = self._under(group.declared)
        self._before = apart_by(tokens.recorded, np.where(np.isfinite(expected), expected, -1e9), self._slack)
        certain = (tokens.own > -CERTAIN) & (tokens.recorded > -CERTAIN)
        self._telling = ~certain & ((self._before > limits.delta) | ~(error <= limits.delta))

    def _under(self, rule: Rule, tokens: _Tokens | None = None) -> tuple[Values, Values]:
        tokens = tokens or self._tokens
        return under(tokens.own, tokens.top, rule, self._vocab)

    def fits(self, other: _Tokens) -> bool:
        """Return whether other scores of the same ids explain the recorded logprobs under the declared rule."""
        return bool(self._telling.sum() >= 8 and self._explained(self._group.declared, other)[0] >= _EXPLAINED)

    def rules(self) -> tuple[Rule, ...]:
        """Return the simplest rules that explain the recorded logprobs equally well; empty without any.

        `top_p` is NaN if the limit of a truncation is unknown.
        """
        if self._telling.sum() < 8:
            return ()
        declared, sampled = self._group.declared, self._group.sampled
        temperatures = dict.fromkeys(rule.temperature for rule in (RAW, declared, *sampled))
        fitted = [] if (best_fit := self._fitted_temperature()) is None else [Rule(best_fit)]
        cuts = [Rule(temperature, **cut) for temperature in temperatures for cut in _CUTS]
        known = [Rule(temperature) for temperature in temperatures]
        # Among few telling tokens, some temperature may fit a truncation too, but less closely.
        for candidates in (known, [rule for rule in sampled if rule.truncates], fitted + cuts):
            tried = [
                (distance, rule)
                for rule in candidates
                if rule != declared
                for share, distance in [self._explained(rule)]
                if share >= _EXPLAINED
            ]
            if not tried:
                continue
            least, best = min(tried, key=lambda fit: fit[0])
            if candidates is known:
                return (best,)
            near = least + self._limits.delta / 10
            of = (declared if best in fitted else best).temperature
            return tuple(
                rule for distance, rule in tried if distance <= near and (rule in fitted or rule.temperature == of)
            )
        cut = [temperature for temperature in temperatures if self._never_lower(Rule(temperature))]
        return (Rule(cut[0], top_p=np.nan),) if cut else ()

    def possible(self, everywhere: bool) -> str | None:
        """Return why a truncation may explain the recorded logprobs although none was found; None if none can.

        `everywhere`: nearly all tokens differ, so that the temperature may differ too.
        """
        declared, delta = self._group.declared.temperature, self._limits.delta
        temperatures = (declared, *(n / 20 for n in range(6, 41)))
        # Without any, rounding of the recorded logprobs explains the differences.
        telling = bool(self._telling.any())
        apart = telling or self._before.mean() > self._limits.mean
        for temperature in (temperatures if everywhere else (declared,)) if apart else ():
            value, error = self._under(Rule(temperature))
            above = self._tokens.recorded - value
            outside = np.maximum(-above, above - self._most(value, temperature)) - error - self._slack
            outside = np.where(np.isfinite(error), np.maximum(outside, 0), 0)
            within = (outside <= delta).mean() >= 1 - self._limits.share - (0.02 if everywhere else 0)
            if within and (telling or outside.mean() <= self._limits.mean / 4):
                few = 2 * (error[self._telling] > 0.3).sum() > self._telling.sum()
                why = "this engine returns too few alternatives to exclude" if few else "the logprobs do not exclude"
                return f"{why} a truncation at temperature {temperature:.2g}"
        return None

    def _most(self, value: Values, temperature: float) -> Values:
        """Return by how much a truncation may raise a token: it also keeps all likelier ones."""
        own, top = self._tokens.own[:, None], self._tokens.top
        likelier = np.where(top > own + 1e-5, (top - own) / temperature, -np.inf)
        return np.asarray(-value - np.logaddexp.reduce(likelier, axis=1, initial=0.0))

    def _never_lower(self, rule: Rule) -> bool:
        """Return True if no recorded logprob is lower than under `rule`: any truncation raises what it keeps."""
        value, error = self._under(rule)
        most = self._most(value, rule.temperature)
        usable = (error <= self._limits.delta) & (value < -CERTAIN)
        above, most = (self._tokens.recorded - value)[usable], most[usable] + self._slack[usable]
        if len(above) < 30 or (above > self._limits.delta).mean() < 0.25:
            return False
        within = (above >= -self._limits.delta) & (above <= most + self._limits.delta)
        return bool(within.mean() >= 1 - self._limits.share - 0.02)

    def _explained(self, rule: Rule, tokens: _Tokens | None = None) -> tuple[float, float]:
        """Return the share of differing tokens that a rule explains, or of others that still agree, if smaller.

        Also return the mean distance that is left.
        """
        value, error = self._under(rule, tokens)
        reliable = np.isfinite(error) & (error < 0.3)
        distance = apart_by(self._tokens.recorded, value, self._slack)
        fits = distance <= self._limits.delta + error
        counted, others = reliable & self._telling, reliable & ~self._telling
        few = counted.sum() < max(8, 0.2 * self._telling.sum())
        if few or np.median(distance[counted]) > 0.4 * np.median(self._before[counted]):
            return 0.0, np.inf
        if np.median(distance[counted] - error[counted]) > self._limits.mean:
            return 0.0, np.inf
        left = float(np.minimum(distance, 10.0)[counted].mean())
        return float(min(fits[counted].mean(), fits[others].mean() if others.any() else 1.0)), left

    def _fitted_temperature(self) -> float | None:
        """Return the temperature that fits the recorded logprobs best; None if there are too few alternatives."""

        def distance(temperature: float) -> float:
            value, error = self._under(Rule(float(temperature)))
            reliable = error < 0.3
            return float(np.abs(self._tokens.recorded - value)[reliable].mean()) if reliable.sum() >= 8 else np.inf

        grid = np.exp(np.linspace(np.log(0.2), np.log(4.0), 41))
        for _ in range(5):
            distances = [distance(temperature) for temperature in grid]
            index = int(np.argmin(distances))
            if not np.isfinite(distances[index]):
                return None
            best = float(grid[index])
            grid = np.linspace(grid[max(index - 1, 0)], grid[min(index + 1, len(grid) - 1)], 13)
        return best
