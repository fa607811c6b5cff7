"""Read the text between the delimiters of one tool call while the model writes it.

There is one reader per `CallSyntax` style. `read` gets the whole text so far and continues where it last stopped, so a
body that is streamed costs no more to read than one that arrives at once.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import unescape

from tokentape.chat._call_literals import (
    LiteralEnd,
    LiteralError,
    arguments_json,
    may_be_head,
    needs_known_tool,
    read_head,
)
from tokentape.chat._call_syntax import KEY, CallSyntax
from tokentape.chat._delimiters import ANY, any_of, may_grow, pattern, pieces, skip_space
from tokentape.chat._json_text import (
    ObjectEnd,
    Schema,
    decode,
    members,
    quoted_json,
    standard,
    takes_only_text,
    value_json,
)
from tokentape.chat._reply import CallStatus
from tokentape.chat._tokenizer import MARK
from tokentape.types import Tool

_NAME_CHARACTER = r"""[^\s<>{}()\[\]"'`,;=\ud800-\udfff]"""
_LONGEST_HEAD = 600
"""The maximum number of characters between an opening delimiter and the call's arguments or the argument's value."""
JSON_PUNCTUATION = "{}[],:"
_ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys that models write for the arguments in JSON, even if their template writes another key."""
_OTHER_FIELDS = ("id", "type", "function", "index")
"""Fields of a tool call in the OpenAI API other than its name and arguments."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call found in a text."""

    end: int
    """The position after the call. From a `BodyReader`, its closing delimiter begins there, unless it is missing."""
    name: str | None
    """None if the text up to `end` only begins like a call."""
    arguments: str = ""
    status: CallStatus = "unclosed"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """The body can't become a call, whatever text follows. The error is at `position`."""

    position: int
    no_json: bool = False
    """Whether the error is invalid JSON: an object with balanced brackets that ends at `position`."""


class BodyReader(ABC):
    """Reads the body of one call, which begins at `start`."""

    def __init__(self, syntax: CallSyntax, tools: Mapping[str, Tool], start: int) -> None:
        self._syntax = syntax
        self._tools = tools
        self._start = start

    @abstractmethod
    def read(self, text: str, *, over: bool) -> ReadCall | Broken | None:
        """Return the call if it is complete, `Broken` if the text can't become a call, None if more text is needed.

        `over` means that the model has ended its turn, so a call ends no later than the text.
        """


def body_reader(syntax: CallSyntax, tools: Mapping[str, Tool], text: str, start: int) -> BodyReader | None:
    """Return a reader for the body that begins at `start`; None if its first character has not arrived yet."""
    start = skip_space(text, start)
    if start == len(text):
        return None
    readers: Mapping[str, type[BodyReader]] = {
        "json": _JsonBody,
        "named": _NamedBody,
        "literal": _LiteralBody,
        "tagged": _TaggedBody,
    }
    return readers["json" if text[start] == "{" else syntax.style](syntax, tools, start)


@lru_cache(maxsize=64)
def breaks(close: str) -> str:
    """Return a regular expression for what ends JSON outside strings: a control token or the call's `close`."""
    closing = [piece for piece in pieces(close) if not set(piece) <= set(JSON_PUNCTUATION)]
    return f"{MARK.pattern}|{any_of(closing)}"


def object_arguments(raw: str) -> tuple[str, CallStatus]:
    """Return the arguments as JSON text, and the status of their call: `ok` if they are an object.

    Missing arguments and null become `{}`, and a JSON string is replaced by the JSON text that it contains.
    """
    core = raw.strip()
    if core in ("", "null", '""'):
        return "{}", "ok"
    try:
        value = decode(core)
        if core[0] == '"':
            core = value.strip() or "{}"
            value = decode(core)
    except ValueError:
        return core, "bad_arguments"
    return standard(core), "ok" if isinstance(value, dict) else "bad_arguments"


class _JsonBody(BodyReader):
    """Reads `{"name": NAME, "arguments": {...}}`."""

    _object: ObjectEnd | None = None

    def read(self, text: str, *, over: bool) -> ReadCall | Broken | None:
        start = self._start
        if text[start] != "{":
            return Broken(start)
        position = skip_space(text, start + 1)
        if position < len(text) and text[position] != '"':
            return Broken(start + 1)
        self._object = self._object or ObjectEnd(start, breaks(self._syntax.close))
        end = self._object.find(text)
        if end is None:
            return None if self._object.broken_at is None else Broken(self._object.broken_at)
        try:
            value = decode(text[start:end])
        except ValueError:
            return Broken(end, no_json=True)
        fields = dict(members(text[start:end]))
        function = value.get("function")
        call_id = value.get("id")
        if isinstance(function, dict):
            # The OpenAI API's form.
            value, fields = function, dict(members(fields["function"]))
        name = value.get(self._syntax.name_key) if self._syntax.name_key in value else function
        if not self._syntax.name_key and len(fields) == 1:
            ((name, raw),) = fields.items()
            fields = {_ARGUMENT_KEYS[0]: raw}
        if not isinstance(name, str):
            return Broken(end)
        if not isinstance(call_id, str):
            call_id = None
        keys = (self._syntax.arguments_key, *_ARGUMENT_KEYS)
        raw_arguments = next((fields[key] for key in keys if key in fields), None)
        if raw_arguments is None and not fields.keys() <= {self._syntax.name_key, *_OTHER_FIELDS}:
            # The key of the arguments is unknown: return the whole object rather than a call without arguments.
            return ReadCall(end, name, text[start:end], "bad_arguments", call_id)
        return ReadCall(end, name, *object_arguments(raw_arguments or ""), call_id)


class _NamedBody(BodyReader):
    """Reads `NAME name_close [ID id_close] {...}`."""

    _head: re.Match[str] | None = None
    _object: ObjectEnd | None = None

    def read(self, text: str, *, over: bool) -> ReadCall | Broken | None:
        if self._head is None or self._object is None:
            head, after_head = _named(self._syntax)
            limit = self._start + _LONGEST_HEAD
            match = after_head.search(text, self._start, limit)
            # A word at the end of the text may become a longer one, as `[[call` may become `[[called`.
            may_grow = match is not None and match.end() == len(text) and match[0][-1].isalnum()
            if (match is None or may_grow) and not over:
                return None if len(text) < limit else Broken(self._start)
            position = match.start() if match else len(text)
            name = head.fullmatch(text, self._start, min(position, limit))
            if name is None:
                return Broken(self._start)
            if match is None or match[0] not in ("{", '"'):
                body = self._body(position, name, "")
                return body if body.name in self._tools else Broken(position)
            self._head = name
            self._object = ObjectEnd(position, breaks(self._syntax.close))
        end = self._object.find(text)
        if end is None:
            return None if self._object.broken_at is None else Broken(self._object.broken_at)
        return self._body(end, self._head, text[self._object.start : end])

    def _body(self, end: int, head: re.Match[str], raw: str) -> ReadCall:
        arguments, status = object_arguments(raw)
        name: str = head["name"]
        if not self._syntax.name_is_id:
            return ReadCall(end, name, arguments, status, head["front"] or head["id"])
        # The name is the longest known tool name within the id, such as `add` in `functions.add:0`.
        names = [tool for tool in self._tools if re.search(rf"(?<!\w){re.escape(tool)}(?!\w)", name)]
        return ReadCall(end, max(names, key=len, default=name), arguments, status, name)


class _LiteralBody(BodyReader):
    """Reads `NAME name_close KEY key_close VALUE, ...)`."""

    _name = ""
    _id: str | None = None
    _brackets: LiteralEnd | None = None

    def read(self, text: str, *, over: bool) -> ReadCall | Broken | None:
        if self._brackets is None:
            head = read_head(self._syntax, text, self._start)
            if head is None:
                return None if not over and may_be_head(text, self._start) else Broken(self._start)
            self._name, bracket = head
            if ANY in self._syntax.name_close:
                # A word in place of the call's number may be its id.
                label = re.search(r"\w*[^\W\d]\w*", text[self._start + len(self._name) : bracket])
                self._id = label[0] if label else None
            if needs_known_tool(self._syntax) and self._name not in self._tools:
                return Broken(bracket)
            self._brackets = LiteralEnd(bracket, self._syntax)
        brackets = self._brackets
        brackets.find(text, over=over)
        if brackets.end is None:
            return None if brackets.broken_at is None else Broken(brackets.broken_at)
        raw = text[brackets.start + 1 : brackets.end - 1]
        try:
            arguments = arguments_json(self._syntax, self._tools.get(self._name), raw)
        except LiteralError:
            return ReadCall(brackets.end, self._name, raw, "bad_arguments", self._id)
        return ReadCall(brackets.end, self._name, arguments, "ok", self._id)


class _TaggedBody(BodyReader):
    """Reads `NAME name_close (key_open KEY key_close VALUE value_close)*`."""

    def __init__(self, syntax: CallSyntax, tools: Mapping[str, Tool], start: int) -> None:
        super().__init__(syntax, tools, start)
        self._tags = _tags(syntax)
        self._name = ""
        self._named = False
        """Whether the name is complete, because an argument has begun."""
        self._arguments: list[tuple[str, str]] = []
        self._position = start
        """Where the next argument or the end of the call is expected."""
        self._key: re.Match[str] | None = None
        """The match of the key before the value that is being read."""
        self._seek = start
        """Where to continue searching for the end of that value."""
        self._nested = 0, 0
        """The position up to which tags within that value are counted, and how many are open there."""

    def read(self, text: str, *, over: bool) -> ReadCall | Broken | None:
        tags = self._tags
        while True:
            if not self._named:
                head = tags.head.match(text, self._start)
                if head is None:
                    return Broken(self._start)
                self._name, self._position = head["name"], head.end()
            if self._key is None:
                position = skip_space(text, self._position)
                opening = tags.key_open.match(text, position)
                if opening is None:
                    if tags.end.match(text, position) or (over and position == len(text)):
                        return self._body()
                    unsure = may_grow(text, position, tags.expected) or self._name_may_end(text, position)
                    return None if unsure and not over else Broken(position)
                if not over and may_grow(text, position, [self._syntax.close]):
                    return None
                self._named = True
                key = tags.key.match(text, opening.end())
                if key is None:
                    return Broken(position) if over or len(text) > opening.end() + _LONGEST_HEAD else None
                if key["text"] is None and not over and may_grow(text, key.end("key"), [self._syntax.key_close]):
                    return None
                self._key = key
                self._seek = self._key.end()
            if not self._read_value(text, self._key, over=over):
                return None
            self._key = None

    def _name_may_end(self, text: str, position: int) -> bool:
        """Return whether the name may end before `position`. In `f:3><para` it is `f` if an argument follows."""
        inner = (n for n in range(self._start + 1, position) if not text[n].isspace())
        return not self._named and any(may_grow(text, n, self._tags.after_name) for n in inner)

    def _read_value(self, text: str, key: re.Match[str], *, over: bool) -> bool:
        """Add the argument's value if its end has arrived, and return whether it was added.

        A value ends at the first closing delimiter that the next argument or the end of the call follows.
        """
        tags = self._tags
        closing = tags.value_close(key["key"])
        while match := closing.search(text, self._seek):
            # Where nothing closes a value, white space before the next key is its own.
            position = skip_space(text, match.end()) if tags.closing else match.end()
            followed = tags.key_open.match(text, position) or tags.end.match(text, position)
            inside = self._within_nested(text, key, match.start())
            if not inside and (followed or (over and position == len(text))):
                raw = text[key.end() : match.start()]
                self._arguments.append((key["key"], self._value(key, raw)))
                self._position = match.end()
                return True
            if not inside and not over and may_grow(text, position, tags.expected):
                return False
            self._seek = match.start() + 1
        self._seek = max(self._seek, len(text) - _LONGEST_HEAD)
        return False

    def _within_nested(self, text: str, key: re.Match[str], end: int) -> bool:
        """Return whether tags within the value are still open at `end`."""
        nested = self._syntax.nested
        if nested is None or takes_only_text(Schema.of(self._tools.get(self._name), key["key"]).types):
            return False
        start, depth = self._nested if self._nested[0] >= key.end() else (key.end(), 0)
        self._nested = end, depth + nested.depth(text, start, end)
        return self._nested[1] > 0

    def _value(self, key: re.Match[str], raw: str) -> str:
        """Return the raw value as JSON text, without the white space that the template writes around values."""
        syntax = self._syntax
        before = len(syntax.key_close) - len(syntax.key_close.rstrip())
        after = len(syntax.value_close) - len(syntax.value_close.lstrip())
        for _ in range(before):
            raw = raw[1:] if raw[:1].isspace() else raw
        for _ in range(after):
            raw = raw[:-1] if raw[-1:].isspace() else raw
        raw = unescape(raw) if syntax.escapes else raw
        schema = Schema.of(self._tools.get(self._name), key["key"])
        types = schema.types
        if syntax.nested is not None and not takes_only_text(types):
            nested = syntax.nested.json(raw, schema)
            if nested is not None:
                return nested
        if syntax.json_key_close and syntax.json_key_close == syntax.key_close:
            return quoted_json(raw, types)
        is_text = key["text"] is not None if syntax.json_key_close else None
        opening, closing = syntax.text_open, syntax.text_close
        if opening and closing and raw.startswith(opening) and raw.endswith(closing, len(opening)):
            raw, is_text = raw[len(opening) : -len(closing)], True if types is None else None
        return value_json(raw, types, is_text=is_text)

    def _body(self) -> ReadCall | Broken:
        if not self._arguments and self._name not in self._tools:
            return Broken(self._position)
        # Some models write a call without arguments as one with an empty key and value.
        pairs = [
            f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in self._arguments if key or value != '""'
        ]
        return ReadCall(self._position, self._name, f"{{{', '.join(pairs)}}}", "ok")


@dataclass(frozen=True, slots=True)
class _Tags:
    """Regular expressions for a syntax with tagged arguments."""

    head: re.Pattern[str]
    key_open: re.Pattern[str]
    key: re.Pattern[str]
    end: re.Pattern[str]
    expected: tuple[str, ...]
    """Delimiters that may follow the name or an argument."""
    after_name: tuple[str, ...]
    """The delimiter after a name, concatenated with each delimiter that may come next."""
    closing: str

    def value_close(self, key: str) -> re.Pattern[str]:
        return re.compile(pattern(self.closing.replace(KEY, key)))


@lru_cache(64)
def _tags(syntax: CallSyntax) -> _Tags:
    key_open, close = pattern(syntax.key_open), pattern(syntax.close)
    first = pieces(syntax.key_open)[0]
    ends = [pattern(text) for text in (syntax.close, syntax.section_close, syntax.open) if pieces(text)]
    ends += [re.escape(piece) for piece in pieces(syntax.close)[:1] if not first.startswith(piece)]
    if not MARK.match(first):
        ends.append(MARK.pattern)
    json_key = rf"|{pattern(syntax.json_key_close)}" if syntax.json_key_close else ""
    # A key's opening delimiter may also begin the call's close: `<` and `</call>`.
    value_close, named, _ = syntax.value_close.partition(KEY)
    not_key = "".join(f"(?!{end})" for end in (close, pattern(value_close) if named else "") if end)
    expected = (syntax.key_open, syntax.close, syntax.section_close, syntax.open)
    return _Tags(
        head=re.compile(rf"(?P<name>{_name(syntax, [key_open, *ends])})\s*(?:{pattern(syntax.name_close)})?"),
        key_open=re.compile(not_key + key_open),
        key=re.compile(
            rf"\s*(?P<key>[^\n\ud800-\udfff]{{0,256}}?)\s*(?:(?P<text>{pattern(syntax.key_close)}){json_key})"
        ),
        end=re.compile("|".join(ends) or "(?!)"),
        expected=(syntax.name_close, *expected),
        after_name=tuple(f"{syntax.name_close}\n{text}" for text in expected if pieces(syntax.name_close)),
        closing=syntax.value_close,
    )


def _name(syntax: CallSyntax, following: Sequence[str]) -> str:
    """Return an expression for a name. `name_close` ends it if one of the expressions `following` is next."""
    if not pieces(syntax.name_close) or MARK.match(syntax.name_close.strip()):
        return f"{_NAME_CHARACTER}{{1,256}}"
    call_id = [r"[\w.:-]"] if syntax.id_close else []
    after = "|".join([*following, *call_id, MARK.pattern, "```", r"\Z"])
    return rf"(?:(?!{pattern(syntax.name_close)}\s*(?:{after})){_NAME_CHARACTER}){{1,256}}"


@lru_cache(64)
def _named(syntax: CallSyntax) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return an expression for a call's head, the text before its arguments, and one for what ends the head.

    The head ends at the arguments or the call's end. Arguments may be an object, a JSON string, null or missing.
    """
    after = [syntax.close, syntax.separator, syntax.section_close]
    ends = [piece for text in after for piece in pieces(text)]
    ends += [piece for text in (syntax.section_open, syntax.open) for piece in pieces(text)[:1]]
    marks = [piece for piece in ends if MARK.match(piece)]
    end = any_of(marks or [piece for piece in ends if not re.fullmatch(r"\w+", piece)])
    other_mark = rf"(?!{end})(?:{MARK.pattern})"
    named = rf"(?:{any_of([syntax.name_close, syntax.id_close])}|{other_mark}|```(?:json)?)"
    id_close = any_of([syntax.id_close]) if syntax.id_close.strip() or not syntax.id_close else ""
    call_id = rf"(?:(?P<id>\w[\w.:-]{{0,255}})\s*(?:{id_close}|{other_mark})\s*)?"
    # The head is matched against the text before the arguments only.
    name = _name(syntax, [])
    if ANY in syntax.name_close:
        # A call's number would match as part of the name or as an id.
        name, call_id = rf"{name}?(?!\w)", "(?P<id>(?!))?"
    front = (
        rf"(?:(?P<front>[\w.:-]{{1,256}})\s*{pattern(syntax.name_open)}\s*)?"
        if syntax.name_open
        else "(?P<front>(?!))?"
    )
    null = rf"(?:null\s*(?:{named}\s*){{0,8}})?"
    head = re.compile(rf"{front}(?P<name>{name})\s*(?:{named}\s*){{0,8}}?{call_id}(?:{named}\s*){{0,8}}{null}")
    return head, re.compile(rf"[{{\"]|{end}")
