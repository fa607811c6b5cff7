"""What two sequences have in common, with as little as possible left over: the greedy algorithm of Myers (1986).

Python's own `difflib` takes the longest block first, which is not the least left over, and quadratic time where
elements repeat, as control tokens do.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence

Block = tuple[int, int, int]
"""(start in one, start in other, length) of a run that both have."""


def common_blocks(one: Sequence[Hashable], other: Sequence[Hashable], most: int) -> list[Block] | None:
    """The runs of a longest common subsequence, in order; None if more than `most` elements are in one only.

    Takes time and memory in proportion to the lengths, and to the square of what differs.

    >>> common_blocks("abcabba", "cbabac", most=10)
    [(2, 0, 1), (3, 2, 2), (6, 4, 1)]
    """
    n, m = len(one), len(other)
    head = 0
    while head < min(n, m) and one[head] == other[head]:
        head += 1
    tail = 0
    while tail < min(n, m) - head and one[n - 1 - tail] == other[m - 1 - tail]:
        tail += 1
    pairs = _pairs(one[head : n - tail], other[head : m - tail], most)
    if pairs is None:
        return None
    blocks = [(0, 0, head)] if head else []
    for x, y in pairs:
        _append(blocks, head + x, head + y, 1)
    if tail:
        _append(blocks, n - tail, m - tail, tail)
    return blocks


def anchored_blocks(one: Sequence[Hashable], other: Sequence[Hashable], most: int) -> list[Block]:
    """`common_blocks`, or where that is None, as good as can be had for little.

    Then elements that are once in either side are anchors, as many as are in the same order, and what lies between two
    neighbouring ones is treated by itself. What differs by more than `most` even there has nothing in common.
    """
    found = common_blocks(one, other, most)
    if found is not None:
        return found
    blocks: list[Block] = []
    at = other_at = 0
    for x, y in [*_anchors(one, other), (len(one), len(other))]:
        for start, other_start, length in common_blocks(one[at:x], other[other_at:y], most) or []:
            _append(blocks, at + start, other_at + other_start, length)
        if x < len(one):
            _append(blocks, x, y, 1)
        at, other_at = x + 1, y + 1
    return blocks


def _anchors(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Places of elements that are once in each: the longest chain in which both places grow."""
    places = [
        {element: n for n, element in enumerate(side) if many[element] == 1}
        for side, many in ((one, Counter(one)), (other, Counter(other)))
    ]
    pairs = [(n, places[1][element]) for element, n in places[0].items() if element in places[1]]
    # The longest increasing subsequence by patience: `ends` has the least end of a chain of each length.
    ends: list[int] = []
    chains: list[tuple[int, int]] = []
    before: dict[tuple[int, int], tuple[int, int] | None] = {}
    for pair in pairs:
        length = bisect_left(ends, pair[1])
        before[pair] = chains[length - 1] if length else None
        ends[length : length + 1] = [pair[1]]
        chains[length : length + 1] = [pair]
    chain = []
    last = chains[-1] if chains else None
    while last is not None:
        chain.append(last)
        last = before[last]
    return chain[::-1]


def _append(blocks: list[Block], x: int, y: int, length: int) -> None:
    if blocks:
        start, other_start, before = blocks[-1]
        if (start + before, other_start + before) == (x, y):
            blocks[-1] = (start, other_start, before + length)
            return
    blocks.append((x, y, length))


def _pairs(one: Sequence[Hashable], other: Sequence[Hashable], most: int) -> list[tuple[int, int]] | None:
    n, m = len(one), len(other)
    if not n or not m:
        return [] if n + m <= most else None
    # How far in `one` each diagonal (where x - y is the same) gets with d - 1 differences, from diagonal -d - 1 on; -1
    # where none gets anywhere.
    reach = array("i", [-1, -1, 0])
    rows: list[array[int]] = []
    for d in range(min(n + m, most) + 1):
        rows.append(reach)
        further = array("i", [-1]) * (2 * d + 5)
        # Diagonals outside of the two sequences lead nowhere.
        for k in range(-(d - 2 * max(0, d - m)), d - 2 * max(0, d - n) + 1, 2):
            x = _step(reach, k, d)
            y = x - k
            while x < n and y < m and one[x] == other[y]:
                x += 1
                y += 1
            further[k + d + 2] = x
            if x >= n and y >= m:
                return _walk_back(rows, n, m)
        reach = further
    return None


def _goes_down(reach: array[int], k: int, d: int) -> bool:
    """Whether the d-th difference comes to diagonal k from k + 1, down in `other`, or else from k - 1."""
    return k == -d or (k != d and reach[k + d] < reach[k + d + 2])


def _step(reach: array[int], k: int, d: int) -> int:
    """Where in `one` that difference leads."""
    return reach[k + d + 2] if _goes_down(reach, k, d) else reach[k + d] + 1


def _walk_back(rows: list[array[int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for d in range(len(rows) - 1, -1, -1):
        k = x - y
        start = _step(rows[d], k, d)
        while x > start:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if d and _goes_down(rows[d], k, d):
            y -= 1
        elif d:
            x -= 1
    return pairs[::-1]
