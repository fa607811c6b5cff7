"""Compare recorded log-probabilities with an engine's scores of the same ids, and find the cause of differences.

If one temperature, or one truncation, turns the scores into the recorded logprobs, that is the cause. With different
weights, logprobs differ from the first sampled token on. If they differ only from a later token on, the ids differed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit._rescaling import RAW, Rule, Values, recorded_rules, under
from tokentape.audit._statistics import Numbers, NumbersTally
from tokentape.engines._scoring import Scores
from tokentape.types import Logprobs, Trajectory

TOP = 4096
"""The number of alternatives per position to request; servers return fewer."""

LOOK_TOP = 512
"""The number of alternatives when a sequence is scored again. Fewer than `TOP`, because hundreds of rules are tried."""

_LOOKED_AT = 4
"""The number of sequences of each group to score again, with alternatives."""
_TOKENS = 256
_SEQUENCES = 256
"""The number of sequences per group of which all logprobs are kept."""

_CERTAIN = 0.01
"""A token with a logprob above minus this is certain: neither temperature nor weights change its logprob much."""
_EXPLAINED = 0.9

_CUTS: tuple[dict[str, Any], ...] = (
    *({"top_p": p} for p in (*(n / 20 for n in range(1, 20)), 0.92, 0.97, 0.98, 0.99, 0.995)),
    *({"top_k": k} for k in (1, 2, 3, 4, 5, 8, 10, 16, 20, 30, 32, 40, 50, 64, 100)),
    *({"min_p": p} for p in (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3)),
)

Cause: TypeAlias = Literal["ids", "temperature", "truncation", "weights", "kernels"]
Sampling: TypeAlias = Mapping[int, Mapping[str, Any]]
"""Sampling parameters by turn."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The differences that rounding in a precision may cause between two correct computations."""

    delta: float
    """The usual limit for one token, in nats."""
    share: float
    """The share of tokens that may exceed `delta`."""
    mean: float
    """The mean absolute difference, in nats."""


PRECISIONS = {
    "float32": Precision(delta=1e-3, share=0.0, mean=1e-4),
    "bfloat16": Precision(delta=0.3, share=0.03, mean=0.06),
}
"""Limits by precision, the lower one if two sides differ. docs/how-to/score.md has the measurements."""


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
    scored: list[_Tokens]
    """Where to add the tokens after scoring."""


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
    sequences: list[tuple[Values, Values]] = field(default_factory=list)
    tokens: int = 0
    apart: int = 0
    total: float = 0.0
    doubts: list[Doubt] = field(default_factory=list)
    scored: list[_Tokens] = field(default_factory=list)

    def too_far(self, limits: Precision) -> bool:
        many = max(self.tokens, 1)
        return self.apart / many > limits.share or self.total / many > limits.mean

    def joined(self) -> _Tokens | None:
        if not self.scored:
            return None
        width = min(tokens.top.shape[1] for tokens in self.scored)
        parts = [tokens._replace(top=tokens.top[:, :width]) for tokens in self.scored]
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
            positions = np.flatnonzero(mask[first:last] & np.isfinite(trajectory.logprobs[first:last])) + first
            positions = positions[(positions >= start) & (positions < start + len(scores.logprobs))]
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
            positions, value = positions[reliable], value[reliable]
            expected[positions], compared[positions] = value, True
            if before is not None:
                positions, value = positions[positions < before], value[positions < before]
            for version, within in _versions(trajectory, positions):
                group = self._groups.setdefault((version, rule), _Group(rule))
                group.sampled |= _sampled_with(trajectory, n, sampling)
                self._count(group, trajectory, positions[within], value[within])
        self._numbers.add((expected.astype(np.float64) - trajectory.logprobs)[compared])
        return expected, compared

    def numbers(self) -> Numbers:
        return self._numbers.numbers()

    def _count(self, group: _Group, trajectory: Trajectory, positions: npt.NDArray[np.int64], value: Values) -> None:
        recorded = trajectory.logprobs[positions].astype(np.float64)
        apart = ~(np.abs(recorded - value) <= self._limits.delta)
        group.tokens += len(positions)
        group.apart += int(apart.sum())
        group.total += float(np.abs(recorded - value)[np.isfinite(value)].sum())
        if len(group.sequences) < _SEQUENCES:
            group.sequences.append((recorded, value))
        if apart.any() and len(group.doubts) < _LOOKED_AT:
            some = positions[:_TOKENS]
            group.doubts.append(Doubt(trajectory, int(some[0]), int(some[-1]) + 1, some, group.scored))

    def doubts(self) -> Iterator[Doubt]:
        """Yield sequences to score again, with up to `LOOK_TOP` alternatives."""
        for group in self._groups.values():
            yield from group.doubts if group.too_far(self._limits) else ()

    def look(self, doubt: Doubt, scores: Scores) -> None:
        """Add the scores of a doubt, with alternatives. They begin at `doubt.start`."""
        offsets = doubt.positions - doubt.start
        recorded = doubt.trajectory.logprobs[doubt.positions].astype(np.float64)
        doubt.scored.append(_Tokens(recorded, scores.logprobs[offsets].astype(np.float64), scores.top[offsets]))

    def causes(self) -> tuple[Attribution, ...]:
        attributions = []
        for (version, declared), group in self._groups.items():
            if group.too_far(self._limits):
                causes, detail = self._causes_of(version, group)
                attributions.append(Attribution(causes, detail, version, str(declared), group.tokens, group.apart))
        return tuple(attributions)

    def _causes_of(self, version: str, group: _Group) -> tuple[tuple[Cause, ...], str]:
        if (joined := group.joined()) is not None:
            rule = _Explaining(joined, group, self._limits, self._vocab).rule()
            if rule is not None:
                causes: list[Cause] = []
                if abs(rule.temperature - group.declared.temperature) > 1e-6:
                    causes.append("temperature")
                if rule.truncates or group.declared.truncates:
                    causes.append("truncation")
                cut = "a truncation to the likeliest tokens, with an unknown limit"
                return tuple(causes), f"the recorded logprobs fit {cut if np.isnan(rule.top_p) else rule}"
            for tried in group.sampled:
                error = under(joined.own, joined.top, tried, self._vocab)[1]
                # Every rule gives nearly the same logprob to a token that is nearly certain.
                if (error[joined.own < -0.1] < 0.3).mean() < 0.5:
                    few = f"this engine returns too few alternatives to try {tried}"
                    return ("temperature", "truncation", "weights"), f"{few}; use transformers to tell the causes apart"
        others = [sibling.too_far(self._limits) for key, sibling in self._groups.items() if key[0] != version]
        if others and not any(others) and group.apart > group.tokens / 4:
            return ("weights",), "the logprobs of the other weight versions agree"
        if self._limits.share == 0 and _like_rounding(group.sequences, self._limits):
            small = "sequences differ from their first tokens on, by no more than rounding in bfloat16 explains"
            return ("kernels", "weights"), small
        return _ids_or_weights(group.sequences, self._limits, version != "unknown")


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

    def __init__(self, tokens: _Tokens, group: _Group, limits: Precision, vocab: int) -> None:
        self._tokens, self._group, self._limits, self._vocab = tokens, group, limits, vocab
        expected, error = self._under(group.declared)
        self._before = np.abs(tokens.recorded - np.where(np.isfinite(expected), expected, -1e9))
        certain = (tokens.own > -_CERTAIN) & (tokens.recorded > -_CERTAIN)
        self._telling = ~certain & ((self._before > limits.delta) | ~(error <= limits.delta))

    def _under(self, rule: Rule) -> tuple[Values, Values]:
        return under(self._tokens.own, self._tokens.top, rule, self._vocab)

    def rule(self) -> Rule | None:
        """Return the simplest rule that explains the recorded logprobs (`top_p` NaN: unknown), or None."""
        if self._telling.sum() < 8:
            return None
        declared, sampled = self._group.declared, self._group.sampled
        temperatures = dict.fromkeys(rule.temperature for rule in (RAW, declared, *sampled))
        fitted = self._fitted_temperature()
        plain = [Rule(temperature) for temperature in (*temperatures, *([] if fitted is None else [fitted]))]
        cuts = [Rule(temperature, **cut) for temperature in temperatures for cut in _CUTS]
        for candidates in (plain, [rule for rule in sampled if rule.truncates], cuts):
            shares = [(self._explained(rule), rule) for rule in candidates if rule != declared]
            share, best = max(shares, key=lambda pair: pair[0], default=(0.0, RAW))
            if share >= _EXPLAINED:
                return best
        cut = [temperature for temperature in temperatures if self._never_lower(Rule(temperature))]
        return Rule(cut[0], top_p=np.nan) if cut else None

    def _never_lower(self, rule: Rule) -> bool:
        """Return True if no recorded logprob is lower than under `rule`: any truncation raises what it keeps."""
        value, error = self._under(rule)
        above = (self._tokens.recorded - value)[(error <= self._limits.delta) & (value < -_CERTAIN)]
        if len(above) < 30 or (above > self._limits.delta).mean() < 0.25:
            return False
        # A truncation that keeps a tenth of the probability raises logprobs by 2.3.
        within = (above >= -self._limits.delta) & (above < 3)
        return bool(within.mean() >= 1 - self._limits.share - 0.02)

    def _explained(self, rule: Rule) -> float:
        """Return the share of differing tokens that a rule explains, or of others that still agree, if smaller."""
        value, error = self._under(rule)
        reliable = np.isfinite(error) & (error < 0.3)
        distance = np.abs(self._tokens.recorded - value)
        fits = distance <= self._limits.delta + error
        counted, others = reliable & self._telling, reliable & ~self._telling
        few = counted.sum() < max(8, 0.2 * self._telling.sum())
        if few or np.median(distance[counted]) > 0.4 * np.median(self._before[counted]):
            return 0.0
        return float(min(fits[counted].mean(), fits[others].mean() if others.any() else 1.0))

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


def _like_rounding(sequences: Sequence[tuple[Values, Values]], limits: Precision) -> bool:
    """Return True if sequences differ from the start, unlike after a change of ids, and only by bfloat16 rounding."""
    coarse = PRECISIONS["bfloat16"]
    apart = [np.abs(recorded - expected)[recorded < -_CERTAIN] for recorded, expected in sequences]
    together = np.concatenate(apart)
    early = [(sequence[:4] > limits.delta).any() for sequence in apart if len(sequence) >= 4]
    small = together.mean() <= coarse.mean and (together > coarse.delta).mean() <= coarse.share
    return bool(small and early and np.mean(early) >= 0.75)


def _ids_or_weights(
    sequences: Iterable[tuple[Values, Values]], limits: Precision, versions_known: bool
) -> tuple[tuple[Cause, ...], str]:
    """Return the cause and the reason. `versions_known`: the record names the weights of all sequences."""
    clean = broken = within = 0
    for recorded, expected in sequences:
        telling = (recorded < -_CERTAIN) | (expected < -_CERTAIN)
        apart = ~(np.abs(recorded - expected)[telling] <= limits.delta)
        if not apart.any() or apart.mean() <= limits.share:
            clean += len(apart) >= 3
            continue
        broken += 1
        # Rounding moves a few tokens beyond the limit too, but seldom two of four.
        thick = [n for n in np.flatnonzero(apart) if apart[n : n + 4].mean() >= 0.5] if limits.share else []
        within += (int(thick[0]) if thick else int(np.argmax(apart))) >= 3
    if within * 2 >= max(broken, 1):
        return ("ids",), f"{within} of {broken} sequences agree at first and differ from a later token on"
    if clean and versions_known:
        return ("ids",), f"{clean} sequences of the same weights agree, {broken} differ from their first token on"
    if clean:
        where = f"{clean} sequences agree, {broken} differ from their first sampled token on"
        return ("ids", "weights"), f"{where}; the record does not say which weights sampled them"
    first = "all sequences differ from their first sampled token on"
    return ("weights",), f"{first}; different ids before that token in all of them would look the same"
