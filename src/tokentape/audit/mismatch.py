"""Recorded log-probabilities against an engine's scores of the same ids: like with like, how far apart, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape.audit.causes import PRECISIONS, Attribution, Cause, Tokens, explaining_rule, ids_or_weights
from tokentape.audit.numbers import Numbers, NumbersTally
from tokentape.audit.rescaling import RAW, Rule, Values, recorded_rules, under
from tokentape.engines.scoring import Scores
from tokentape.types import Logprobs, Trajectory

TOP = 4096
"""How many alternatives of each position are asked for; servers give fewer."""

LOOK_TOP = 512
"""How many are asked for where a sequence is scored again to find the cause: hundreds of rules are tried on them."""

_LOOKED_AT = 4
"""Sequences of each group that are scored again, with alternatives."""

_TOKENS = 256
"""Tokens of such a sequence that are scored again."""

_SEQUENCES = 256
"""Sequences of each group of which every number is kept."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A sequence that is to be scored again with alternatives: `trajectory.token_ids[:end]`, from `start` on."""

    trajectory: Trajectory
    start: int
    end: int
    positions: npt.NDArray[np.int64]
    """Of the tokens that count."""


@dataclass
class _Group:
    """What belongs to one distribution and was sampled by one version of the weights."""

    declared: Rule
    sampled: set[Rule] = field(default_factory=set)
    sequences: list[tuple[Values, Values]] = field(default_factory=list)
    """Recorded and expected, an array for each sequence."""
    tokens: int = 0
    apart: int = 0
    total: float = 0.0
    doubts: list[Doubt] = field(default_factory=list)
    found: list[Tokens] = field(default_factory=list)


class Mismatch:
    """Compares recorded log-probabilities with scores of the same ids by the model that sampled them.

    Add scores with `add`; score each of `doubts` again and give them to `look`; `causes` says why. What is kept does
    not grow with what is added.
    """

    def __init__(self, precision: str, vocab_size: int) -> None:
        self._limits = PRECISIONS[precision]
        self._vocab = vocab_size
        self._groups: dict[tuple[str, Rule], _Group] = {}
        self.not_comparable: Counter[str] = Counter()
        """Tokens that were not compared, by why."""
        self._numbers = NumbersTally()

    def top_for(self, one: Trajectory, sampling: Mapping[int, Mapping[str, Any]] | None = None) -> int:
        """Return how many alternatives comparing a trajectory takes."""
        return TOP if any(isinstance(rule, Rule) and rule != RAW for rule in recorded_rules(one, sampling)) else 0

    def add(
        self,
        one: Trajectory,
        wanted: npt.NDArray[np.bool_],
        start: int,
        scores: Scores,
        sampling: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> Logprobs:
        """Compare the tokens `wanted`, bool [tokens], with scores of the ids from `start` on.

        Returns what is expected of each token of the trajectory, NaN where nothing is compared.
        """
        expected = np.full(len(one.token_ids), np.nan, np.float32)
        for at, rule in enumerate(recorded_rules(one, sampling)):
            first, last = int(one.completion_starts[at]), int(one.completion_ends[at])
            positions = np.flatnonzero(wanted[first:last] & np.isfinite(one.logprobs[first:last])) + first
            positions = positions[(positions >= start) & (positions < start + len(scores.logprobs))]
            if not len(positions):
                continue
            if isinstance(rule, str):
                self.not_comparable[rule] += len(positions)
                continue
            top = scores.top[positions - start] if rule != RAW else np.empty((len(positions), 0))
            value, error = under(scores.logprobs[positions - start], top, rule, self._vocab)
            known = error <= self._limits.delta / 10
            if not known.all():
                why = f"{rule}: this engine tells too few alternatives to normalize by"
                self.not_comparable[why] += int((~known).sum())
            positions, value = positions[known], value[known]
            expected[positions] = value
            for version, within in _versions(one, positions):
                group = self._groups.setdefault((version, rule), _Group(rule))
                group.sampled |= _sampled_with(one, at, sampling)
                self._count(group, one, positions[within], value[within])
        self._numbers.add((expected.astype(np.float64) - one.logprobs)[~np.isnan(expected)])
        return expected

    def numbers(self) -> Numbers:
        """Return how far apart scores and records are."""
        return self._numbers.numbers()

    def _count(self, group: _Group, one: Trajectory, positions: npt.NDArray[np.int64], value: Values) -> None:
        recorded = one.logprobs[positions].astype(np.float64)
        apart = ~(np.abs(recorded - value) <= self._limits.delta)
        group.tokens += len(positions)
        group.apart += int(apart.sum())
        group.total += float(np.abs(recorded - value)[np.isfinite(value)].sum())
        if len(group.sequences) < _SEQUENCES:
            group.sequences.append((recorded, value))
        if apart.any() and len(group.doubts) < _LOOKED_AT:
            some = positions[:_TOKENS]
            group.doubts.append(Doubt(one, int(some[0]), int(some[-1]) + 1, some))

    def doubts(self) -> Iterator[Doubt]:
        """Yield what to score again, with up to `LOOK_TOP` alternatives."""
        for group in self._groups.values():
            if self._too_far(group):
                yield from group.doubts

    def look(self, doubt: Doubt, scores: Scores) -> None:
        """Take scores of a doubt's ids from its start on, with alternatives."""
        at = doubt.positions - doubt.start
        recorded = doubt.trajectory.logprobs[doubt.positions].astype(np.float64)
        tokens = Tokens(recorded, scores.logprobs[at].astype(np.float64), scores.top[at])
        next(group for group in self._groups.values() if doubt in group.doubts).found.append(tokens)

    def causes(self) -> tuple[Attribution, ...]:
        """Return why, for each version of the weights and distribution whose numbers are too far apart."""
        return tuple(self._cause(key[0], group) for key, group in self._groups.items() if self._too_far(group))

    def _untold(self, group: _Group) -> str:
        """Which distribution could not be tried for want of alternatives; empty if all could."""
        for rule in group.sampled if group.found else ():
            tokens = _joined(group.found)
            error = under(tokens.own, tokens.top, rule, self._vocab)[1]
            # Of a token that is nearly certain every rule says the same.
            if (error[tokens.own < -0.1] < 0.3).mean() < 0.5:
                return (
                    f"this engine tells too few alternatives to try {rule}; score with transformers to tell them apart"
                )
        return ""

    def _too_far(self, group: _Group) -> bool:
        return bool(
            group.tokens
            and (group.apart / group.tokens > self._limits.share or group.total / group.tokens > self._limits.mean)
        )

    def _cause(self, version: str, group: _Group) -> Attribution:
        causes, detail = self._rule_or_other(version, group)
        return Attribution(causes, detail, version, str(group.declared), group.tokens, group.apart)

    def _rule_or_other(self, version: str, group: _Group) -> tuple[tuple[Cause, ...], str]:
        rule = None
        if group.found:
            joined = _joined(group.found)
            rule = explaining_rule(joined, group.declared, group.sampled, self._limits, self._vocab)
        if rule is None:
            untold = self._untold(group)
            if untold:
                return ("temperature", "truncation", "weights"), untold
            others = [one for key, one in self._groups.items() if key[0] != version]
            if others and not any(map(self._too_far, others)) and group.apart > group.tokens / 4:
                return ("weights",), "the numbers of other versions of the weights agree"
            return ids_or_weights(group.sequences, self._limits, version != "unknown")
        causes: list[Cause] = []
        if abs(rule.temperature - group.declared.temperature) > 1e-6:
            causes.append("temperature")
        if rule.truncates or group.declared.truncates:
            causes.append("truncation")
        known = "the likeliest tokens alone, cut in a way that was not found" if np.isnan(rule.top_p) else str(rule)
        return tuple(causes), f"the recorded numbers are those under {known}"


def _versions(one: Trajectory, positions: npt.NDArray[np.int64]) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Which of the positions each version of the weights sampled."""
    found: dict[str, npt.NDArray[np.bool_]] = {}
    for start, end, version in one.weight_spans:
        within = (positions >= start) & (positions < end)
        if within.any():
            found[version] = found.get(version, np.zeros(len(positions), bool)) | within
    yield from found.items()


def _sampled_with(one: Trajectory, at: int, sampling: Mapping[int, Mapping[str, Any]] | None) -> set[Rule]:
    """What a turn was sampled with, as far as the record says it: tried first as an explanation."""
    found = set()
    of = one.sampled_from[at]
    if of is not None and of.temperature:
        found.add(Rule(of.temperature))
        told = (sampling or {}).get(one.turns[at])
        if told is not None:
            cut = Rule(1.0, float(told.get("min_p", 0)), int(told.get("top_k", 0)), float(told.get("top_p", 1)))
            found |= {cut, Rule(of.temperature, cut.min_p, cut.top_k, cut.top_p)}
    return found


def _joined(found: Sequence[Tokens]) -> Tokens:
    width = min(one.top.shape[1] for one in found)
    return Tokens(
        np.concatenate([one.recorded for one in found]),
        np.concatenate([one.own for one in found]),
        np.concatenate([one.top[:, :width] for one in found]),
    )
