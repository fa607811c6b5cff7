"""Collect items in lists of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


def batched(
    items: Iterable[_Item], most: int, size: Callable[[_Item], int] = lambda _: 1, most_items: int | None = None
) -> Iterator[list[_Item]]:
    """Yield items in lists. A list ends when its sizes, 1 each by default, add up to `most`, or after `most_items`.

    >>> list(batched("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    batch: list[_Item] = []
    filled = 0
    for item in items:
        batch.append(item)
        filled += size(item)
        if filled >= most or len(batch) == most_items:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch
