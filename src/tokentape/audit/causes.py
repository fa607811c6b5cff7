"""Why log-probabilities that should be the same are not: other ids, temperature, truncation or weights.

What was recorded is held against what the model itself says of the same ids. If one temperature, or one way of cutting
the likeliest tokens out, turns the one into the other, that is the cause. Else the numbers themselves differ. Those of
other weights do so from the first sampled token of a sequence on; where a sequence agrees at first and then no more,
the same weights saw something else from there on: other ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit.rescaling import RAW, Rule, Values, under

Cause: TypeAlias = Literal["ids", "temperature", "truncation", "weights"]


@dataclass(frozen=True, slots=True)
class Precision:
    """How far apart the numbers of two healthy sides are that compute in this precision."""

    delta: float
    """Nats that rounding may move one token."""
    share: float
    """Share of tokens that it may move further."""
    mean: float
    """Nats: largest mean of the absolute difference."""


PRECISIONS = {
    "float32": Precision(delta=1e-3, share=0.0, mean=1e-4),
    "bfloat16": Precision(delta=0.3, share=0.03, mean=0.06),
}
"""By the lower precision of both sides. See docs/how-to/score.md for what was measured."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """Why the numbers of some turns are too far apart."""

    causes: tuple[Cause, ...]
    """Those that are named; several if both hold, or if it can't be told which one does."""
    detail: str
    weight_version: str
    """Of the turns."""
    expected: str
    """What the record says that its numbers are under: `temperature 1`."""
    tokens: int
    apart: int
    """How many tokens are further apart than rounding explains."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens whose numbers belong to one distribution, sampled by one version of the weights."""

    recorded: Values
    own: Values
    """What the model says of them."""
    top: npt.NDArray[np.float32]
    """The largest log-probabilities of each position, shape [tokens, alternatives]."""


_CERTAIN = 0.01
"""Nats below 0 within which a token is certain to the model: neither temperature nor weights change it much."""

_EXPLAINED = 0.9
"""Share of the tokens that a rule has to explain."""

_PS = (*(n / 20 for n in range(1, 20)), 0.92, 0.97, 0.98, 0.99, 0.995)
_KS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 30, 32, 40, 50, 64, 100)
_MIN_PS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3)


def explaining_rule(
    tokens: Tokens, declared: Rule, sampled: Iterable[Rule], limits: Precision, vocab: int
) -> Rule | None:
    """Return the simplest rule under which the model's numbers are the recorded ones; None if there is none.

    `declared` is what the record says; `sampled` are rules that tokens were sampled with, which are tried first. A
    `top_p` of NaN stands for a cut that is none of those tried.
    """
    expected, error = under(tokens.own, tokens.top, declared, vocab)
    certain = (tokens.own > -_CERTAIN) & (tokens.recorded > -_CERTAIN)
    before = np.abs(tokens.recorded - np.where(np.isfinite(expected), expected, -1e9))
    telling = ~certain & ((before > limits.delta) | ~np.isfinite(error) | (error > limits.delta))
    if telling.sum() < 8:
        return None
    temperatures = {rule.temperature: None for rule in (RAW, declared, *sampled)}
    fitted = _fitted_temperature(tokens, vocab)
    plain = [Rule(one) for one in (*temperatures, *([] if fitted is None else [fitted]))]
    known_cuts = [rule for rule in sampled if rule.truncates]
    cuts = [
        Rule(one, **cut)  # type: ignore[arg-type]
        for one in temperatures
        for cut in (*({"top_p": p} for p in _PS), *({"top_k": k} for k in _KS), *({"min_p": p} for p in _MIN_PS))
    ]
    for candidates in (plain, known_cuts, cuts):
        shares = [
            (_explained(tokens, rule, before, telling, limits, vocab), rule) for rule in candidates if rule != declared
        ]
        share, best = max(shares, key=lambda one: one[0], default=(0.0, RAW))
        if share >= _EXPLAINED:
            return best
    return next(
        (Rule(one, top_p=np.nan) for one in temperatures if _never_lower(tokens, Rule(one), limits, vocab)), None
    )


def _never_lower(tokens: Tokens, rule: Rule, limits: Precision, vocab: int) -> bool:
    """Whether recorded numbers are at least those under a rule, as those of any part of its tokens are."""
    value, error = under(tokens.own, tokens.top, rule, vocab)
    above = (tokens.recorded - value)[(error <= limits.delta) & (value < -_CERTAIN)]
    if len(above) < 30 or (above > limits.delta).mean() < 0.25:
        return False
    # A cut that keeps a tenth of the probability raises what it keeps by 2.3.
    return bool(((above >= -limits.delta) & (above < 3)).mean() >= 1 - limits.share - 0.02)


def _explained(
    tokens: Tokens, rule: Rule, before: Values, telling: npt.NDArray[np.bool_], limits: Precision, vocab: int
) -> float:
    """The share of the tokens, that tell something and those that agree already, which a rule explains."""
    value, error = under(tokens.own, tokens.top, rule, vocab)
    known = np.isfinite(error) & (error < 0.3)
    left = np.abs(tokens.recorded - value)
    fits = left <= limits.delta + error
    counted = known & telling
    if counted.sum() < max(8, 0.2 * telling.sum()) or np.median(left[counted]) > 0.4 * np.median(before[counted]):
        return 0.0
    others = known & ~telling
    return float(min(fits[counted].mean(), fits[others].mean() if others.any() else 1.0))


def _fitted_temperature(tokens: Tokens, vocab: int) -> float | None:
    """The temperature under which the numbers are nearest to the recorded ones, if the alternatives tell."""

    def distance(temperature: float) -> float:
        value, error = under(tokens.own, tokens.top, Rule(temperature), vocab)
        known = error < 0.3
        # Of too few it can't be told, and none is nearest.
        return float(np.abs(tokens.recorded - value)[known].mean()) if known.sum() >= 8 else np.inf

    grid = np.exp(np.linspace(np.log(0.2), np.log(4.0), 41))
    found = [distance(float(one)) for one in grid]
    at = int(np.argmin(found))
    if not np.isfinite(found[at]):
        return None
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]
    for _ in range(16):
        third = (high - low) / 3
        low, high = (low, high - third) if distance(low + third) < distance(high - third) else (low + third, high)
    return float((low + high) / 2)


def ids_or_weights(
    sequences: Iterable[tuple[Values, Values]], limits: Precision, known: bool
) -> tuple[tuple[Cause, ...], str]:
    """Return which of the two, and what shows it, from (recorded, expected) of each sequence's tokens in order.

    `known`: the record says that one version of the weights sampled them all.
    """
    clean = broken = within = 0
    for recorded, expected in sequences:
        telling = (recorded < -_CERTAIN) | (expected < -_CERTAIN)
        apart = ~(np.abs(recorded - expected)[telling] <= limits.delta)
        if not apart.any() or apart.mean() <= limits.share:
            clean += len(apart) >= 3
            continue
        broken += 1
        # Rounding moves a few tokens beyond the limit too, but seldom two of four.
        thick = [at for at in np.flatnonzero(apart) if apart[at : at + 4].mean() >= 0.5] if limits.share else []
        first = int(thick[0]) if thick else int(np.argmax(apart))
        within += first >= 3
    if within * 2 >= max(broken, 1):
        return ("ids",), f"{within} of {broken} sequences agree at first and differ from some token on"
    if clean and known:
        return ("ids",), f"{clean} sequences of the same weights agree, {broken} differ from their first token on"
    if clean:
        where = f"{clean} sequences agree, {broken} differ from their first sampled token on"
        return ("ids", "weights"), f"{where}; the record does not say which weights sampled them"
    return (
        "weights",
    ), "all sequences differ from their first sampled token on, or other ids stand in front of it in all"
