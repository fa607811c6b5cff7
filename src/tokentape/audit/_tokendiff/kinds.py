"""Name what a difference between two texts is, from the bytes of both and what is around them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias

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
"""Kinds of differences, and what they mean."""

Stretch: TypeAlias = tuple[int, int]
"""The bytes of a region that differ, half-open."""

_REASONING = re.compile(r"think|reason|thought|channel\|>analysis", re.IGNORECASE)
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_OBJECT_ENDS = 4
_DICTIONARY = re.compile(r"\{\s*['\"}]")
_READ_AGAIN = 20
"""How many times the length of a text is read at most for objects that are none, such as braces that never close."""


class Region:
    """Whole segments of one sequence in which differences lie."""

    def __init__(self, content: bytes, opened_by: str = "") -> None:
        self.content = content
        self.opened_by = opened_by
        """The spelling of the special token before it."""

    @cached_property
    def text(self) -> str:
        """The text. Bytes that are no UTF-8 become U+FFFD."""
        return self.content.decode("utf-8", "replace")

    @cached_property
    def values(self) -> list[tuple[int, int, Any]]:
        """Start, end and value of the JSON objects, or Python dictionaries, in `text`."""
        return list(_objects(self.text))

    def between_values(self) -> list[str]:
        """Return the text before each object, and after the last."""
        starts = [start for start, _, _ in self.values] + [len(self.text)]
        ends = [0] + [end for _, end, _ in self.values]
        return [self.text[end:start] for end, start in zip(ends, starts, strict=True)]

    def value_around(self, stretch: Stretch) -> Any:
        """Return the object that a stretch lies in; None if it lies in none."""
        start, end = self._characters(stretch)
        return next((value for first, last, value in self.values if first <= start and end <= last), None)

    def word_around(self, stretch: Stretch) -> str:
        """Return a stretch with the rest of the word on each side."""
        start, end = self._characters(stretch)
        while start and self.text[start - 1].isalpha():
            start -= 1
        while end < len(self.text) and self.text[end].isalpha():
            end += 1
        return self.text[start:end]

    def _characters(self, stretch: Stretch) -> tuple[int, int]:
        start, end = (len(self.content[:at].decode("utf-8", "replace")) for at in stretch)
        return start, end


def kind_of_text(expected: Region, recorded: Region, left: Stretch, right: Stretch) -> str:
    """Return the kind of a difference without special tokens, `left` in one region and `right` in the other."""
    one, other = expected.content[slice(*left)], recorded.content[slice(*right)]
    if _reasoning_of(expected, one, recorded) or _reasoning_of(recorded, other, expected):
        return "reasoning"
    if expected.text == recorded.text:
        return "bytes"
    value, other_value = expected.value_around(left), recorded.value_around(right)
    kind = None if value is None or other_value is None else _same_value(value, other_value)
    if kind is not None:
        return kind
    word = _WORDS.get(expected.word_around(left).lower())
    if word is not None and word == _WORDS.get(recorded.word_around(right).lower()):
        return "boolean"
    if b"".join(one.split()) == b"".join(other.split()):
        return "spacing"
    return "missing" if not other else "text" if one else "extra"


def kind_of_values(expected: Region, recorded: Region) -> str | None:
    """Return `json` or `boolean` if nothing differs but how the objects in the regions are written; else None."""
    one, other = ([value for _, _, value in region.values] for region in (expected, recorded))
    if not one or len(one) != len(other) or expected.between_values() != recorded.between_values():
        return None
    return _same_value(one, other)


def is_reasoning(text: str) -> bool:
    """Return True if a text, with special tokens spelled out, has a delimiter of reasoning."""
    return _REASONING.search(text) is not None


def _reasoning_of(region: Region, own: bytes, other: Region) -> bool:
    """Return True if the bytes `own` are reasoning of a region and the other region has none of it."""
    if not own.strip():
        return False
    # Where the delimiters of reasoning are no special tokens, their letters are part of what is missing.
    if re.search(rb"<think(ing)?>.*</think(ing)?>", own, re.DOTALL) is not None:
        return True
    opened = is_reasoning(region.opened_by) and "/" not in region.opened_by
    return opened and not other.content.strip()


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    at, left = text.find("{"), _READ_AGAIN * len(text)
    while at >= 0 and left > 0:
        found, read = _object_at(text, at)
        if found is not None:
            yield at, found[1], found[0]
        else:
            left -= read
        at = text.find("{", at + 1 if found is None else found[1])


def _object_at(text: str, at: int) -> tuple[tuple[Any, int] | None, int]:
    """Return the object that begins at `at` and where it ends, or None, and how many characters were read for it."""
    try:
        return json.JSONDecoder().raw_decode(text, at), 0
    except (ValueError, RecursionError) as error:
        read = error.pos - at if isinstance(error, json.JSONDecodeError) else len(text)
    # A template that writes a dictionary with `str` gives Python's spelling. Only the last few closing braces are
    # tried, since text has many others.
    end = len(text) if _DICTIONARY.match(text, at) else at
    for _ in range(_OBJECT_ENDS):
        end = text.rfind("}", at, end)
        if end < 0:
            break
        read += end - at
        try:
            return (ast.literal_eval(text[at : end + 1]), end + 1), read
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None, read


def _same_value(one: Any, other: Any) -> str | None:
    """Return `json` for equal values, `boolean` for those that differ in how truth values are written, else None."""
    for kind, words in (("json", False), ("boolean", True)):
        if _plain(one, words=words) == _plain(other, words=words):
            return kind
    return None


def _plain(value: Any, *, words: bool) -> str:
    """Return a spelling that equal values share; with `words` also a truth value and the string that names it."""

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
