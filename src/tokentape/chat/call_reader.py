"""Reads tool calls out of marked text, by the syntax that the template writes.

Tolerant where that is unambiguous: white space may vary, the closing delimiter may be missing at the end of a turn if
the call itself is complete, JSON may hold the keys in any order.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokentape.chat.call_syntax import KEY, CallSyntax
from tokentape.chat.reader import first_of
from tokentape.chat.reply import CallStatus
from tokentape.chat.tokenizer import MARK
from tokentape.types import Tool

_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call found in a text. `end` is the position behind it and its closing delimiter."""

    end: int
    name: str | None
    """None where no tool is named: then it was no call."""
    arguments: str
    status: CallStatus
    more: bool
    """Another call of the same section follows."""
    space_after: int
    """White space behind the call that belongs to its delimiter."""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class _Body:
    """What stands between the delimiters of a call: bounds, name, arguments."""

    end: int
    name: str
    arguments: str
    valid: bool
    id: str | None = None


class CallReader:
    """Reads calls of one syntax."""

    def __init__(self, syntax: CallSyntax, tools: Mapping[str, Tool]) -> None:
        self._syntax = syntax
        self._tools = tools
        self._section_open = syntax.section_open.strip()
        self._open = syntax.open.strip()
        self._close = syntax.close.strip()
        self._separator = syntax.separator.strip()
        self._section_close = syntax.section_close.strip()
        space = syntax.space_before
        triggers = {_first_delimiter(syntax.section_open + syntax.open): space, _first_delimiter(syntax.open): space}
        self.triggers = tuple((core, before) for core, before in triggers.items() if core)
        """(delimiter, white space before it) of everything a call may begin with."""

    @property
    def bare(self) -> bool:
        """Calls have no delimiters: a turn that is a JSON object with a name is a call."""
        return not self.triggers and self._syntax.style == "json"

    def is_bare_call(self, text: str, at: int) -> bool:
        """Whether the whole rest of a turn is calls without delimiters."""
        body = self._read_json(text, _skip_marks(text, at))
        return body is not None and body.name in self._tools

    def read(self, text: str, at: int, *, final: bool) -> ReadCall | None:
        """The call that begins at `at`; None if more text may complete it. `final`: no more text will come."""
        start = self._skip(text, _skip_marks(text, at) if self.bare else at, self._section_open, self._open)
        close = text.find(self._close, start) if self._close else -1
        if close < 0 and not final:
            return None
        body = self._read_body(text, start)
        if body is None:
            return self._read_broken(text, start, close, final=final)
        end = _skip_space(text, body.end)
        if self._close and text.startswith(self._close, end):
            return self._done(text, end + len(self._close), body)
        if final or close >= 0:
            return self._done(text, body.end, body)
        return None

    def _done(self, text: str, end: int, body: _Body) -> ReadCall:
        status: CallStatus = "ok"
        if not body.valid:
            status = "bad_arguments"
        elif body.name not in self._tools:
            status = "unknown_tool"
        after = self._skip(text, end, self._separator)
        more = self._open != "" and text.startswith(self._open, after)
        if self._open == "" and self._separator:
            more = after > _skip_space(text, end)
        if not more and self._section_close and text.startswith(self._section_close, _skip_space(text, end)):
            end = _skip_space(text, end) + len(self._section_close)
        tail = self._syntax.close + self._syntax.section_close
        space = len(tail) - len(tail.rstrip())
        return ReadCall(after if more else end, body.name, body.arguments, status, more, space, body.id)

    def _read_broken(self, text: str, start: int, close: int, *, final: bool) -> ReadCall | None:
        """A call whose body can't be read: ended by its delimiter or by the end of the turn."""
        if close < 0 and not final:
            return None
        end = close + len(self._close) if close >= 0 else len(text)
        raw = text[start : close if close >= 0 else end].strip()
        name, arguments = self._guess(raw)
        status: CallStatus = "bad_arguments" if close >= 0 else "unclosed"
        return ReadCall(end, name, arguments, status, more=False, space_after=0)

    def _guess(self, raw: str) -> tuple[str | None, str]:
        """Name and raw arguments of a call that is not well-formed."""
        if self._syntax.style == "json":
            key = re.escape(self._syntax.name_key)
            name = re.search(rf'"{key}"\s*:\s*"((?:[^"\\]|\\.)*)"', raw)
            key = re.escape(self._syntax.arguments_key)
            arguments = re.search(rf'"{key}"\s*:\s*(.*?)\s*\}}?\s*$', raw, re.DOTALL)
            return name[1] if name else None, arguments[1] if arguments else ""
        core = self._syntax.name_close.strip() or self._syntax.key_open.strip()
        name_part, found, rest = raw.partition(core) if core else (raw, "", "")
        name_part = name_part.strip()
        return (name_part if found and re.fullmatch(r"[\w.:-]+", name_part) else None), rest.strip()

    def _read_body(self, text: str, start: int) -> _Body | None:
        match self._syntax.style:
            case "json":
                return self._read_json(text, start)
            case "named":
                return self._read_named(text, start)
            case "tagged":
                return self._read_tagged(text, start)

    def _read_json(self, text: str, start: int) -> _Body | None:
        try:
            value, end = _JSON.raw_decode(text, _skip_space(text, start))
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get(self._syntax.name_key), str):
            return None
        arguments = value.get(self._syntax.arguments_key, {})
        call_id = value.get("id")
        return _Body(
            end,
            value[self._syntax.name_key],
            _arguments_text(arguments),
            _is_object(arguments),
            call_id if isinstance(call_id, str) else None,
        )

    def _read_named(self, text: str, start: int) -> _Body | None:
        core = self._syntax.name_close.strip()
        brace = text.find("{", start)
        at = text.find(core, start) if core else brace
        if at < 0 or brace < 0:
            return None
        name, call_id = text[start:at].strip(), None
        at += len(core)
        id_close = self._syntax.id_close.strip()
        id_end = text.find(id_close, at, brace) if id_close else -1
        if id_end >= 0:
            call_id = text[at:id_end].strip()
            at = id_end + len(id_close)
        if self._syntax.name_is_id:
            name, call_id = self._name_in(name), name
        try:
            value, end = _JSON.raw_decode(text, _skip_space(text, at))
        except (ValueError, RecursionError):
            return None
        return _Body(end, name, _arguments_text(value), isinstance(value, dict), call_id)

    def _name_in(self, call_id: str) -> str:
        """The longest known tool name that stands in an id as a word, such as `add` in `functions.add:0`."""
        found = [name for name in self._tools if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", call_id)]
        return max(found, key=len, default=call_id)

    def _read_tagged(self, text: str, start: int) -> _Body | None:
        syntax = self._syntax
        name_close, key_open = syntax.name_close.strip(), syntax.key_open.strip()
        key_close, value_close = syntax.key_close.strip(), syntax.value_close.strip()
        if not (key_open and key_close and value_close):
            return None
        ends = [text.find(core, start) for core in (name_close, key_open, self._close) if core]
        ends = [end for end in ends if end >= 0]
        if not ends:
            return None
        at = min(ends)
        name = text[start:at].strip()
        at = self._skip(text, at, name_close)
        arguments: dict[str, Any] = {}
        key_closes = [core for core in (key_close, syntax.json_key_close.strip()) if core]
        # `key_open` may begin like `close`: `<` and `</call>`.
        while text.startswith(key_open, at) and not (self._close and text.startswith(self._close, at)):
            found = first_of(text, at + len(key_open), key_closes)
            if found is None:
                return None
            key = text[at + len(key_open) : found[0]].strip()
            closing = value_close.replace(KEY, key)
            value_start = found[0] + len(found[1])
            value_end = text.find(closing, value_start)
            if value_end < 0:
                return None
            is_text = bool(syntax.json_key_close) and found[1] == key_close
            arguments[key] = self._value(name, key, text[value_start:value_end], is_text=is_text)
            at = _skip_space(text, value_end + len(closing))
        return _Body(at, name, json.dumps(arguments, ensure_ascii=False), valid=True)

    def _value(self, tool: str, key: str, raw: str, *, is_text: bool) -> Any:
        """A tagged value: text where the tool's schema says string, else JSON or what Python prints."""
        syntax = self._syntax
        before = len(syntax.key_close) - len(syntax.key_close.rstrip())
        after = len(syntax.value_close) - len(syntax.value_close.lstrip())
        for _ in range(before):
            raw = raw[1:] if raw[:1].isspace() else raw
        for _ in range(after):
            raw = raw[:-1] if raw[-1:].isspace() else raw
        parameters = self._tools.get(tool, {}).get("function", {}).get("parameters") or {}
        schema = (parameters.get("properties") or {}).get(key)
        if is_text or (isinstance(schema, Mapping) and schema.get("type") == "string"):
            return raw
        try:
            return json.loads(raw)
        except ValueError:
            return _PYTHON_WORDS.get(raw.strip()) if raw.strip() in _PYTHON_WORDS else _python_literal(raw)

    @staticmethod
    def _skip(text: str, at: int, *cores: str) -> int:
        """Position behind `cores`, each optional, with white space around them."""
        for core in cores:
            start = _skip_space(text, at)
            if core and text.startswith(core, start):
                at = start + len(core)
        return _skip_space(text, at)


_PYTHON_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}


def _python_literal(raw: str) -> Any:
    """A list or dict as Python prints it; anything else is text."""
    if raw.strip()[:1] not in ("[", "{", "("):
        return raw
    try:
        return json.loads(json.dumps(ast.literal_eval(raw.strip())))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return raw


def _first_delimiter(text: str) -> str:
    """The beginning of an opening delimiter that is enough to know it by: its first mark, else all of it."""
    core = text.strip()
    mark = MARK.match(core)
    return mark[0] if mark else core


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _skip_marks(text: str, at: int) -> int:
    """Position behind control tokens and white space: models put some in front of a bare call."""
    while match := MARK.match(text, at := _skip_space(text, at)):
        at = match.end()
    return at


def _is_object(arguments: Any) -> bool:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return False
    return isinstance(arguments, dict)


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
