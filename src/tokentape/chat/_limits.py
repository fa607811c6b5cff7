"""Limit the CPU time and memory that a template may use for one rendering.

Each operation checks the time. The sizes of its operands are also limited, so that no single operation runs for long.
Values that a template creates count toward the memory limit while they are referenced. Both limits grow with the size
of the conversation, and the time limit also grows with the number of messages.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Joiner, Namespace

MOST_SECONDS = 2.0
"""The CPU time that one rendering may take; real conversations take hundredths of a second."""

PER_SECOND = 2**21
"""The number of conversation characters that add a second to the limit."""

MESSAGES_PER_SECOND = 200
"""The number of messages that add a second to the limit: some templates loop over all messages for each message."""

MOST_FOR_MESSAGES = 20.0
"""The maximum number of seconds added for messages: 50,000 messages would otherwise block a thread for minutes."""

MOST_CHARACTERS = 2**26
"""The maximum length of each value, written as text, and of the rendering; all values together may have twice that."""

PER_CHARACTER = 8
"""The number of characters that each character of the conversation adds to that limit."""

MOST_ITEMS = 2**20
"""The maximum length of a list that an expression creates."""

MOST_OTHER_KEYS = 64
"""The maximum number of keys in a dict that are not strings. A template can choose keys with equal hashes; each key is
then compared with all others."""

MOST_NUMBER = 100_000
"""The maximum width or precision that a filter or method accepts."""

MOST_BITS = 2**16
"""The maximum number of bits in an integer result. Python refuses to convert integers over 2^14 bits to text."""

GROWTH = 16
"""An upper bound of the characters that an operation creates per character of its operands: `repr` creates 12."""

_OBJECT = 256
"""The number of characters that an object counts as, in addition to its contents."""

_BETWEEN_READINGS = 0.001
"""Seconds between readings of the thread's CPU clock, which takes several times longer than to read the wall clock."""

_UNTIL_SWEEP = 2**22
"""The minimum number of new characters between checks of which values are still referenced."""

_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_MAPPINGS = (dict, MappingProxyType)
_CONTAINERS: Any = (list, tuple, dict, *_VIEWS)
_HOLDERS = (Namespace, LoopContext, Cycler, Joiner)
"""Objects that contain values but are not weighed, so templates may not put them in a list."""

_current: ContextVar[Usage]


def _references(entry: tuple[Any, ...]) -> int:
    return sys.getrefcount(entry[0])


_UNUSED = _references((object(),))
"""The reference count of a value that only its entry refers to. It depends on the Python version."""


class Escapes(NamedTuple):
    """How callers' texts are escaped, for filters that look at single characters. See `Escaper.escapes`."""

    characters: Mapping[int, str] = {}
    """The character that each placeholder, by its code point, stands for."""
    join: Callable[[Sequence[str]], str] = "".join
    """Joins pieces of a text, and escapes control tokens that this creates."""


class Usage:
    """Counts the time and memory of one rendering with the template `variables`.

    Methods raise `jinja2.TemplateError` when a limit is exceeded.
    """

    __slots__ = ("_begin", "_end", "_known", "_longest", "_next_reading", "_until_sweep", "_variables", "escapes")

    def __init__(self, variables: Mapping[str, Any] | None = None, escapes: Escapes | None = None) -> None:
        self.escapes = escapes or Escapes()
        self._begin = time.thread_time()
        self._end = self._begin + MOST_SECONDS
        self._variables = variables
        self._longest = MOST_CHARACTERS
        self._next_reading = 0.0
        self._until_sweep = _UNTIL_SWEEP
        self._known: dict[int, tuple[Any, int]] = {}
        """(value, weight) for new strings and for containers, by `id`; containers come after their contents.

        Weights stay valid because templates can't change containers; the references keep the ids unique.
        """

    def tick(self) -> None:
        """Raise `TimeOver` if the time limit is exceeded. Each operation calls this."""
        now = time.monotonic()
        if now > self._next_reading:
            self._next_reading = now + _BETWEEN_READINGS
            if time.thread_time() > self._end:
                self._grow()
                if time.thread_time() > self._end:
                    raise TimeOver(f"it runs for more than {round(self._end - self._begin, 2)} seconds")

    def _grow(self) -> None:
        """Raise the limits by the size of the conversation, which is measured only once a limit is reached."""
        variables, self._variables = self._variables, None
        if variables is not None:
            end, self._end = self._end, float("inf")
            weight = self.weigh(variables)
            for_messages = min(len(variables["messages"]) / MESSAGES_PER_SECOND, MOST_FOR_MESSAGES)
            self._end = end + weight / PER_SECOND + for_messages
            self._longest += PER_CHARACTER * weight

    def room(self, characters: int) -> None:
        """Refuse a value if this many characters are too long."""
        if characters > self._longest:
            self._grow()
            if characters > self._longest:
                raise jinja2.TemplateError(f"it makes a value longer than {self._longest} characters")

    def fits(self, characters: int) -> None:
        """Refuse this many characters if they exceed the limit for all values together."""
        if characters > 2 * self._longest:
            self._grow()
            if characters > 2 * self._longest:
                raise jinja2.TemplateError(f"it makes more than {2 * self._longest} characters")

    def _hold(self, value: Any, weight: int) -> None:
        """Count a value's weight once, while the value is referenced."""
        if id(value) not in self._known:
            self._known[id(value)] = value, weight
            self._until_sweep -= weight + _OBJECT
            if self._until_sweep < 0:
                self._sweep()

    def _sweep(self) -> None:
        """Drop values that are no longer referenced, and refuse the rest if their total is too large."""
        entries, referenced, live = list(self._known.values()), [], 0
        self._known.clear()
        while entries:
            entry = entries.pop()
            if _references(entry) > _UNUSED:
                referenced.append(entry)
                # Contents are not counted: the conversation's strings are not new, and new strings have an entry.
                live += _OBJECT + (entry[1] if isinstance(entry[0], str) else 8 * len(entry[0]))
        self._known = {id(entry[0]): entry for entry in reversed(referenced)}
        self.fits(live)
        self._until_sweep = max(_UNTIL_SWEEP, min(live, 2 * self._longest - live))

    def weigh(self, value: Any) -> int:
        """Return about how many characters the value has when written as text.

        A namespace, loop, cycler or joiner counts as empty. In a list it is refused because it may contain any amount.
        """
        return 24 if isinstance(value, _HOLDERS) else self._weigh(value)

    def _weigh(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        entry = self._known.get(id(value))
        if entry is not None:
            return entry[1]
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
            for item in part:
                # Most items are strings: weigh them here, without a call.
                weight += len(item) if type(item) is str else self._weigh(item)
        return weight

    def appended(self, left: list[Any], right: list[Any]) -> list[Any]:
        """Return `left + right`. Its weight is the sum of both, as templates append each message to the list so far."""
        self.items(len(left) + len(right))
        weight = self._weigh(left) + self._weigh(right)
        self.room(weight)
        result = left + right
        self._hold(result, weight)
        return result

    def made(self, value: Any) -> Any:
        """Count a new value and return it, or refuse it if it is too large."""
        # Here and below, compare before calling: templates make many small values.
        if time.monotonic() > self._next_reading:
            self.tick()
        if isinstance(value, str):
            if len(value) > self._longest:
                self.room(len(value))
            self._hold(value, len(value))
        elif isinstance(value, list | tuple | dict):
            self.items(len(value))
            if isinstance(value, dict) and sum(not isinstance(key, str) for key in value) > MOST_OTHER_KEYS:
                raise jinja2.TemplateError(f"it makes a dict with more than {MOST_OTHER_KEYS} non-string keys")
            self.room(self._weigh(value))
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            self.bits(value.bit_length())
        return value

    def counted(self, values: Iterable[Any]) -> Generator[Any]:
        """Yield the values, or a mapping's items, and count each of them."""
        for value in values.items() if isinstance(values, Mapping) else values:
            yield self.made(value)

    def items(self, items: int) -> None:
        """Refuse a list with more than `MOST_ITEMS` items."""
        if items > MOST_ITEMS:
            raise jinja2.TemplateError(f"it makes a list with more than {MOST_ITEMS} items")

    def bits(self, bits: int) -> None:
        """Refuse an integer with more than `MOST_BITS` bits."""
        if bits > MOST_BITS:
            raise jinja2.TemplateError(f"it makes a number with more than {MOST_BITS} bits")

    def numbers(self, values: Iterable[Any]) -> None:
        """Refuse widths above `MOST_NUMBER`."""
        if any(isinstance(value, int) and abs(value) > MOST_NUMBER for value in values):
            raise jinja2.TemplateError(f"it asks for a width above {MOST_NUMBER}")

    def sized(self, value: Any) -> None:
        """Refuse to iterate over a value with too many items."""
        if isinstance(value, Sized) and not isinstance(value, jinja2.Undefined):
            self.items(len(value))

    def text(self, value: Any) -> str:
        if type(value) is str:
            return value
        if not isinstance(value, str):
            self.fits(GROWTH * self.weigh(value))
        return self.made(str(value))  # type: ignore[no-any-return]

    def concat(self, values: Iterable[Any]) -> str:
        """Return the values converted to text and joined."""
        texts = [value if type(value) is str else self.text(value) for value in values]
        self.room(sum(map(len, texts)))
        return self.made("".join(texts))  # type: ignore[no-any-return]


class TimeOver(jinja2.TemplateError):
    """A rendering took more CPU time than its limit."""


@contextmanager
def limited(variables: Mapping[str, Any] | None = None, escapes: Escapes | None = None) -> Iterator[None]:
    """Limit the time and memory used within the block, as one rendering with the template `variables`."""
    token = _current.set(Usage(variables, escapes))
    try:
        yield
    finally:
        _current.reset(token)


_current = ContextVar("usage of this rendering")
usage = _current.get
"""Returns the `Usage` of the current rendering."""
