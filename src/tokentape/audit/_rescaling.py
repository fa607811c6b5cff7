"""Compute log-probabilities under temperature, top-k, top-p and min-p, with bounds on their error.

Engines score with the model's own distribution and return only the likeliest alternatives at each position. The error
from missing alternatives is bounded, so that only logprobs that are known precisely enough are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.types import TokenDistribution, Trajectory

Values: TypeAlias = npt.NDArray[np.float64]

_ROUNDING = 2e-6
"""The largest rounding error in the sum of the probabilities that an engine returns."""

_EDGE = 1e-5
"""A probability this close to a cutoff, relative to it, may be on either side of the cutoff."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Changes to the model's own distribution, applied in the order of the fields."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        return bool(self.min_p or self.top_k or self.top_p != 1)

    def __str__(self) -> str:
        cuts = {"min_p": self.min_p, "top_k": self.top_k, "top_p": self.top_p if self.top_p < 1 else 0}
        shown = {"temperature": self.temperature, **{name: value for name, value in cuts.items() if value}}
        return ", ".join(f"{name} {value:.3g}" for name, value in shown.items())


RAW = Rule()


def under(own: npt.ArrayLike, top: npt.ArrayLike, rule: Rule, vocab_size: int) -> tuple[Values, Values]:
    """Return each token's log-probability under a rule, and its largest possible error (infinite if unknown).

    `own` has the tokens' log-probabilities under the model's own distribution, shape [tokens], `top` the largest
    log-probabilities at each position, best first, shape [tokens, alternatives]. A token that the rule excludes gets
    minus infinity.
    """
    own, top = np.asarray(own, np.float64), np.asarray(top, np.float64)
    if rule == RAW:
        return own, np.zeros(len(own))
    if not top.shape[1]:
        return np.full(len(own), np.nan), np.full(len(own), np.inf)
    power = 1 / rule.temperature
    scaled = top * power
    partial = _log_of_sum(scaled)
    low = high = partial
    missing = vocab_size - top.shape[1]
    if missing > 0:
        rest = 1 - np.exp(top).sum(1)
        # Bound the sum over missing tokens, none of which is likelier than the last returned one, by two extremes: the
        # remaining probability is on as few tokens as possible, or spread evenly over all of them.
        sizes = [np.maximum(rest - _ROUNDING, 0), np.maximum(rest, 0) + _ROUNDING]
        spread = [
            (size * np.exp(top[:, -1] * (power - 1)), size**power * float(missing) ** (1 - power)) for size in sizes
        ]
        with np.errstate(divide="ignore"):
            low = np.logaddexp(partial, np.log(np.minimum(*spread[0])))
            high = np.logaddexp(partial, np.log(np.maximum(*spread[1])))
    norm = (low + high) / 2
    if not rule.truncates:
        return own * power - norm, (high - low) / 2
    return _truncated(own * power, scaled, norm, (high - low) / 2, rule, missing > 0)


def _truncated(
    own: Values, scaled: Values, norm: Values, error: Values, rule: Rule, more: bool
) -> tuple[Values, Values]:
    """Return `under` for a rule that truncates. `norm` may be off by `error`. `more`: `scaled` lacks tokens."""
    likely = np.exp(scaled - norm[:, None])
    floor = rule.min_p * likely[:, :1]
    included = likely >= floor
    edge = (np.abs(likely - floor) < _EDGE * floor).any(1) if rule.min_p else np.zeros(len(own), bool)
    total, unsure = np.ones((len(own), 1)), _EDGE + np.expm1(error[:, None])
    if rule.top_k:
        included[:, rule.top_k :] = False
    if rule.min_p or rule.top_k:
        total = np.where(included, likely, 0).sum(1, keepdims=True)
        # If the rule may keep tokens that were not returned, the total that top-p refers to is unknown.
        unsure = np.where(included[:, -1:] & more, np.inf, _EDGE)
    if rule.top_p < 1:
        before = np.cumsum(likely, 1) - likely
        edge |= (included & (np.abs(before - rule.top_p * total) < unsure)).any(1)
        included &= before < rule.top_p * total
    included[:, 0] = True
    last = np.take_along_axis(scaled, included.sum(1, keepdims=True) - 1, 1)[:, 0]
    value = own - _log_of_sum(np.where(included, scaled, -np.inf))
    value[own < last - _EDGE] = -np.inf
    return value, np.where(edge | (included[:, -1] & more), np.inf, 0.0)


def recorded_rules(
    trajectory: Trajectory, sampling: Mapping[int, Mapping[str, Any]] | None = None, adapter: str | None = None
) -> list[Rule | str]:
    """Return for each turn the rule of its logprobs, or why scores by `adapter` can't be compared with them."""
    turns = zip(trajectory.turns, trajectory.logprobs_of, trajectory.adapters, strict=True)
    return [other_adapter(own, adapter) or _rule(of, (sampling or {}).get(turn)) for turn, of, own in turns]


def other_adapter(own: str | None, adapter: str | None) -> str | None:
    """Return why a turn that `own` sampled can't be compared with scores by `adapter`; None if it can."""
    if own == adapter:
        return None
    sampled, scored = (f"adapter {name!r}" if name else "the model without an adapter" for name in (own, adapter))
    return f"sampled with {sampled}, but scored with {scored}"


def _rule(of: TokenDistribution | None, sampling: Mapping[str, Any] | None) -> Rule | str:
    if of is None or of.temperature is None:
        return "the record does not say which distribution its log-probabilities belong to"
    for what, applied in (("penalties", of.penalties), ("a grammar", of.grammar)):
        if applied is not False:
            verb = "are" if applied else "may be"
            return f"recorded log-probabilities {verb} taken after {what}, but scores are taken before"
    if of.truncation is False:
        return Rule(of.temperature)
    if of.truncation is None or sampling is None:
        return "recorded log-probabilities are taken after truncation, but scores are taken before"
    cuts: Sequence[tuple[str, float]] = (("min_p", 0.0), ("top_k", 0), ("top_p", 1.0))
    min_p, top_k, top_p = (sampling.get(name, default) for name, default in cuts)
    return Rule(of.temperature, float(min_p), int(top_k), float(top_p))


def _log_of_sum(logs: Values) -> Values:
    """Return the logarithm of the sum of each row, given its logarithms, faster than `logaddexp.reduce`."""
    most = logs.max(1, keepdims=True)
    most[np.isinf(most)] = 0.0
    with np.errstate(divide="ignore"):
        sums: Values = np.log(np.exp(logs - most).sum(1)) + most[:, 0]
    return sums
