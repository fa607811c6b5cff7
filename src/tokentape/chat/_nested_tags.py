"""Read objects and lists that a template writes as tags within tags, such as `<tags><item>a</item></tags>`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokentape.chat._caller_text import SENTINELS
from tokentape.chat._delimiters import pattern
from tokentape.chat._json_text import Schema, value_json

_KEY, _VALUE, _OTHER_KEY, _OTHER_VALUE = (s * 2 for s in SENTINELS[5:9])
_KEY_TEXT = r"[^\n<>\"\ud800-\udfff]{1,256}?"
_MOST_LEVELS = 64
"""A value with more levels is kept as text: reading it would need too much recursion."""


@dataclass(frozen=True, slots=True)
class NestedTags:
    """The delimiters of members of an object and of items of a list. In `close`, a sentinel stands for the key."""

    open: str
    key_close: str
    close: str
    item_open: str
    item_close: str

    def depth(self, text: str, start: int, end: int) -> int:
        """Return how many more tags are opened than closed in `text[start:end]`."""
        return sum(-1 if tag["end"] else 1 for tag in _tags(self).finditer(text, start, end))

    def json(self, raw: str, schema: Schema) -> str | None:
        """Return the JSON text of a value; None if it is not an object or a list, such as text that contains tags."""
        levels, at = [_Level()], 0
        for tag in _tags(self).finditer(raw):
            between = raw[at : tag.start()].strip()
            at, level = tag.end(), levels[-1]
            if not tag["end"]:
                if between or len(levels) > _MOST_LEVELS:
                    return None
                # In many templates, an item's tag is that of a member with a fixed key.
                member = tag["key"] or _key_of(self, tag[0])
                close = self.close.replace(_KEY, member) if tag["key"] else self.item_close
                levels.append(_Level(member, not tag["key"], close.strip(), at))
            elif len(levels) == 1 or tag[0].strip() != level.close or (level.inner and between):
                return None
            else:
                level.text = raw[level.start : tag.start()]
                levels[-2].inner.append(levels.pop())
        if len(levels) > 1 or raw[at:].strip() or not (levels[0].inner or levels[0].is_empty(raw, schema)):
            return None
        levels[0].text = raw
        return self._json(levels[0], schema)

    def _json(self, level: _Level, schema: Schema) -> str:
        types = schema.types or set()
        is_list = "array" in types if types & {"array", "object"} else all(inner.is_item for inner in level.inner)
        if not level.inner and not level.is_empty(level.text, schema):
            before, after = (len(self.key_close.rstrip()), len(self.close) - len(self.close.lstrip()))
            text = level.text.removeprefix(self.key_close[before:]).removesuffix(self.close[:after])
            return value_json(text, schema.types)
        if is_list:
            return f"[{', '.join(self._json(inner, schema.part(None)) for inner in level.inner)}]"
        members = ((json.dumps(i.key, ensure_ascii=False), self._json(i, schema.part(i.key))) for i in level.inner)
        return f"{{{', '.join(f'{key}: {value}' for key, value in members)}}}"


@dataclass(slots=True)
class _Level:
    """A value within tags that are read."""

    key: str = ""
    is_item: bool = False
    close: str = ""
    start: int = 0
    text: str = ""
    inner: list[_Level] = field(default_factory=list)

    def is_empty(self, text: str, schema: Schema) -> bool:
        """Return whether the value is an empty object or list, which templates write as no text."""
        return not text.strip() and (schema.types or set()) - {"null"} in ({"array"}, {"object"})


def find_nested(write: Callable[[Any], str]) -> NestedTags | None:
    """Return the tags of objects and lists, given what a template writes for a value; None for other notations."""
    one, two = write({_KEY: _VALUE}), write({_KEY: _VALUE, _OTHER_KEY: _OTHER_VALUE})
    opening, found, rest = one.partition(_KEY)
    key_close, _, close = rest.partition(_VALUE)
    item_open, _, after = write([_VALUE, _OTHER_VALUE]).partition(_VALUE)
    item_close = after.partition(_OTHER_VALUE)[2]
    both = one + one.replace(_KEY, _OTHER_KEY).replace(_VALUE, _OTHER_VALUE)
    if not (found and opening.strip() and close.strip() and two == both):
        return None
    if not (item_open.strip() and item_close.strip() and after == item_close + item_open + _OTHER_VALUE + item_close):
        return None
    return NestedTags(opening, key_close, close, item_open, item_close)


def _key_of(tags: NestedTags, item: str) -> str:
    match = re.fullmatch(rf"{pattern(tags.open)}(.*){pattern(tags.key_close)}", item.strip())
    return match[1] if match else ""


@lru_cache(64)
def _tags(tags: NestedTags) -> re.Pattern[str]:
    """Return an expression for a tag, with the group `end` if it closes, and `key` if it opens a member."""
    close, named, after = tags.close.partition(_KEY)
    end = pattern(close) + (_KEY_TEXT + pattern(after) if named else "")
    member = rf"{pattern(tags.open)}(?P<key>{_KEY_TEXT}){pattern(tags.key_close)}"
    return re.compile(rf"(?P<end>{pattern(tags.item_close)}|{end})|{pattern(tags.item_open)}|{member}")
