"""Align two sequences with as few unmatched elements as possible: the greedy algorithm of Myers (1986).

`difflib` leaves more elements unmatched, and takes quadratic time if elements repeat, as special tokens do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

Block: TypeAlias = tuple[int, int, int]
"""(start in `a`, start in `b`, length) of a run of equal elements."""


class Segment(NamedTuple):
    """A half-open range of each of two sequences."""

    start: int
    end: int
    other_start: int
    other_end: int

    @property
    def size(self) -> int:
        """The length of the longer range."""
        return max(self.end - self.start, self.other_end - self.other_start)

    @property
    def one_sided(self) -> bool:
        """True if one range is empty."""
        return self.start == self.end or self.other_start == self.other_end


_Path: TypeAlias = "tuple[Block, _Path] | None"
_NOWHERE: tuple[int, _Path] = (-1, None)


def first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the first position where two sequences differ, or the shorter length if one is a prefix of the other."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def common_blocks(a: Sequence[Hashable], b: Sequence[Hashable], most: int) -> list[Block] | None:
    """Return the runs of a longest common subsequence, in order, or None if it leaves out more than `most`.

    Time is linear in the lengths and quadratic in the number of elements that differ.

    >>> common_blocks("abcabba", "cbabac", most=10)
    [(2, 0, 1), (3, 2, 2), (6, 4, 1)]
    """
    head = first_difference(a, b)
    tail = first_difference(a[head:][::-1], b[head:][::-1])
    n, m = len(a) - tail, len(b) - tail
    # The furthest position in `a` reached on each diagonal (x - y), with the runs on the way there.
    reached: dict[int, tuple[int, _Path]] = {1: (head, None)}
    for edits in range(min(n + m - 2 * head, most) + 1):
        # Skip diagonals that lie outside of the two sequences.
        first, last = edits - 2 * max(0, edits + head - m), edits - 2 * max(0, edits + head - n)
        for k in range(-first, last + 1, 2):
            (left, from_left), (above, from_above) = reached.get(k - 1, _NOWHERE), reached.get(k + 1, _NOWHERE)
            down = k == -edits or (k != edits and left < above)
            x, path = (above, from_above) if down else (left + 1, from_left)
            start = x
            while x < n and x - k < m and a[x] == b[x - k]:
                x += 1
            if x > start:
                path = (start, start - k, x - start), path
            if x >= n and x - k >= m:
                return list(_joined([(0, 0, head), *_in_order(path), (n, m, tail)]))
            reached[k] = x, path
    return None


def anchored_blocks(a: Sequence[Hashable], b: Sequence[Hashable], most: int) -> list[Block]:
    """Return `common_blocks`, or a cheap approximation if more than `most` elements differ.

    The approximation uses elements that occur once in each sequence as anchors, as many as keep their order, and aligns
    the ranges between anchors one by one. A range with more than `most` differing elements is left unaligned.
    """
    exact = common_blocks(a, b, most)
    if exact is not None:
        return exact
    blocks: list[Block] = []
    a_start = b_start = 0
    for x, y in [*anchors(a, b), (len(a), len(b))]:
        between = common_blocks(a[a_start:x], b[b_start:y], most) or []
        blocks += [(a_start + start, b_start + other_start, length) for start, other_start, length in between]
        blocks.append((x, y, int(x < len(a))))
        a_start, b_start = x + 1, y + 1
    return list(_joined(blocks))


def aligned(a: Sequence[Hashable], b: Sequence[Hashable], most: int) -> Iterator[tuple[Segment, bool]]:
    """Yield the segments that cover both sequences, in order, each with True if equal. Uses `anchored_blocks`."""
    a_end = b_end = 0
    for start, other_start, length in [*anchored_blocks(a, b, most), (len(a), len(b), 0)]:
        if (a_end, b_end) != (start, other_start):
            yield Segment(a_end, start, b_end, other_start), False
        a_end, b_end = start + length, other_start + length
        if length:
            yield Segment(start, a_end, other_start, b_end), True


def _in_order(path: _Path) -> list[Block]:
    blocks = []
    while path is not None:
        block, path = path
        blocks.append(block)
    return blocks[::-1]


def _joined(blocks: Iterable[Block]) -> Iterator[Block]:
    last: Block = (0, 0, 0)
    for x, y, length in blocks:
        start, other_start, before = last
        if (start + before, other_start + before) == (x, y):
            last = (start, other_start, before + length)
        elif length:
            if before:
                yield last
            last = (x, y, length)
    if last[2]:
        yield last


def anchors(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return positions of the longest chain of elements that occur once in each sequence and in the same order."""
    places, other_places = (
        {element: n for n, element in enumerate(side) if many[element] == 1}
        for side, many in ((a, Counter(a)), (b, Counter(b)))
    )
    # The longest increasing subsequence by patience: `ends` has the least end of a chain of each length.
    ends: list[int] = []
    chains: list[_Path] = []
    for element, n in places.items():
        m = other_places.get(element)
        if m is not None:
            length = bisect_left(ends, m)
            ends[length : length + 1] = [m]
            chains[length : length + 1] = [((n, m, 1), chains[length - 1] if length else None)]
    return [(n, m) for n, m, _ in _in_order(chains[-1] if chains else None)]
