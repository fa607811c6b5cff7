"""Name causes of differences from where logprobs differ, and by how much.

Different ids or weights change nearly all later logprobs. If most tokens after the first difference agree, neither is
the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit._rescaling import Values

CERTAIN = 0.01
"""A token with a logprob above minus this is certain: neither temperature nor weights change its logprob much."""

_ENOUGH = 8
"""The number of tokens that zeros, a shift or an outlying turn need as evidence."""
_OUTLYING = 0.25
"""The share of a turn's tokens beyond the limit for one token that rounding can't explain."""
_VALUES = 3
"""The number of different logprobs that rounding needs as evidence. By chance, one in thousands is a rounded value."""
_MANY, _RELATED = 30, 0.3
"""The number of tokens that a lack of correlation needs as evidence, and the lowest correlation of related logprobs."""
_SHIFTED = 0.9
"""The share of tokens that a shift must explain."""

Cause: TypeAlias = Literal[
    "ids",
    "temperature",
    "truncation",
    "weights",
    "kernels",
    "shift",
    "rounding",
    "isolated tokens",
    "zeros",
    "scale",
    "not known",
]
Found: TypeAlias = tuple[tuple[Cause, ...], str]
"""The causes and the reason."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The differences that rounding in a precision may cause between two correct computations."""

    delta: float
    """The usual limit for one token, in nats."""
    share: float
    """The share of tokens that may exceed `delta`."""
    mean: float
    """The mean absolute difference, in nats. Fewer than half of the tokens exceed it."""


PRECISIONS = {
    "float32": Precision(delta=1e-3, share=0.0, mean=1e-4),
    "bfloat16": Precision(delta=0.3, share=0.03, mean=0.06),
}
"""Limits by precision, the lower one if two sides differ. docs/how-to/score.md has the measurements."""


class Compared(NamedTuple):
    """Tokens of one turn that were compared. Shape [tokens]."""

    recorded: Values
    expected: Values
    positions: npt.NDArray[np.int64]

    def distance(self) -> Values:
        return apart_by(self.recorded, self.expected)

    def outlying(self, limits: Precision) -> bool:
        """Return whether more tokens are beyond the limit for one token than any rounding moves there."""
        apart = self.distance() > limits.delta
        return bool(apart.sum() >= _ENOUGH and apart.mean() > _OUTLYING)


def apart_by(recorded: Values, expected: Values, slack: Values | float = 0.0) -> Values:
    """Return absolute differences, less the `slack` that rounding explains; infinite if there is no number."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(recorded - expected) - slack
    return np.where(np.isnan(distance), np.inf, np.maximum(distance, 0.0))


class Grid:
    """The values that recorded logprobs were rounded to; an empty name if they have all digits of float32."""

    def __init__(self, recorded: Values) -> None:
        self.name = ""
        distinct = np.unique(recorded[recorded != 0])
        # A number is a short decimal by chance far more rarely than it has few binary digits.
        grids = _GRIDS if len(distinct) >= _VALUES else tuple(_DECIMALS) if len(distinct) else ()
        self.name = next((name for name in grids if np.array_equal(_rounded(distinct, name), distinct)), "")

    def slack(self, recorded: Values) -> Values:
        """Return the largest error from rounding to these values."""
        if not self.name:
            return np.zeros(len(recorded))
        if self.name in _DECIMALS:
            return np.full(len(recorded), 0.5 * 10.0 ** -_DECIMALS[self.name])
        # The number of binary digits after the first one.
        digits, least = (7, -126) if self.name == "bfloat16" else (10, -14)
        exponent = np.maximum(np.frexp(recorded)[1] - 1, least)
        return np.asarray(0.5 * np.exp2(exponent - digits), np.float64)


_DECIMALS = {"1 decimal": 1, "2 decimals": 2, "3 decimals": 3}
_GRIDS = ("bfloat16", "float16", *_DECIMALS)
"""Coarser ones first, because their values may be values of a finer one too."""


def _rounded(values: Values, grid: str) -> Values:
    single = values.astype(np.float32)
    if grid in _DECIMALS:
        return np.round(values, _DECIMALS[grid]).astype(np.float32).astype(np.float64)
    if grid == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float64)
    # Exact values of bfloat16 have zeros in the lower half.
    return (single.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def obvious_cause(turns: Sequence[Compared], grid: Grid, limits: Precision, blank: bool, whole: bool) -> Found | None:
    """Return zeros, a rounding of the recorded logprobs or a shift by one token, if it explains all differences.

    `blank`: all recorded logprobs are 0. `whole`: all tokens were compared.
    """
    broken = [turn for turn in turns if (turn.distance() > limits.delta).mean() > limits.share]
    zeros = turns if blank else broken if whole and not any(turn.recorded.any() for turn in broken) else []
    if sum(len(turn.recorded) for turn in zeros) >= _ENOUGH:
        why = "as if the engine returned none, or sampled only the likeliest token at each position"
        of = "" if blank else " of the turns that differ"
        short: tuple[Cause, ...] = ("rounding",) if min(turn.expected.min() for turn in zeros) > -0.1 else ()
        return ("zeros", "truncation", *short), f"all recorded logprobs{of} are 0, {why}"
    # Values that were cut instead of rounded are off by up to twice the slack, to one side.
    for how, side in (("rounded", 0), ("cut", -1), ("cut", 1)) if grid.name else ():
        slacks = [grid.slack(turn.recorded) for turn in turns]
        pairs = zip(turns, slacks, strict=True)
        distances = np.concatenate([apart_by(turn.recorded + side * s, turn.expected, s) for turn, s in pairs])
        if (distances > limits.delta).mean() <= limits.share and distances.mean() <= limits.mean:
            return ("rounding",), f"the recorded logprobs are {how} to {grid.name}, which explains the differences"
    for by, neighbor in ((1, "next"), (-1, "previous")):
        if _shifted(broken, by, grid, limits):
            return ("shift",), f"the recorded logprobs are shifted by one: each is that of the {neighbor} token"
    return None


def scale_cause(turns: Sequence[Compared], grid: Grid, limits: Precision) -> Found | None:
    """Return the cause if the recorded numbers are probabilities, or logprobs times a constant, as in another base.

    Return `not known` if they are logprobs plus a constant, which no other weights, temperature or truncation explain.
    """
    broken = [turn for turn in turns if (turn.distance() > limits.delta).mean() > limits.share]
    if not broken:
        return None
    recorded, expected = (np.concatenate(values) for values in list(zip(*broken, strict=True))[:2])
    telling = np.isfinite(expected) & (expected < -CERTAIN)
    if telling.sum() < _ENOUGH:
        return None
    factor = float(np.median(recorded[telling] / expected[telling]))
    named = next((name for name, value in _FACTORS.items() if abs(factor - value) < 1e-3), "")
    what = f"the logprobs times {factor:.4g}{named and f', as with {named}'}"
    candidates: list[tuple[Cause, str, Values]] = []
    if factor:
        candidates.append(("scale", f"the recorded numbers are {what}", factor * expected))
    candidates.append(("scale", "the recorded numbers are probabilities, not logprobs", np.exp(expected)))
    added = float(np.median((recorded - expected)[telling & (recorded != 0)])) if recorded[telling].any() else 0.0
    if abs(added) > limits.delta:
        what = f"the recorded numbers are the logprobs {added:+.3g}, at most 0"
        candidates.append(("not known", what, np.minimum(expected + added, 0)))
    for cause, why, values in candidates:
        distance = apart_by(recorded, values, grid.slack(recorded))
        if (distance > limits.delta).mean() <= limits.share and distance.mean() <= limits.mean:
            return (cause,), why
    return None


_FACTORS = {"base 10": 1 / np.log(10), "base 2": 1 / np.log(2), "another sign": -1.0}


def _shifted(turns: Sequence[Compared], by: int, grid: Grid, limits: Precision) -> bool:
    """Return True if recorded logprobs are those of the tokens `by` positions later."""
    fits = []
    for turn in turns:
        here, there = (slice(None, -1), slice(1, None))[::by]
        recorded, own, other = turn.recorded[here], turn.expected[here], turn.expected[there]
        slack = grid.slack(recorded)
        adjacent = turn.positions[there] - turn.positions[here] == by
        # Neighbors with nearly the same logprob fit in any case.
        telling = adjacent & (apart_by(own, other) > 4 * limits.delta + slack)
        fits.append(apart_by(recorded, other, slack)[telling] <= limits.delta)
    together = np.concatenate(fits) if fits else np.empty(0, bool)
    return len(together) >= _ENOUGH and bool(together.mean() >= _SHIFTED)


class Deviations:
    """Where the logprobs of turns deviate from the expected ones."""

    def __init__(self, turns: Sequence[Compared], limits: Precision) -> None:
        self._turns, self._limits = turns, limits
        self._clean = self._within = self._lasting = self._passing = self._alone = 0
        self._far: list[npt.NDArray[np.bool_]] = []
        for turn in turns:
            telling = (turn.recorded < -CERTAIN) | (turn.expected < -CERTAIN)
            self._count(turn.distance()[telling])

    def _count(self, distance: Values) -> None:
        limits = self._limits
        apart = distance > limits.delta
        if not apart.any() or apart.mean() <= limits.share:
            self._clean += len(apart) >= 3
            return
        self._far.append(distance > limits.mean)
        first = int(np.argmax(apart))
        if limits.share:
            # Rounding moves a few tokens beyond the limit too, but seldom two of four. It hides small effects, so more
            # than such a cluster can't be required.
            thick = [n for n in np.flatnonzero(apart).tolist() if apart[n : n + 4].sum() >= 2]
            first, lasts = (thick[0], True) if thick else (first, False)
        else:
            # Later tokens with another context may differ by less than the limit, but by more than usual rounding.
            after = distance[first + 1 :] > limits.mean
            if not len(after) and not first:
                self._alone += 1
                return
            lasts = bool(len(after) and after.mean() > 0.5)
        if lasts:
            self._lasting += 1
            # In bfloat16, tokens within the limit may still differ by more than rounding explains on average.
            self._within += first >= 3 and bool(distance[:first].mean() <= limits.mean or not limits.share)
        else:
            self._passing += 1

    @property
    def lasting(self) -> bool:
        """Whether most tokens after the first difference differ too, in most turns that have a difference."""
        return self._lasting > self._passing

    @property
    def everywhere(self) -> bool:
        """Whether nearly all tokens of turns with a difference differ, as another temperature makes them."""
        share = 0.5 if self._limits.share else 0.9
        return bool(self._far) and bool(np.concatenate(self._far).mean() >= share)

    def passing_cause(self) -> Found:
        """Return the cause of differences after which most tokens agree."""
        limits = self._limits
        if self._alone and not self._passing:
            alone = "each turn with a difference has only one token that tells"
            return ("isolated tokens", "ids", "weights"), alone
        distance = np.concatenate([turn.distance() for turn in self._turns])
        apart = distance > limits.delta
        recorded = np.concatenate([turn.recorded for turn in self._turns])
        spread = not apart.any() or bool(distance[~apart].mean() > limits.mean)
        if spread and (limits.share or self._small()):
            size = "" if limits.share else ", by no more than rounding in bfloat16 explains"
            return ("kernels", "weights"), f"the differences are spread over all tokens{size}"
        for edge, name in ((0, "first"), (-1, "last")):
            at_edge = sum(int((turn.distance() > limits.delta)[edge]) for turn in self._turns)
            if at_edge >= (0.9 if limits.share else 1) * apart.sum():
                return ("isolated tokens",), f"only the {name} token of a turn differs"
        where = "most tokens after the first different one agree"
        if limits.share:
            return ("isolated tokens", "ids", "weights"), f"{where}; at this precision, small effects can't be seen"
        if (distance <= limits.delta + 2**-7 * np.abs(recorded)).all():
            small = "by no more than rounding in bfloat16 explains"
            return ("isolated tokens", "rounding"), f"{where}, and the others differ {small}"
        return ("isolated tokens",), f"{where}, unlike after a change of ids or weights"

    def lasting_cause(self, version_known: bool, others_agree: bool) -> Found:
        """Return the cause of differences that last.

        `version_known`: the record names the weights of these turns. `others_agree`: turns of other weights agree.
        """
        broken, clean = self._lasting, self._clean
        if self._limits.share == 0 and self._small() and self._early():
            small = "sequences differ from their first tokens on, by no more than rounding in bfloat16 explains"
            return ("kernels", "weights"), small
        if self._within * 2 >= broken:
            return ("ids",), f"{self._within} of {broken} sequences agree at first and differ from a later token on"
        if not self._related():
            return ("not known",), "the recorded logprobs do not rise with the scored ones, as if of other tokens"
        if others_agree:
            return ("weights",), "the logprobs of the other weight versions agree"
        if clean:
            where = f"{clean} sequences agree, {broken} differ from their first sampled token on"
            record = "names the same weights for all of them" if version_known else "does not name their weights"
            return ("ids", "weights"), f"{where}; the record {record}"
        first = "all sequences differ from their first sampled token on"
        return ("weights",), f"{first}; different ids before that token in all of them would look the same"

    def _related(self) -> bool:
        """Return whether the recorded logprobs correlate with the expected ones, in turns that differ.

        If only the weights or earlier ids are wrong, the correlation is about 0.5 or higher. True for too few tokens.
        """
        apart = [turn for turn in self._turns if (turn.distance() > self._limits.delta).mean() > self._limits.share]
        recorded, expected = (np.concatenate(values) for values in list(zip(*apart, strict=True))[:2])
        telling = ((recorded < -CERTAIN) | (expected < -CERTAIN)) & np.isfinite(expected)
        recorded, expected = recorded[telling], expected[telling]
        if len(recorded) < _MANY:
            return True
        return bool(np.ptp(recorded) and np.ptp(expected) and np.corrcoef(recorded, expected)[0, 1] > _RELATED)

    def _small(self) -> bool:
        """Return True if rounding in bfloat16 explains the size of the differences."""
        coarse = PRECISIONS["bfloat16"]
        together = np.concatenate([turn.distance()[turn.recorded < -CERTAIN] for turn in self._turns])
        if not len(together) or any(turn.outlying(coarse) for turn in self._turns):
            return False
        return bool(together.mean() <= coarse.mean and (together > coarse.delta).mean() <= coarse.share)

    def _early(self) -> bool:
        """Return True if turns differ from the start, unlike after a change of ids within them."""
        apart = [turn.distance()[turn.recorded < -CERTAIN] for turn in self._turns]
        long = [turn for turn in apart if len(turn) >= 4] or [turn for turn in apart if len(turn)]
        early = [(turn[:4] > self._limits.mean).any() for turn in long]
        return bool(early and np.mean(early) >= 0.75)
