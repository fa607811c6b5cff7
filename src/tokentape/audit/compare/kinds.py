"""What a difference between two sequences is, told by the bytes of both and what stands around it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

KINDS = {
    "ids": "other ids for the same bytes",
    "bytes": "other bytes that are no UTF-8 and look alike as text",
    "forged": "a control token on one side, its letters as text on the other",
    "control": "a control token that the other side has not, or another one",
    "reasoning": "reasoning that is on one side only",
    "json": "the same JSON value, written otherwise",
    "boolean": "the same value but for how true, false or null are written",
    "spacing": "other white space, otherwise the same text",
    "cut": "the recorded side ends earlier",
    "missing": "text that the recorded side lacks",
    "extra": "text that only the recorded side has",
    "text": "other text",
}
"""Of differences, and what they mean."""

_REASONING = re.compile(r"think|reason|thought|channel\|>analysis", re.IGNORECASE)
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where in its region a side differs, in bytes."""

    start: int
    end: int


class Region:
    """A part of one side, whole segments of it, in which differences lie."""

    def __init__(self, content: bytes, opened_by: str = "") -> None:
        self.content = content
        self.opened_by = opened_by
        """The control token in front of it, as it spells."""

    @cached_property
    def text(self) -> str:
        """As text; bytes that are no UTF-8 become U+FFFD."""
        return self.content.decode("utf-8", "replace")

    @cached_property
    def values(self) -> list[tuple[int, int, Any]]:
        """Start, end and value of the JSON objects, or Python dictionaries, in `text`."""
        return list(_objects(self.text))

    def characters(self, stretch: Stretch) -> tuple[int, int]:
        """The stretch in characters of `text`."""
        start, end = (len(self.content[:at].decode("utf-8", "replace")) for at in (stretch.start, stretch.end))
        return start, end

    def value_around(self, stretch: Stretch) -> tuple[Any] | None:
        """The value in which the stretch lies; None if it lies in none."""
        start, end = self.characters(stretch)
        return next(((value,) for first, last, value in self.values if first <= start and end <= last), None)

    def word_around(self, stretch: Stretch) -> str:
        """The stretch with what is left and right of it of a word."""
        start, end = self.characters(stretch)
        while start and self.text[start - 1].isalpha():
            start -= 1
        while end < len(self.text) and self.text[end].isalpha():
            end += 1
        return self.text[start:end]


def kind_of_text(expected: Region, recorded: Region, left: Stretch, right: Stretch) -> str:
    """The kind of a difference in which no control token takes part and the bytes differ."""
    one, other = expected.content[left.start : left.end], recorded.content[right.start : right.end]
    if _reasoning_of(expected, left, recorded) or _reasoning_of(recorded, right, expected):
        return "reasoning"
    if expected.text == recorded.text:
        return "bytes"
    values = expected.value_around(left), recorded.value_around(right)
    if values[0] is not None and values[1] is not None:
        plain = [_plain(value[0], words=False) for value in values if value is not None]
        if plain[0] == plain[1]:
            return "json"
        loose = [_plain(value[0], words=True) for value in values if value is not None]
        if loose[0] == loose[1]:
            return "boolean"
    words = [_WORDS.get(region.word_around(at).lower()) for region, at in ((expected, left), (recorded, right))]
    if words[0] is not None and words[0] == words[1]:
        return "boolean"
    if b"".join(one.split()) == b"".join(other.split()):
        return "spacing"
    if not other:
        return "missing"
    return "text" if one else "extra"


def kind_of_values(expected: Region, recorded: Region) -> str | None:
    """`json` or `boolean` if the regions differ in nothing but how the objects in them are written; else None."""
    one, other = expected.values, recorded.values
    if not one or len(one) != len(other) or _around(expected) != _around(recorded):
        return None
    values = [value for _, _, value in one], [value for _, _, value in other]
    for kind, words in (("json", False), ("boolean", True)):
        if _plain(values[0], words=words) == _plain(values[1], words=words):
            return kind
    return None


def _around(region: Region) -> list[str]:
    """The text in front of each object, and behind the last."""
    starts = [start for start, _, _ in region.values] + [len(region.text)]
    ends = [0] + [end for _, end, _ in region.values]
    return [region.text[end:start] for end, start in zip(ends, starts, strict=True)]


def is_reasoning(text: str) -> bool:
    """Whether a text with control tokens spelled out holds a delimiter of reasoning."""
    return _REASONING.search(text) is not None


def _reasoning_of(region: Region, stretch: Stretch, other: Region) -> bool:
    """Whether a stretch is reasoning of which the other side has nothing."""
    own = region.content[stretch.start : stretch.end]
    if not own.strip():
        return False
    # Where reasoning has no control tokens, the letters of its delimiters are part of what is missing.
    if re.search(rb"<think(ing)?>.*</think(ing)?>", own, re.DOTALL) is not None:
        return True
    opened = is_reasoning(region.opened_by) and "/" not in region.opened_by
    return opened and not other.content.strip()


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    at = text.find("{")
    while at >= 0:
        found = _object_at(text, at)
        if found is not None:
            end, value = found
            yield at, end, value
            at = text.find("{", end)
        else:
            at = text.find("{", at + 1)


def _object_at(text: str, at: int) -> tuple[int, Any] | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        pass
    else:
        return end, value
    # As `str` writes a dictionary, where JSON was meant. Few closing braces are tried: text is full of other ones.
    end = len(text)
    for _ in range(4):
        end = text.rfind("}", at, end)
        if end < 0:
            return None
        try:
            return end + 1, ast.literal_eval(text[at : end + 1])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _plain(value: Any, *, words: bool) -> str:
    """A spelling that equal values share; with `words` also a truth value and the string that names it."""

    def plain(one: Any) -> Any:
        match one:
            case dict():
                return {str(key): plain(item) for key, item in one.items()}
            case list() | tuple():
                return [plain(item) for item in one]
            case str() if words and one.lower() in _WORDS:
                return json.loads(_WORDS[one.lower()])
            case float() if one.is_integer():
                return int(one)
        return one

    return json.dumps(plain(value), sort_keys=True, default=str)
