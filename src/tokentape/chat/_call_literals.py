"""Read calls with arguments written like literals in a program: `f(a="b", n=[1, None])`, `f{a:<q>b<q>,n:1}`.

Models may use different quotes, commas and words for true and null than their templates. Python's and JSON's forms are
accepted, as are the template's quotes and separators.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tokentape.chat._call_syntax import CallSyntax
from tokentape.chat._delimiters import pattern, skip, skip_space
from tokentape.chat._json_text import Schema, takes_only_text, value_json
from tokentape.chat._tokenizer import MARK
from tokentape.types import Tool

_NAME = r"[\w.:/-]{1,256}"
_BARE = re.compile(r"[^,()\[\]{}]*")
_KEY = re.compile(r"""\s*(?P<key>[^\s=:,()\[\]{}"'\ud800-\udfff]{1,256})\s*""")
_INNER_KEY = re.compile(r"(?P<key>[^=:,()\[\]{}\ud800-\udfff]{0,256})")
"""A key within an object. Templates that write keys without quotes do so for any key: with spaces, quotes, or empty."""
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4}(?:(?<=[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2})?)|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(.))",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_OPENERS, _CLOSERS = "([{", ")]}"
_DEEPEST = 100


class LiteralError(ValueError):
    """The text is not a list of arguments in this notation."""


_COMMA = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class _Notation:
    """The delimiters around values, as strings and regular expressions."""

    quote: str
    key_close: str
    between: re.Pattern[str]
    """White space and separators between arguments. A comma is always a separator."""
    next_argument: re.Pattern[str]
    """Ends a value without quotes: a separator, then the next key or the end of the text."""
    after_string: re.Pattern[str]
    """What must follow a quote for it to close a string."""
    may_follow: re.Pattern[str]
    """Matches the end of the text if it may be the beginning of an `after_string` match."""
    before_value: tuple[str, ...]

    def begins_value(self, text: str, position: int) -> bool:
        """Return whether a value may begin at `position`. Quotes elsewhere, such as apostrophes, open no strings."""
        return text[max(0, position - 100) : position].rstrip().endswith(self.before_value)


@lru_cache(64)
def _notation(syntax: CallSyntax) -> _Notation:
    key_close = syntax.key_close.strip()
    separator = syntax.argument_separator.strip()
    # If the template writes only white space or nothing between arguments, a key must follow the separator.
    any_key = _KEY.pattern.replace("?P<key>", "?:")
    key = rf"{any_key}{re.escape(key_close)}"
    before_key = re.escape(separator) or rf"[\s,](?={key})"
    begun = "|".join(re.escape(separator[:n]) for n in range(1, len(separator))) or "(?!)"
    if not separator:
        begun = rf"\s{any_key}(?:{'|'.join(re.escape(key_close[:n]) for n in range(len(key_close)))})"
    return _Notation(
        quote=syntax.quote,
        key_close=key_close,
        between=re.compile(rf"(?:[\s,]|{before_key})*"),
        next_argument=re.compile(rf"{before_key}(?:{key}|\s*\Z)"),
        after_string=re.compile(rf"\s*?(?:[,:)\]}}]|{before_key}|\Z)"),
        may_follow=re.compile(rf"\s{{0,1000}}?(?:{begun})?\Z"),
        before_value=tuple(filter(None, ("=", ":", ",", *_OPENERS, key_close, separator))),
    )


class LiteralEnd:
    """Finds the bracket that closes the one at `start`. Reads each character once, except in unclosed strings."""

    def __init__(self, start: int, syntax: CallSyntax) -> None:
        quote = syntax.quote
        self.start = start
        self.end: int | None = None
        """The position after the closing bracket."""
        self.broken_at: int | None = None
        """The position of a control token that is not the quote."""
        self._quote = quote
        self._notation = _notation(syntax)
        self._position = start
        self._depth = 0
        self._string_at: int | None = None
        """Where the string that is being read begins."""
        own = f"{re.escape(quote)}|" if quote else ""
        self._outside = re.compile(rf"""{own}["'()\[\]{{}}]|(?P<break>{MARK.pattern})""")

    def find(self, text: str, *, over: bool) -> None:
        """Continue in the text so far and set `end` or `broken_at` if found. `over` means that `text` is complete."""
        while self.end is None and self.broken_at is None:
            if self._string_at is not None:
                end, self._position = _string_end(text, self._string_at, self._notation, self._position, over=over)
                if end is None:
                    return
                self._position, self._string_at = end, None
            match = self._outside.search(text, self._position)
            if match is None:
                self._position = max(self._position, len(text) - len(self._quote))
                return
            self._position = match.end()
            if match["break"] is not None:
                self.broken_at = match.start()
            elif match[0] in _OPENERS:
                self._depth += 1
            elif match[0] in _CLOSERS:
                self._depth -= 1
                self.end = match.end() if self._depth == 0 else None
            elif match[0] == self._quote or self._notation.begins_value(text, match.start()):
                self._string_at = match.start()


def read_head(syntax: CallSyntax, text: str, start: int) -> tuple[str, int] | None:
    """Return the name at `start` and the position of the bracket after it; None if `start` has no such head."""
    head = re.compile(rf"(?P<name>{_NAME})\s*{pattern(syntax.name_close)}").match(text, start)
    return (head["name"], head.end() - 1) if head else None


def may_be_head(text: str, start: int) -> bool:
    """Return whether `text[start:]` may be the beginning of a name and its bracket."""
    return re.fullmatch(rf"(?:{_NAME})?\s*", text[start : start + 300]) is not None and len(text) < start + 300


def arguments_json(syntax: CallSyntax, tool: Tool | None, text: str) -> str:
    """Return the arguments in `text`, the text between the outer brackets, as a JSON object.

    Raises `LiteralError` if `text` is not a list of arguments.
    """
    return "{" + ", ".join(_arguments(syntax, tool, text)) + "}"


def _arguments(syntax: CallSyntax, tool: Tool | None, text: str) -> Iterator[str]:
    position = 0
    notation = _notation(syntax)
    while (position := skip(notation.between, text, position)) < len(text):
        match = _KEY.match(text, position)
        if match is None or not text.startswith(notation.key_close, match.end()):
            raise LiteralError("an argument has no name")
        position = skip_space(text, match.end() + len(notation.key_close))
        types = Schema.of(tool, match["key"]).types
        opening = text[position : position + 1]
        if _quote_at(text, position, syntax.quote):
            raw, position = _string(text, position, notation)
            value = value_json(raw, types, is_text=True if syntax.json_key_close else None)
        elif opening and opening in _OPENERS and (syntax.quote or not takes_only_text(types)):
            value, position = _value(text, position, notation, 0)
        else:
            end = notation.next_argument.search(text, position)
            after = end.start() if end else len(text)
            raw = _bare(text[position:after])
            raw = raw.strip() if syntax.quote else raw
            value, position = value_json(raw, types, is_text=False), after
        yield f"{json.dumps(match['key'], ensure_ascii=False)}: {value}"


def _value(text: str, position: int, notation: _Notation, depth: int) -> tuple[str, int]:
    """Return the JSON text of the value at `position` within a list or an object, and the position after it."""
    if depth > _DEEPEST:
        raise LiteralError(f"values are nested more than {_DEEPEST} levels deep")
    position = skip_space(text, position)
    if _quote_at(text, position, notation.quote):
        raw, position = _string(text, position, notation)
        return json.dumps(raw, ensure_ascii=False), position
    opening = text[position : position + 1]
    if not opening or opening not in _OPENERS:
        match = _BARE.match(text, position)
        raw = _bare(match[0].strip()) if match else ""
        if not match or not raw:
            raise LiteralError("a value is missing")
        literal = _WORDS.get(raw) or (raw if _NUMBER.fullmatch(raw) else None)
        return literal or json.dumps(raw, ensure_ascii=False), match.end()
    closing = _CLOSERS[_OPENERS.index(opening)]
    items = []
    position = skip(_COMMA, text, position + 1)
    while position < len(text) and text[position] != closing:
        if opening == "{":
            key, position = _key(text, position, notation)
            item, position = _value(text, position, notation, depth + 1)
            items.append(f"{json.dumps(key, ensure_ascii=False)}: {item}")
        else:
            item, position = _value(text, position, notation, depth + 1)
            items.append(item)
        position = skip(_COMMA, text, position)
    if position == len(text):
        raise LiteralError("a bracket is not closed")
    return ("{%s}" if opening == "{" else "[%s]") % ", ".join(items), position + 1


def _bare(raw: str) -> str:
    """Return a value without quotes. Raises `LiteralError` if a control token, such as the quote, is in it."""
    if MARK.search(raw):
        raise LiteralError("a quote is within a value")
    return raw


def _key(text: str, position: int, notation: _Notation) -> tuple[str, int]:
    if _quote_at(text, position, notation.quote):
        key, position = _string(text, position, notation)
    else:
        match = _INNER_KEY.match(text, position)
        key, position = (match["key"].strip(), match.end()) if match else ("", position)
    position = skip_space(text, position)
    if text[position : position + 1] not in (":", "="):
        raise LiteralError("a key has no value")
    return key, position + 1


def _quote_at(text: str, position: int, quote: str) -> str:
    """Return the quote at `position`; empty if the text has no quote there."""
    if quote and text.startswith(quote, position):
        return quote
    return text[position] if text[position : position + 1] in ("'", '"') else ""


def _string(text: str, position: int, notation: _Notation) -> tuple[str, int]:
    """Return the string that begins at `position`, and the position after it."""
    own = _quote_at(text, position, notation.quote)
    end, _ = _string_end(text, position, notation, position, over=True)
    if end is None:
        raise LiteralError("a string is not closed")
    raw = text[position + len(own) : end - len(own)]
    return (_unescaped(raw) if own in ("'", '"') else raw), end


def _string_end(text: str, start: int, notation: _Notation, seek: int, *, over: bool) -> tuple[int | None, int]:
    """Return the position after the string that begins at `start`, and where to continue searching for its end.

    The search begins at `seek`. The first value is None while the string is not closed, or while more text may come
    (`over` is false) that shows that it is not. Only a quote that a separator or bracket follows closes a string,
    because some templates do not escape quotes.
    """
    own = _quote_at(text, start, notation.quote)
    position = max(seek, start + len(own))
    while (closing := text.find(own, position)) >= 0:
        end = closing + len(own)
        if own not in ("'", '"'):
            return end, end
        escapes = len(text[start:closing]) - len(text[start:closing].rstrip("\\"))
        if escapes % 2 == 0:
            if not over and notation.may_follow.match(text, end):
                return None, closing
            if notation.after_string.match(text, end):
                return end, end
        position = end
    return None, max(position, len(text) - len(own) + 1)


def _unescaped(raw: str) -> str:
    def unescape(match: re.Match[str]) -> str:
        if match[4] is not None:
            return _ESCAPED.get(match[4], match[0])
        codes = [int(digits, 16) for digits in (match[1] or match[2] or match[3]).split("\\u")]
        if max(codes) > 0x10FFFF:
            return match[0]
        # Two escapes may be one character. Half a character must not look like half a mark.
        text = "".join(map(chr, codes))
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    return _ESCAPE.sub(unescape, raw)


def needs_known_tool(syntax: CallSyntax) -> bool:
    """Return whether a call must name an offered tool, because no control token opens calls in this syntax."""
    return not MARK.search(syntax.section_open + syntax.open)
