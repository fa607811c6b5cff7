"""Measure how far apart two sides' log-probabilities are, without keeping them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

K3_CLAMP = 10.0
"""The largest share of one token in k3, so that a few outliers don't dominate it."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Differences of logprobs over trained tokens: trainer - recorded, in nats."""

    tokens: int = 0
    not_finite: int = 0
    """Tokens with NaN or minus infinity in the trainer. They are in no other number."""
    mean: float = 0.0
    """Mean of the absolute difference."""
    max: float = 0.0
    """Largest absolute difference."""
    k3: float = 0.0
    """Mean of exp(d) - 1 - d, each at most `K3_CLAMP`: an estimate of KL(sampler || trainer)."""
    ess_tokens: float = 1.0
    """Effective sample size of the importance weights exp(d), one per token, as a share of the tokens."""
    ess_sequences: float = 1.0
    """The same with one weight per sequence, the product of its tokens'."""


class NumbersTally:
    """Counts `Numbers`, a sequence at a time."""

    def __init__(self) -> None:
        self._tokens = self._not_finite = 0
        self._total = self._largest = self._k3 = 0.0
        self._per_token, self._per_sequence = _Weights(), _Weights()

    def add(self, apart: npt.NDArray[np.float64]) -> None:
        """Add the differences of one sequence, float64 [tokens]."""
        finite = apart[np.isfinite(apart)]
        self._not_finite += len(apart) - len(finite)
        if not len(finite):
            return
        size = np.abs(finite)
        # So that exp does not overflow: from 50 on the clamp holds anyway.
        bounded = np.minimum(finite, 50)
        self._tokens += len(finite)
        self._total += float(size.sum())
        self._largest = max(self._largest, float(size.max()))
        self._k3 += float(np.minimum(np.expm1(bounded) - bounded, K3_CLAMP).sum())
        self._per_token.add(finite)
        self._per_sequence.add(finite.sum(keepdims=True))

    def merge(self, other: NumbersTally) -> None:
        """Add what another one counted."""
        self._tokens += other._tokens
        self._not_finite += other._not_finite
        self._total += other._total
        self._largest = max(self._largest, other._largest)
        self._k3 += other._k3
        self._per_token.merge(other._per_token)
        self._per_sequence.merge(other._per_sequence)

    def mean_ratio(self) -> float:
        """Return the mean of the importance ratios exp(d) of the tokens."""
        return self._per_token.mean()

    def numbers(self) -> Numbers:
        """Return what was counted."""
        if not self._tokens:
            return Numbers(not_finite=self._not_finite)
        return Numbers(
            tokens=self._tokens,
            not_finite=self._not_finite,
            mean=self._total / self._tokens,
            max=self._largest,
            k3=self._k3 / self._tokens,
            ess_tokens=self._per_token.effective_share(),
            ess_sequences=self._per_sequence.effective_share(),
        )


class _Weights:
    """Sums of importance weights and of their squares, in units of the largest weight so far."""

    def __init__(self) -> None:
        self._count = 0
        self._log_unit = -np.inf
        self._sum = self._squares = 0.0

    def add(self, log_weights: npt.NDArray[np.float64]) -> None:
        other = _Weights()
        other._log_unit = float(log_weights.max())
        weights = np.exp(log_weights - other._log_unit)
        other._count, other._sum, other._squares = len(weights), float(weights.sum()), float((weights**2).sum())
        self.merge(other)

    def merge(self, other: _Weights) -> None:
        if not other._count:
            return
        unit = max(self._log_unit, other._log_unit)
        mine, theirs = np.exp(self._log_unit - unit), np.exp(other._log_unit - unit)
        self._count += other._count
        self._sum = float(self._sum * mine + other._sum * theirs)
        self._squares = float(self._squares * mine**2 + other._squares * theirs**2)
        self._log_unit = unit

    def mean(self) -> float:
        return float(self._sum * np.exp(self._log_unit)) / self._count

    def effective_share(self) -> float:
        """(sum of weights)^2 / (sum of squares) / how many."""
        return self._sum**2 / self._squares / self._count


def logprob_numbers(sequences: Iterable[npt.NDArray[np.float64]]) -> Numbers:
    """Return `Numbers` of differences, an array for each sequence."""
    tally = NumbersTally()
    for one in sequences:
        tally.add(one)
    return tally.numbers()
