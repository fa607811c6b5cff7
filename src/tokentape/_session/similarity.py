"""Compare texts by their runs of 12 characters, which also works for languages without spaces between words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Runs = NDArray[np.uint64]
"""Hashes of a normalized text's character runs. A text that is shorter than a run has one hash."""

_RUN = 12
"""The length of a run in characters."""

_MOST = 40_000
"""The number of characters that are compared; the rest of a longer text is ignored."""

_FACTORS = np.array([pow(0x9E3779B97F4A7C15, index + 1, 1 << 64) for index in range(_RUN)], np.uint64)


def normalized(text: str) -> str:
    """Return the text in lower case, with each run of white space replaced by one space."""
    return " ".join(text[:_MOST].split()).casefold()


def _runs(text: str) -> Runs:
    codes = np.zeros(max(len(text), _RUN), np.uint64)
    # Codes are shifted by one so that a short text's padding differs from U+0000.
    codes[: len(text)] = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64) + 1
    runs: Runs = sliding_window_view(codes, _RUN) @ _FACTORS
    return runs


def shingles(text: str) -> Runs:
    """Return the distinct runs of a normalized text, sorted."""
    return np.unique(_runs(text))


def start(text: str) -> Runs:
    """Return the first run of a text."""
    return _runs(text[:_RUN])


def probes(text: str) -> Runs:
    """Return runs at regular distances, about 128 for a long text. A text with half of them quotes this text."""
    return _runs(text)[:: max(len(text) // 128, 1)].copy()


def _common(ours: Runs, theirs: Runs) -> Runs:
    fewer, more = sorted((ours, theirs), key=len)
    if not len(fewer):
        return fewer
    common: Runs = fewer[more[np.minimum(np.searchsorted(more, fewer), len(more) - 1)] == fewer]
    return common


def similar(ours: Runs, theirs: Runs) -> bool:
    """Return whether two texts share a third of their `shingles`."""
    both = len(ours) + len(theirs)
    return 4 * min(len(ours), len(theirs)) >= both and 4 * len(_common(ours, theirs)) >= both


class TextIndex:
    """Indexes texts by some of their runs, to find which of them a given text quotes."""

    def __init__(self, texts: Mapping[int, Runs]) -> None:
        self._numbers: dict[int, list[int]] = {}
        for number, runs in texts.items():
            for run in runs.tolist():
                self._numbers.setdefault(run, []).append(number)
        self._runs = np.array(sorted(self._numbers), np.uint64)

    def found_in(self, runs: Runs) -> Counter[int]:
        """Count each text's runs that are also in `runs`, the `shingles` of a different text."""
        common = _common(self._runs, runs).tolist()
        return Counter(number for run in common for number in self._numbers[run])
