"""The longest common subsequence, against the textbook's table."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokentape._alignment import Block, anchored_blocks, common_blocks

letters = st.lists(st.integers(0, 3), max_size=14)


def longest(left: list[int], right: list[int]) -> int:
    """Length of a longest common subsequence: slow and obvious."""
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, x in enumerate(left, 1):
        for j, y in enumerate(right, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if x == y else max(table[i - 1][j], table[i][j - 1])
    return table[-1][-1]


def check(left: list[int], right: list[int], blocks: list[Block]) -> None:
    """The runs are in both, in order, and as long as they can be."""
    for start, other_start, length in blocks:
        assert length
        assert left[start : start + length] == right[other_start : other_start + length]
    for (start, other_start, length), (later, other_later, _) in pairwise(blocks):
        assert start + length <= later
        assert other_start + length <= other_later
        assert (start + length, other_start + length) != (later, other_later)


@given(letters, letters)
def test_common_blocks_are_ordered_and_as_long_as_possible(left: list[int], right: list[int]) -> None:
    blocks = common_blocks(left, right, most=100)
    assert blocks is not None
    check(left, right, blocks)
    assert sum(length for _, _, length in blocks) == longest(left, right)


@given(letters, letters, st.integers(0, 20))
def test_common_blocks_give_up_beyond_the_limit(left: list[int], right: list[int], most: int) -> None:
    left_over = len(left) + len(right) - 2 * longest(left, right)
    assert (common_blocks(left, right, most) is None) == (left_over > most)


many = st.lists(st.integers(0, 40), max_size=40)


@given(many, many, st.integers(0, 8))
def test_anchors_keep_elements_that_are_unique_on_both_sides(left: list[int], right: list[int], most: int) -> None:
    blocks = anchored_blocks(left, right, most)
    check(left, right, blocks)
    if common_blocks(left, right, most) is None:
        single = [x for x in left if left.count(x) == right.count(x) == 1]
        in_other = [right.index(x) for x in single]
        kept = {left[start + n] for start, _, length in blocks for n in range(length)}
        assert len(kept & set(single)) >= longest_increasing(in_other)


def longest_increasing(values: list[int]) -> int:
    lengths: list[int] = []
    for n, value in enumerate(values):
        lengths.append(1 + max((lengths[m] for m in range(n) if values[m] < value), default=0))
    return max(lengths, default=0)


def test_changes_in_many_parts_are_all_found() -> None:
    left = [x for n in range(2000) for x in (n + 10, 0, 1)]
    right = [x for n in range(2000) for x in (n + 10, 0)]
    blocks = anchored_blocks(left, right, most=100)
    assert sum(length for _, _, length in blocks) == len(right)
