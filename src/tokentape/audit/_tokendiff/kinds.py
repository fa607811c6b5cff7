"""Classify a difference by the bytes of both sides and the text around them.

Text that differs has a *kind*. A token boundary that moved within the same text has a *class*, by the characters around
it, and a finer *artifact*. Artifacts are named after the "phantom edits" of arXiv 2601.14658, which gives names and
examples only. We defined the rules, so compare artifacts with each other, not with the paper's numbers.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeAlias
from unicodedata import normalize

import numpy as np


@dataclass(frozen=True, slots=True)
class Artifact:
    """A way in which a stretch changed."""

    kind: str
    """Its class. In `spacing` and `text` the text drifted, in all others only the ids."""
    meaning: str
    phantom: int | None = None
    """The number of its phantom-edit class in the paper."""


ARTIFACTS = {
    "control": Artifact("control", "letters of a control token on one side, the token itself on the other"),
    "partial-utf8": Artifact("bytes", "a character is split elsewhere, or bytes are not valid UTF-8"),
    "whitespace-detach": Artifact("whitespace", "whitespace is a token of its own on one side only", 2),
    "whitespace-run": Artifact("whitespace", "a run of whitespace is split elsewhere"),
    "whitespace-shift": Artifact("whitespace", "a space joins the token on its other side", 1),
    "digits": Artifact("digits", "a number is split elsewhere"),
    "acronym": Artifact("word", "an acronym is split elsewhere", 7),
    "tail": Artifact("word", "a plural or possessive ending is split off on one side only", 8),
    "morpheme": Artifact("word", "one side splits the word at a prefix or an ending", 6),
    "proper-noun": Artifact("word", "a name is split elsewhere", 5),
    "intra-word": Artifact("word", "any other word is split elsewhere", 4),
    "punctuation": Artifact("punctuation", "other characters are split elsewhere"),
    "space-dropped": Artifact("spacing", "whitespace on one side, none on the other", 1),
    "whitespace-substitution": Artifact("spacing", "different whitespace in the same places", 3),
    "normal-form": Artifact("text", "a different Unicode normal form of the same characters"),
    "text": Artifact("text", "different text"),
}
"""Artifacts by name. If several fit a stretch, the first in this order is used."""

_ORDER = {name: n for n, name in enumerate(ARTIFACTS)}

_AROUND = 64
"""The number of bytes to read on each side of a stretch, to see whole words."""

_PREFIX = re.compile(
    "anti|auto|be|bi|co|counter|de|dis|en|ex|extra|fore|hyper|il|im|in|inter|ir|mega|micro|mid|mis|mono|multi|non|out|"
    "over|para|poly|post|pre|pro|pseudo|re|semi|sub|super|tele|trans|tri|un|under|up",
    re.IGNORECASE,
)
_ENDING = re.compile(
    "able|age|al|ally|ance|ation|ed|ely|ence|ent|er|ers|es|est|ful|fully|hood|ible|ic|ical|ies|ify|ily|ing|ings|ion|ions|"
    "ish|ism|ist|ity|ive|ize|ized|izing|less|ly|ment|ments|ness|or|ors|ous|ship|tion|ward|wise",
    re.IGNORECASE,
)
_TAIL = re.compile(r"(?:'s|’s|s'|s’|es|s)(?!\w)")


def boundary_artifact(a: Sequence[bytes], b: Sequence[bytes], before: bytes = b"", after: bytes = b"") -> str:
    """Return the artifact of a stretch that two sequences split into different tokens.

    `a` and `b` have the bytes of each token, `before` and `after` the text around the stretch.

    >>> boundary_artifact([b" un", b"bel", b"ievable"], [b" unbelievable"])
    'morpheme'
    >>> boundary_artifact([b"12", b"3"], [b"123"])
    'digits'
    """
    text = b"".join(a)
    ends = [set(np.cumsum([len(piece) for piece in side]).tolist()) for side in (a, b)]
    moved = sorted(ends[0] ^ ends[1])
    if not moved:
        return "intra-word"  # two ids that spell the same bytes
    whole = before[-_AROUND:] + text + after[:_AROUND]
    start = len(before[-_AROUND:])
    artifacts = {_at_cut(whole, start + offset, a, b) for offset in moved}
    return min(artifacts, key=_ORDER.__getitem__)


def text_artifact(left: bytes, right: bytes) -> str:
    if b"".join(left.split()) != b"".join(right.split()):
        plain = [normalize("NFKC", side.decode("utf-8", "replace")) for side in (left, right)]
        return "normal-form" if plain[0] == plain[1] else "text"
    same_words = left.split() == right.split()
    same_edges = [(side[:1].isspace(), side[-1:].isspace()) for side in (left, right)]
    return "whitespace-substitution" if same_words and same_edges[0] == same_edges[1] else "space-dropped"


def _at_cut(whole: bytes, offset: int, a: Sequence[bytes], b: Sequence[bytes]) -> str:
    if whole[offset] & 0xC0 == 0x80:
        return "partial-utf8"
    left, right = whole[:offset].decode("utf-8", "ignore"), whole[offset:].decode("utf-8", "ignore")
    before, after = left[-1:], right[:1]
    if before.isspace() or after.isspace():
        if before.isspace() and after.isspace():
            return "whitespace-run"
        alone = any(piece.isspace() for side in (a, b) for piece in side)
        return "whitespace-detach" if alone else "whitespace-shift"
    if before.isdigit() and after.isdigit():
        return "digits"
    if _TAIL.match(right) and before.isalpha():
        return "tail"
    if before.isalnum() and after.isalnum():
        return _in_word(left, right)
    return "punctuation"


def _in_word(left: str, right: str) -> str:
    head = left[len(left) - _letters(reversed(left)) :]
    rest = right[: _letters(right)]
    word = head + rest
    if len(word) <= 8 and word.isalpha() and word.isupper():
        return "acronym"
    if (_PREFIX.fullmatch(head) and len(rest) >= 3) or (_ENDING.fullmatch(rest) and len(head) >= 3):
        return "morpheme"
    sentence = left[: len(left) - len(head)].rstrip()
    # The first word of a sentence, or of the text read here, may have a capital without being a name.
    if word[:1].isupper() and word[1:].islower() and sentence and sentence[-1] not in ".!?:\"'“":
        return "proper-noun"
    return "intra-word"


def _letters(text: Iterable[str]) -> int:
    return sum(1 for _ in takewhile(str.isalnum, text))


KINDS = {
    "ids": "different ids for the same bytes",
    "bytes": "different bytes that are not valid UTF-8 and look alike as text",
    "forged": "a control token on one side, its letters as text on the other",
    "control": "a control token that the other side lacks, or a different control token",
    "reasoning": "reasoning that is on one side only",
    "json": "the same JSON value, written differently",
    "boolean": "the same value, with true, false or null written differently",
    "spacing": "different whitespace, otherwise the same text",
    "cut": "the recorded side ends earlier",
    "missing": "text that the recorded side lacks",
    "extra": "text that only the recorded side has",
    "text": "different text",
}

Stretch: TypeAlias = tuple[int, int]
"""A half-open range of a region's bytes."""

REASONING = re.compile(r"think|reason|thought|channel\|>analysis", re.IGNORECASE)
"""Finds a reasoning delimiter in a text with special tokens spelled out."""

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_OBJECT_ENDS = 4
_DICTIONARY = re.compile(r"\{\s*['\"}]")
_READ_AGAIN = 20
"""Limit on characters read after braces that do not begin an object, as a multiple of the text's length."""


@dataclass(frozen=True)
class Region:
    """A run of whole segments of one sequence that contains differences."""

    content: bytes
    opened_by: str = ""
    """The special token before the region; empty if there is none."""

    @cached_property
    def text(self) -> str:
        """The decoded bytes. Invalid UTF-8 becomes U+FFFD."""
        return self.content.decode("utf-8", "replace")

    @cached_property
    def values(self) -> list[tuple[int, int, Any]]:
        """Start, end and value of each JSON object or Python dictionary in `text`."""
        return list(_objects(self.text))

    def between_values(self) -> list[str]:
        starts = [start for start, _, _ in self.values] + [len(self.text)]
        ends = [0] + [end for _, end, _ in self.values]
        return [self.text[end:start] for end, start in zip(ends, starts, strict=True)]

    def value_around(self, stretch: Stretch) -> Any:
        start, end = self._characters(stretch)
        return next((value for first, last, value in self.values if first <= start and end <= last), None)

    def word_around(self, stretch: Stretch) -> str:
        start, end = self._characters(stretch)
        while start and self.text[start - 1].isalpha():
            start -= 1
        while end < len(self.text) and self.text[end].isalpha():
            end += 1
        return self.text[start:end]

    def _characters(self, stretch: Stretch) -> tuple[int, int]:
        start, end = (len(self.content[:offset].decode("utf-8", "replace")) for offset in stretch)
        return start, end


def kind_of_text(expected: Region, recorded: Region, left: Stretch, right: Stretch) -> str:
    """Return the kind of a difference without special tokens: `left` in `expected`, `right` in `recorded`."""
    expected_bytes, recorded_bytes = expected.content[slice(*left)], recorded.content[slice(*right)]
    if _reasoning_of(expected, expected_bytes, recorded) or _reasoning_of(recorded, recorded_bytes, expected):
        return "reasoning"
    if expected.text == recorded.text:
        return "bytes"
    value, other_value = expected.value_around(left), recorded.value_around(right)
    if value is not None and other_value is not None and (kind := _same_value(value, other_value)):
        return kind
    word = _WORDS.get(expected.word_around(left).lower())
    if word is not None and word == _WORDS.get(recorded.word_around(right).lower()):
        return "boolean"
    if b"".join(expected_bytes.split()) == b"".join(recorded_bytes.split()):
        return "spacing"
    return "missing" if not recorded_bytes else "text" if expected_bytes else "extra"


def kind_of_values(expected: Region, recorded: Region) -> str | None:
    """Return `json` or `boolean` if the regions differ only in how their objects are written, else None."""
    expected_values, recorded_values = ([value for _, _, value in region.values] for region in (expected, recorded))
    alike = len(expected_values) == len(recorded_values) and expected.between_values() == recorded.between_values()
    return _same_value(expected_values, recorded_values) if expected_values and alike else None


def _reasoning_of(region: Region, own: bytes, other: Region) -> bool:
    """Return True if `own`, bytes of a region, are reasoning that the other region lacks."""
    if not own.strip():
        return False
    # If the reasoning delimiters are not special tokens, they are part of `own`.
    if re.search(rb"<think(ing)?>.*</think(ing)?>", own, re.DOTALL) is not None:
        return True
    opened = REASONING.search(region.opened_by) is not None and "/" not in region.opened_by
    return opened and not other.content.strip()


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    start, budget = text.find("{"), _READ_AGAIN * len(text)
    while start >= 0 and budget > 0:
        result, wasted = _object_at(text, start)
        if result is not None:
            yield start, result[1], result[0]
        else:
            budget -= wasted
        start = text.find("{", start + 1 if result is None else result[1])


def _object_at(text: str, start: int) -> tuple[tuple[Any, int] | None, int]:
    """Return the object that begins at `start` and its end, or None and the number of characters read for nothing."""
    try:
        return json.JSONDecoder().raw_decode(text, start), 0
    except (ValueError, RecursionError) as error:
        wasted = error.pos - start if isinstance(error, json.JSONDecodeError) else len(text)
    # A template that writes a dictionary with `str` writes Python syntax. Only the last few closing braces are
    # tried, since text has many others.
    end = len(text) if _DICTIONARY.match(text, start) else start
    for _ in range(_OBJECT_ENDS):
        end = text.rfind("}", start, end)
        if end < 0:
            break
        wasted += end - start
        try:
            return (ast.literal_eval(text[start : end + 1]), end + 1), wasted
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None, wasted


def _same_value(a: Any, b: Any) -> str | None:
    """Return `json` if values are equal, `boolean` if only true, false and null are written differently, else None."""
    for kind, words in (("json", False), ("boolean", True)):
        if _plain(a, words=words) == _plain(b, words=words):
            return kind
    return None


def _plain(value: Any, *, words: bool) -> str:
    """Return canonical JSON of a value. With `words`, strings that name true, false or null become these values."""

    def plain(part: Any) -> Any:
        match part:
            case dict():
                return {str(key): plain(item) for key, item in part.items()}
            case list() | tuple():
                return [plain(item) for item in part]
            case str() if words and part.lower() in _WORDS:
                return json.loads(_WORDS[part.lower()])
            case float() if part.is_integer():
                return int(part)
        return part

    return json.dumps(plain(value), sort_keys=True, default=str)
