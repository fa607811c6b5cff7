"""Shares with their 95 % confidence intervals, over data that is seen once and not kept.

Whole samples that changed: Wilson's interval. Tokens: those of one sequence stand or fall together, so sequences are
drawn again, not tokens. The bootstrap is a Poisson one, each sequence with a weight from Poisson(1) in each replicate:
it needs one pass and the sums only. Its draws are seeded, so that the same data gives the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

REPLICATES = 400

Key: TypeAlias = tuple[str, str]
"""What a share is of: a dimension and its value."""

_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of `total` changed."""

    changed: int
    total: int
    low: float
    """Lower end of the 95 % confidence interval of the share."""
    high: float

    @property
    def share(self) -> float:
        """`changed / total`, 0 if there are none."""
        return self.changed / self.total if self.total else 0.0


def wilson(changed: int, total: int) -> tuple[float, float]:
    """Wilson's interval of a share; (0, 1) if there is nothing to tell from.

    >>> [round(end, 3) for end in wilson(0, 100)]
    [0.0, 0.037]
    """
    if not total:
        return 0.0, 1.0
    share, part = changed / total, _Z**2 / total
    middle = (share + part / 2) / (1 + part)
    reach = _Z / (1 + part) * math.sqrt(share * (1 - share) / total + part / (4 * total))
    # At either end rounding must not leave what is exact.
    return (0.0 if not changed else middle - reach), (1.0 if changed == total else middle + reach)


class Sums:
    """Changed and all, by key: exact, and in each replicate of the bootstrap."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._index: dict[Key, int] = {}
        self._exact = np.zeros((16, 2), np.int64)
        self._replicates = np.zeros((REPLICATES, 16, 2))
        self._sequences = np.zeros(16, np.int64)
        self._changed_sequences = np.zeros(16, np.int64)

    def add(self, sequences: Sequence[Mapping[Key, tuple[int, int]]]) -> None:
        """Add sequences, each with (changed, all) by key."""
        for key in {key: None for one in sequences for key in one}:
            self._index.setdefault(key, len(self._index))
        self._grow()
        values = np.zeros((len(sequences), len(self._index), 2))
        for row, one in zip(values, sequences, strict=True):
            for key, counts in one.items():
                row[self._index[key]] = counts
        many = len(self._index)
        self._exact[:many] += values.sum(0).astype(np.int64)
        self._sequences[:many] += (values[:, :, 1] > 0).sum(0)
        self._changed_sequences[:many] += (values[:, :, 0] > 0).sum(0)
        weights = self._random.poisson(1.0, (REPLICATES, len(sequences))).astype(np.float64)
        drawn = weights @ values.reshape(len(sequences), -1)
        self._replicates[:, :many] += drawn.reshape(REPLICATES, many, 2)

    def keys(self) -> list[Key]:
        """All keys, in the order in which they came."""
        return list(self._index)

    def rate(self, key: Key) -> Rate:
        """The share that changed, with an interval over sequences.

        Where none changed, or all, the bootstrap would tell nothing. Then it is Wilson's, over sequences in place of
        tokens, which is too wide rather than too narrow.
        """
        at = self._index.get(key)
        if at is None:
            return Rate(0, 0, 0.0, 1.0)
        changed, total = self._exact[at].tolist()
        sequences, changed_sequences = int(self._sequences[at]), int(self._changed_sequences[at])
        if changed in (0, total) or sequences < 2:
            low, high = wilson(changed_sequences, sequences)
            return Rate(changed, total, min(low, changed / total if total else 0.0), high)
        low, high = _percentiles(self._replicates[:, at])
        return Rate(changed, total, low, high)

    def _grow(self) -> None:
        size = len(self._exact)
        while size < len(self._index):
            size *= 2
        more = size - len(self._exact)
        if more:
            self._exact = np.pad(self._exact, ((0, more), (0, 0)))
            self._replicates = np.pad(self._replicates, ((0, 0), (0, more), (0, 0)))
            self._sequences = np.pad(self._sequences, (0, more))
            self._changed_sequences = np.pad(self._changed_sequences, (0, more))


def _percentiles(sums: npt.NDArray[np.float64]) -> tuple[float, float]:
    drawn = sums[sums[:, 1] > 0]
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return float(low), float(high)
