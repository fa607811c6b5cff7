"""What one rendering may still use: steps, which stand for time, and characters, which stand for memory.

An operation pays in front of its work for all that it looks through, and for what it makes. What holds other things is
looked through as often as it is reached: a list that holds one long string a million times is a million long strings
when it is written, compared or hashed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any

import jinja2
from jinja2.utils import Namespace

MOST_STEPS = 200_000
"""Turns of loops and calls of macros in one rendering: about a second, and far more than conversations take."""

MOST_MADE = 2**27
"""Characters that one rendering makes in all, in all its strings. An item of a list counts as eight."""

MOST_CHARACTERS = 2**26
"""Length of any string that an expression makes, and of the whole text."""

MOST_ITEMS = 2**20
"""Length of any list that an expression makes."""

MOST_BITS = 4096
"""Length of any whole number."""

STEP = 4096
"""Characters that can be looked through in the time of a step."""

ITEM = 256
"""Characters that can be looked through in the time of looking at an item."""

MOST_DEPTH = 1000
"""How deep a value that is written, compared or hashed may be nested. Python goes no deeper either."""

OBJECT = 64
"""Characters that take the memory of an object, apart from what it holds."""

ESCAPED = 12
"""The most characters that JSON and `repr` write for one."""

_SCALARS = frozenset({int, float, bool, type(None)})
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt,
    "gteq": operator.ge,
}  # fmt: skip


class Budget:
    """Counts what one rendering uses. Each method raises `jinja2.TemplateError` when it is too much."""

    __slots__ = ("_characters", "_time")

    def __init__(self) -> None:
        self._time = MOST_STEPS * STEP
        self._characters = MOST_MADE

    def __call__(self, steps: int = 1) -> None:
        """Count steps."""
        self._time -= steps * STEP
        if self._time < 0:
            raise _too_long()

    def look(self, characters: int) -> None:
        """Count what is looked through."""
        self._time -= characters
        if self._time < 0:
            raise _too_long()

    def make(self, characters: int) -> None:
        """Count a string that is to be made."""
        if characters > MOST_CHARACTERS:
            raise jinja2.TemplateError(f"it makes a value longer than {MOST_CHARACTERS}")
        self._characters -= characters + OBJECT
        if self._characters < 0:
            raise _too_much()

    def make_items(self, items: int) -> None:
        """Count a list that is to be made."""
        if items > MOST_ITEMS:
            raise jinja2.TemplateError(f"it makes a value longer than {MOST_ITEMS}")
        self.make(8 * items)

    def has_room(self, characters: int) -> None:
        """Refuse what may become so long; what it does become is to be counted when it is there."""
        if characters > self._characters:
            raise _too_much()

    def made(self, value: Any) -> Any:
        """Count a value that is there."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, list | tuple | dict):
            self.make_items(len(value))
        elif isinstance(value, int):
            refuse_bits(value.bit_length())
        return value

    def counted(self, values: Iterable[Any]) -> Generator[Any]:
        """Count values as they are made, one by one."""
        for value in values:
            self.look(STEP // 4)
            yield self.made(value)

    def weigh(self, value: Any, each: int = 2, indent: int = 0) -> int:
        """About how many characters the value is when it is written, with `each` around every item. Counts as looking.

        Goes through the value level by level, and no further than the budget lets.
        """
        size, items, row, depth = 0, 1, [value], 0
        while row:
            inner: list[Any] = []
            around = each + indent * depth
            size += around * len(row)
            for item in row:
                kind = type(item)
                if kind is str:
                    size += len(item)
                elif kind in _SCALARS:
                    size += item.bit_length() // 3 + 2 if kind is int else 24
                elif isinstance(item, str):
                    size += len(item)
                else:
                    if kind is Namespace:
                        item = item._Namespace__attrs
                    size += OBJECT
                    if isinstance(item, Collection):
                        items += 1 + len(item)
                        if size + ITEM * items > self._time:
                            raise _too_long()
                        inner.extend(item)
                        if isinstance(item, Mapping):
                            inner.extend(item.values())
            row = inner
            depth += 1
            if depth > MOST_DEPTH:
                raise jinja2.TemplateError(f"it nests values deeper than {MOST_DEPTH}")
        self.look(size + ITEM * items)
        return size

    def seen(self, value: Any) -> Any:
        """The value, to be compared or hashed."""
        kind = type(value)
        if kind is str:
            self.look(len(value))
        elif kind not in _SCALARS:
            self.weigh(value)
        return value

    def compare(self, comparison: str, left: Any, right: Any) -> Any:
        """What `==`, `!=`, `<`... do."""
        if type(left) not in _SCALARS and type(right) not in _SCALARS:
            self.seen(left)
            self.seen(right)
        return _COMPARISONS[comparison](left, right)

    def find(self, item: Any, place: Any) -> bool:
        """What `in` does."""
        kind = type(place)
        if kind is str:
            self.look(len(place) + (len(item) if type(item) is str else 0))
        elif kind is dict:
            if type(item) is not str:
                self.seen(item)
        elif isinstance(place, Collection):
            each = 1 if type(item) in _SCALARS else len(item) if type(item) is str else self.weigh(item)
            self.look(len(place) * (ITEM + each))
        return item in place

    def text(self, value: Any) -> str:
        """What `str` does."""
        kind = type(value)
        if kind is str:
            return value  # type: ignore[no-any-return]
        if kind not in _SCALARS and not isinstance(value, str):
            self.has_room(ESCAPED * self.weigh(value))
        text = str(value)
        self.make(len(text))
        return text

    def concat(self, values: Iterable[Any]) -> str:
        """What `~` does, and what becomes of the pieces that a macro or a block writes."""
        texts = [value if type(value) is str else self.text(value) for value in values]
        self.make(sum(map(len, texts)))
        return "".join(texts)

    def add(self, left: Any, right: Any) -> Any:
        """What `+` does."""
        kind = type(left)
        if kind is str and type(right) is str:
            self.make(len(left) + len(right))
        elif (kind is list and type(right) is list) or kind is tuple:
            self.make_items(len(left) + len(right))
        elif isinstance(left, str) or isinstance(right, str):
            # `Markup`, which escapes what is added to it.
            self.has_room(ESCAPED * (self.weigh(left) + self.weigh(right)))
            return self.made(left + right)
        elif kind is int and type(right) is int:
            refuse_bits(max(left.bit_length(), right.bit_length()) + 1)
        return left + right

    def json_fits(self, value: Any, indent: int | str | None, separators: tuple[str, str] | None) -> None:
        """Refuse what would be too long as JSON."""
        each = 4 if separators is None else 2 + sum(map(len, separators))
        deeper = 0 if indent is None else indent if isinstance(indent, int) else len(indent)
        self.has_room(ESCAPED * self.weigh(value, each, deeper))


def join_output(pieces: Iterable[str]) -> str:
    """The whole text of a rendering."""
    texts = list(pieces)
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise jinja2.TemplateError(f"it makes a value longer than {MOST_CHARACTERS}")
    return "".join(texts)


def refuse_bits(bits: int) -> None:
    """Refuse a whole number of more than `MOST_BITS`."""
    if bits > MOST_BITS:
        raise jinja2.TemplateError(f"it makes a number of more than {MOST_BITS} bits")


def _too_long() -> jinja2.TemplateError:
    return jinja2.TemplateError(f"it runs for more than {MOST_STEPS} steps")


def _too_much() -> jinja2.TemplateError:
    return jinja2.TemplateError(f"it makes more than {MOST_MADE} characters")
