"""A least-recently-used cache with a limit on the total size of its values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class LastUsed(Generic[_Key, _Value]):
    """A thread-safe cache that drops the least recently used values while the sum of all sizes exceeds `most`."""

    def __init__(self, most: int, size: Callable[[_Value], int]) -> None:
        self._most, self._size = most, size
        self._kept: OrderedDict[_Key, _Value] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, key: _Key) -> _Value | None:
        """Return the value for a key, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def values(self) -> list[_Value]:
        """Return all values, the one used last at the end."""
        with self._lock:
            return list(self._kept.values())

    def put(self, key: _Key, value: _Value) -> _Value:
        """Store a value, unless its size alone exceeds the limit, and return it."""
        if self._size(value) > self._most:
            return value
        with self._lock:
            if key not in self._kept:
                self._kept[key] = value
                self._total += self._size(value)
            while self._total > self._most:
                self._total -= self._size(self._kept.popitem(last=False)[1])
        return value
