"""How much one rendering of a template may use: CPU time of its thread, and memory.

Each operation looks whether the time is up. No single one is given enough to run for long, so that the limit of time
holds wherever a template spends it. What is made counts for as long as anything refers to it. Both limits grow with the
conversation, that of time with its messages too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Joiner, Namespace

MOST_SECONDS = 2.0
"""CPU time of one rendering; conversations take hundredths."""

PER_SECOND = 2**21
"""Characters of a conversation that are worth another second."""

MESSAGES_PER_SECOND = 200
"""The same for messages: some templates look through all of them for each."""

MOST_FOR_MESSAGES = 20.0
"""Seconds that messages are worth at most: 50,000 of them would hold a thread for minutes."""

MOST_CHARACTERS = 2**26
"""Length of any value that an expression makes, written as text, and of the whole text. All at once: twice that."""

PER_CHARACTER = 8
"""Characters that a value may be longer for each character of the conversation."""

MOST_ITEMS = 2**20
"""Length of any list that an expression makes."""

MOST_OTHER_KEYS = 64
"""Keys of a dict that are no text. They can be chosen for the same hash: then each is compared with all others."""

MOST_NUMBER = 100_000
"""Largest width or precision that a filter or a method takes."""

MOST_BITS = 2**16
"""Length of any whole number that an expression makes; Python writes no number of more than 2^14."""

GROWTH = 16
"""The most characters that an operation may make of one that it is given: `repr` writes 12."""

_OBJECT = 256
"""Characters that an object counts for, apart from what it holds."""

_BETWEEN_READINGS = 0.001
"""Seconds between two readings of the thread's clock, which takes several times as long as that of the machine."""

_UNTIL_SWEEP = 2**22
"""Characters made, at least, between two looks at what of them is still there."""

_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_MAPPINGS = (dict, MappingProxyType)
_CONTAINERS: Any = (list, tuple, dict, *_VIEWS)
_HOLDERS = (Namespace, LoopContext, Cycler, Joiner)
"""What holds values that nothing counts while it is in a list."""

_current: ContextVar[Usage]


def _references(entry: tuple[Any, ...]) -> int:
    return sys.getrefcount(entry[0])


_UNUSED = _references((object(),))
"""References to what nothing but its entry refers to: this depends on the version of Python."""


class Usage:
    """Counts what one rendering of `given` uses. Methods raise `jinja2.TemplateError` when it is too much."""

    __slots__ = ("_begin", "_end", "_given", "_known", "_longest", "_next_reading", "_until_sweep")

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        self._begin = time.thread_time()
        self._end = self._begin + MOST_SECONDS
        self._given = given
        self._longest = MOST_CHARACTERS
        self._next_reading = 0.0
        self._until_sweep = _UNTIL_SWEEP
        self._known: dict[int, tuple[Any, int]] = {}
        """Strings that were made, and containers, by `id`, with their weight; what contains others is later.

        Templates can't change a container; the references keep ids unique.
        """

    def tick(self) -> None:
        """Raise `TimeOver` if the time is up. Each operation calls it."""
        now = time.monotonic()
        if now > self._next_reading:
            self._next_reading = now + _BETWEEN_READINGS
            if time.thread_time() > self._end:
                self._grow()
                if time.thread_time() > self._end:
                    raise TimeOver(f"it runs for more than {round(self._end - self._begin, 2)} seconds")

    def _grow(self) -> None:
        """Raise the limits by what the conversation is worth. That is counted only when they are reached."""
        given, self._given = self._given, None
        if given is not None:
            end, self._end = self._end, float("inf")
            weight = self.weigh(given)
            for_messages = min(len(given["messages"]) / MESSAGES_PER_SECOND, MOST_FOR_MESSAGES)
            self._end = end + weight / PER_SECOND + for_messages
            self._longest += PER_CHARACTER * weight

    def room(self, characters: int) -> None:
        """Refuse what would be too long."""
        if characters > self._longest:
            self._grow()
            if characters > self._longest:
                raise jinja2.TemplateError(f"it makes a value longer than {self._longest}")

    def fits(self, characters: int) -> None:
        """Refuse what may be too much to be there at once."""
        if characters > 2 * self._longest:
            self._grow()
            if characters > 2 * self._longest:
                raise jinja2.TemplateError(f"it makes more than {2 * self._longest} characters")

    def _hold(self, value: Any, weight: int) -> None:
        """Count a value, unless it is known, until nothing refers to it any more."""
        if id(value) not in self._known:
            self._known[id(value)] = value, weight
            self._until_sweep -= weight + _OBJECT
            if self._until_sweep < 0:
                self._sweep()

    def _sweep(self) -> None:
        """Forget what nothing else refers to, and refuse the rest if it is too much."""
        entries, held, live = list(self._known.values()), [], 0
        self._known.clear()
        while entries:
            entry = entries.pop()
            if _references(entry) > _UNUSED:
                held.append(entry)
                # What a container holds counts by itself: the conversation is not made, and texts are.
                live += _OBJECT + (entry[1] if isinstance(entry[0], str) else 8 * len(entry[0]))
        self._known = {id(entry[0]): entry for entry in reversed(held)}
        self.fits(live)
        self._until_sweep = max(_UNTIL_SWEEP, min(live, 2 * self._longest - live))

    def weigh(self, value: Any) -> int:
        """Return about how many characters the value has when written, counting what it holds as often as it holds it.

        A namespace, a loop, a cycler and a joiner hold any amount: they count as empty here, and in no list.
        """
        return 24 if isinstance(value, _HOLDERS) else self._weigh(value)

    def _weigh(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, int):
            return value.bit_length() // 3 + 5
        if isinstance(value, range):
            return 8 * len(value)
        if isinstance(value, _HOLDERS):
            raise jinja2.TemplateError("it puts a namespace, a loop, a cycler or a joiner in a list")
        if not isinstance(value, _CONTAINERS):
            return 24
        self.tick()
        weight = self._contents(value.mapping if isinstance(value, _VIEWS) else value)
        self._hold(value, weight)
        return weight

    def _contents(self, value: Any) -> int:
        weight: int = _OBJECT + 8 * len(value)
        for part in (value, value.values()) if isinstance(value, _MAPPINGS) else (value,):
            for held in part:
                # Most of what containers hold is text: it is weighed here, without a call.
                weight += len(held) if type(held) is str else self._weigh(held)
        return weight

    def appended(self, left: list[Any], right: list[Any]) -> list[Any]:
        """Return `left + right`. Its weight follows from theirs: a template may add each message to those before."""
        self.items(len(left) + len(right))
        weight = self._weigh(left) + self._weigh(right)
        self.room(weight)
        made = left + right
        self._hold(made, weight)
        return made

    def made(self, value: Any) -> Any:
        """Count a new value, and return it."""
        self.tick()
        if isinstance(value, str):
            self.room(len(value))
            self._hold(value, len(value))
        elif isinstance(value, list | tuple | dict):
            self.items(len(value))
            if isinstance(value, dict) and sum(not isinstance(key, str) for key in value) > MOST_OTHER_KEYS:
                raise jinja2.TemplateError(f"it makes a dict with more than {MOST_OTHER_KEYS} keys that are no text")
            self.room(self._weigh(value))
        elif isinstance(value, int):
            self.bits(value.bit_length())
        return value

    def counted(self, values: Iterable[Any]) -> Generator[Any]:
        """Yield values, or the pairs of a dict, each counted as it comes."""
        for value in values.items() if isinstance(values, Mapping) else values:
            yield self.made(value)

    def items(self, items: int) -> None:
        """Refuse a list that would be too long."""
        if items > MOST_ITEMS:
            raise jinja2.TemplateError(f"it makes a list longer than {MOST_ITEMS}")

    def bits(self, bits: int) -> None:
        """Refuse a whole number of more than `MOST_BITS`."""
        if bits > MOST_BITS:
            raise jinja2.TemplateError(f"it makes a number of more than {MOST_BITS} bits")

    def numbers(self, values: Iterable[Any]) -> None:
        """Refuse widths that are too large."""
        if any(isinstance(value, int) and abs(value) > MOST_NUMBER for value in values):
            raise jinja2.TemplateError(f"it asks for a width above {MOST_NUMBER}")

    def sized(self, value: Any) -> None:
        """Refuse to go through the items of what has too many."""
        if isinstance(value, Sized) and not isinstance(value, jinja2.Undefined):
            self.items(len(value))

    def text(self, value: Any) -> str:
        if type(value) is str:
            return value
        if not isinstance(value, str):
            self.fits(GROWTH * self.weigh(value))
        return self.made(str(value))  # type: ignore[no-any-return]

    def concat(self, values: Iterable[Any]) -> str:
        """Return the texts of values as one."""
        texts = [value if type(value) is str else self.text(value) for value in values]
        self.room(sum(map(len, texts)))
        return self.made("".join(texts))  # type: ignore[no-any-return]


class TimeOver(jinja2.TemplateError):
    """A rendering took too long."""


@contextmanager
def limited(given: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Count what is done within as one rendering of `given`."""
    token = _current.set(Usage(given))
    try:
        yield
    finally:
        _current.reset(token)


_current = ContextVar("usage of this rendering")
usage = _current.get
"""Return the `Usage` of the rendering that is under way."""
