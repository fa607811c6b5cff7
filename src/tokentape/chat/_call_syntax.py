"""Find out how a chat template writes tool calls, by rendering calls made of sentinels.

All texts are marked text, in which control tokens are marks (see `chat/_tokenizer.py`).
"""

from __future__ import annotations

import contextlib
import json
import os.path
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal

from tokentape.chat._caller_text import SENTINELS
from tokentape.chat._delimiters import ANY
from tokentape.chat._nested_tags import NestedTags, find_nested
from tokentape.chat._tokenizer import MARK
from tokentape.errors import TemplateRefused
from tokentape.types import Message

CONTENT, REASONING, NAME, KEY, VALUE, OTHER_NAME, OTHER_KEY, OTHER_VALUE = (s * 2 for s in SENTINELS[:8])
_NUMBER = 7070707
_LIKE_TAGS = f"<{VALUE}&"
QUESTION: Message = {"role": "user", "content": SENTINELS[8] * 2}
EARLIER: tuple[Message, ...] = (
    {"role": "user", "content": SENTINELS[10] * 2},
    {"role": "assistant", "content": SENTINELS[11] * 2},
)
"""An exchange to put before the question if the template does not accept a question as the first message."""
ID = SENTINELS[9] * 2
"""Replaces call ids in renderings, so that delimiters with an id are the same for each call."""

PROBE_ID, OTHER_PROBE_ID = "call00000", "call00001"
"""Nine letters and digits, which even the strictest template accepts."""

Render = Callable[[Sequence[Message], bool], str]
"""Renders (messages, add_generation_prompt) to marked text."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The form in which a message with tool calls must be passed so that this template renders the calls."""

    arguments: str
    """`object` if the template accepts arguments as a JSON object, `text` if it accepts them as JSON text."""
    content: str
    """How to pass empty content of a message with calls: `text` as "", `none` as None, `missing` without the key."""
    name_is_id: bool = False
    """Whether the template writes a call's id in place of its name."""
    keeps_missing: bool = False
    """Whether the template also renders calls in a message without a content key. No key is then added."""

    def message(self, content: str | None, calls: Sequence[tuple[str, str, Any]]) -> dict[str, Any]:
        """Return an assistant message with calls in this shape. Each of `calls` is (id, name, arguments)."""
        tool_calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
        return self.reshape({"role": "assistant", "content": content, "tool_calls": tool_calls})

    def probe(self, name: str, arguments: Any, call_id: str = PROBE_ID) -> tuple[str, str, Any]:
        """Return a call for `message`. Its id is its name if the template writes ids in place of names."""
        return (name, name, arguments) if self.name_is_id else (call_id, name, arguments)

    def reshape(self, message: Message) -> dict[str, Any]:
        """Return a caller's message with tool calls in this shape; otherwise the template may drop the calls."""
        reshaped = dict(message)
        content = reshaped.get("content")
        if (content is None and self.keeps_missing) or (not content and self.content == "missing"):
            reshaped.pop("content", None)
        elif not content:
            reshaped["content"] = "" if self.content == "text" else None
        reshaped["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": self.shape(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return reshaped

    def shape(self, arguments: Any) -> Any:
        """Return the arguments in the form that this template accepts: unchanged, or as JSON text."""
        if self.arguments == "text" and not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False)
        return arguments


_SHAPES = tuple(
    CallShape(arguments, content, name_is_id)
    for name_is_id in (False, True)
    for arguments in ("object", "text")
    for content in ("text", "none", "missing")
)


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a template writes tool calls: `section_open (open CALL close) separator (open CALL close) section_close`.

    `json`: CALL is one JSON object with the name under `name_key` and the arguments under `arguments_key`; without
    `name_key` it is `{NAME: ARGUMENTS}`.
    `named`: CALL is NAME `name_close` ARGUMENTS, the arguments a JSON object.
    `tagged`: CALL is NAME `name_close` (`key_open` KEY `key_close` VALUE `value_close`)*; the sentinel KEY within
    `value_close` stands for the key.
    `literal`: CALL is NAME `name_close` KEY `key_close` VALUE `argument_separator` ... and the bracket that closes the
    one in `name_close`; VALUE is a literal as in a program, or text between quotes or two `quote`s.

    `ANY` in a delimiter stands for a word that varies.
    """

    style: Literal["json", "named", "tagged", "literal"]
    open: str
    close: str
    section_open: str = ""
    separator: str = ""
    section_close: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    around_arguments: tuple[str, str] | None = None
    """A call's text before its arguments, with the sentinel NAME, and its text after them (`json` only)."""
    name_close: str = ""
    name_open: str = ""
    """Set if the call's id comes before the name (`named` only): ID `name_open` NAME."""
    id_close: str = ""
    """Set if the call's id comes after the name (`named` only): NAME `name_close` ID `id_close` ARGUMENTS."""
    name_is_id: bool = False
    """Whether the template writes the call's id in place of the name; models then write an id with the name in it."""
    key_open: str = ""
    key_close: str = ""
    json_key_close: str = ""
    """The `key_close` before values that are JSON, not text, if it is different there. Equals `key_close` if all
    values are JSON, so that text is in quotes. Empty if the template does not distinguish JSON and text."""
    value_close: str = ""
    text_open: str = ""
    """The delimiter before text that looks like tags, such as XML's `<![CDATA[` (`tagged` only). It is written between
    `key_close` and the text; `text_close` is written between the text and `value_close`."""
    text_close: str = ""
    escapes: bool = False
    """Whether the template escapes `<` and `&` in values as in XML (`tagged` only)."""
    nested: NestedTags | None = None
    """Set if objects and lists are tags within tags (`tagged` only)."""
    quote: str = ""
    """The mark before and after a value that is text (`literal` only)."""
    argument_separator: str = ""
    """The text between two arguments (`literal` only)."""
    space_before: int = 0
    """The number of white-space characters that the template writes between content and the first call."""
    between: str = ""
    """The text between a call's last value and the next call's name; empty if a turn can have only one call."""
    within_lines: bool = False
    """Whether a call without delimiters may directly follow content, not only begin a line."""


def find_shape(render: Render) -> CallShape | None:
    """Return the first shape in which a call's name, key and value are all rendered; None if no shape renders them."""

    def writes(shape: CallShape, *later: Message) -> bool:
        try:
            calling = shape.message("", [shape.probe(NAME, {KEY: VALUE})])
            text = render([QUESTION, calling, *later], bool(later))
        except TemplateRefused:
            return False
        return NAME in text and KEY in text and VALUE in text

    shape = next(filter(writes, _SHAPES), None)
    if shape is None:
        return None
    missing = replace(shape, content="missing")
    result = {"role": "tool", "name": NAME, "tool_call_id": PROBE_ID, "content": CONTENT}
    return replace(shape, keeps_missing=writes(missing) and writes(missing, result) == writes(shape, result))


def read_calls(render: Render, prompt: str, shape: CallShape) -> CallSyntax | None:
    """Find the syntax of calls from renderings with one call, with two arguments and with two calls.

    `prompt` is the rendering of the question with the generation prompt. Return None if the syntax fits no known style.
    """
    first = shape.probe(NAME, {KEY: VALUE})
    second = shape.probe(OTHER_NAME, {OTHER_KEY: OTHER_VALUE}, OTHER_PROBE_ID)

    def region(*calls: tuple[str, str, Any]) -> str:
        text = render([QUESTION, shape.message("", calls)], False)
        start = common_prefix(text, prompt)
        if start < len(prompt):
            # The prompt ends with another tag than the one that opens calls. Both may begin alike: `<t`, `[` or `<|`.
            start = len(re.sub(r"[^\w\s>\])}\ud800-\udfff]+\w*\Z", "", text[:start]))
        return text[start:].replace(PROBE_ID, ID).replace(OTHER_PROBE_ID, ID)

    syntax = _read_single_call(region(first))
    if syntax is not None and syntax.style == "tagged":
        syntax = _split_arguments(syntax, region(shape.probe(NAME, {KEY: VALUE, OTHER_KEY: OTHER_VALUE})))
        if syntax is not None:
            syntax = _with_json_values(syntax, region(shape.probe(NAME, {KEY: _NUMBER})))
            if syntax.key_open.strip():
                syntax = _with_quoted_text(syntax, region(shape.probe(NAME, {KEY: _LIKE_TAGS})))
                syntax = _with_nested(syntax, lambda value: region(shape.probe(NAME, {KEY: value})))
            else:
                syntax = _as_literal(syntax)
    if syntax is None:
        return None
    syntax = replace(syntax, name_is_id=shape.name_is_id)
    with contextlib.suppress(TemplateRefused):
        two = region(first, second)
        if all(sentinel in two for sentinel in (NAME, VALUE, OTHER_NAME, OTHER_VALUE)):
            syntax = _split_section(syntax, two)
            syntax = _with_ordinal(syntax, two)
            syntax = replace(syntax, between=two[two.index(VALUE) + len(VALUE) : two.index(OTHER_NAME)])
    with contextlib.suppress(TemplateRefused):
        text = render([QUESTION, shape.message(CONTENT, [first])], False)
        after = text[text.rindex(CONTENT) + len(CONTENT) :] if CONTENT in text else ""
        space = len(after) - len(after.lstrip())
        syntax = replace(syntax, space_before=space, within_lines=after.startswith("{"))
    call_open, separator, name_open = syntax.open.partition(ID)
    return replace(syntax, open=call_open, name_open=name_open) if separator and syntax.style == "named" else syntax


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix, which never ends inside a mark."""
    n = len(os.path.commonprefix([a, b]))
    return n - 1 if n and "\ud800" <= a[n - 1] <= "\udb7f" else n


def common_suffix(a: str, b: str) -> int:
    """Return the length of the common suffix, which never begins inside a mark."""
    n = len(os.path.commonprefix([a[::-1], b[::-1]]))
    return n - 1 if n and "\udc00" <= a[len(a) - n] <= "\udfff" else n


def _read_single_call(region: str) -> CallSyntax | None:
    """Return the syntax of the only call in `region`, with all text before and after the call as `open` and `close`."""
    name, key, value = region.index(NAME), region.index(KEY), region.index(VALUE)
    if NAME in region[name + len(NAME) : key]:
        return None  # The name is also in a header before the call: none of the styles has two names.
    arguments = _json_around(region, key, {KEY: VALUE})
    in_string = arguments is None
    arguments = arguments or _string_around(region, key, {KEY: VALUE})
    if arguments is None:
        if not name < key < value:
            return None
        return CallSyntax(
            "tagged",
            open=region[:name],
            name_close=region[name + len(NAME) : key],
            key_close=region[key + len(KEY) : value],
            close=region[value + len(VALUE) :],
        )
    start, end = arguments
    whole = _enclosing_object(region, start, end)
    if whole is not None and whole[0] < name < whole[1]:
        keys = {json.dumps(v): k for k, v in json.loads(region[whole[0] : whole[1]]).items()}
        name_key, arguments_key = keys.get(json.dumps(NAME)), keys.get(json.dumps(json.loads(region[start:end])))
        if arguments_key == NAME and len(keys) == 1:
            name_key = arguments_key = ""
        if name_key is None or arguments_key is None:
            return None
        return CallSyntax(
            "json",
            open=region[: whole[0]],
            close=region[whole[1] :],
            name_key=name_key,
            arguments_key=arguments_key,
            around_arguments=(region[whole[0] : start], region[end : whole[1]])
            if name < start and not in_string
            else None,
        )
    if name > start:
        return None
    name_close, _, id_close = region[name + len(NAME) : start].partition(ID)
    return CallSyntax("named", open=region[:name], name_close=name_close, id_close=id_close, close=region[end:])


def _split_arguments(syntax: CallSyntax, region: str) -> CallSyntax | None:
    """Separate the delimiters of each argument from those of the call. `region` has a call with two arguments."""
    name, key, value = region.index(NAME), region.index(KEY), region.index(VALUE)
    other_value = region.find(OTHER_VALUE)
    other_key = region.rfind(OTHER_KEY, 0, max(other_value, 0))
    if not name < key < value < other_key < other_value:
        return None
    before, between = region[name + len(NAME) : key], region[value + len(VALUE) : other_key]
    # If the key closes its value (`<key>value</key>`), KEY is its placeholder.
    after = region[other_value + len(OTHER_VALUE) :].replace(OTHER_KEY, KEY)
    opening = common_suffix(before, between)
    closing = common_prefix(between[: len(between) - opening], after)
    key_open, close = between[len(between) - opening :], after[closing:]
    if key_open.strip() and between[closing : len(between) - opening].strip():
        return None  # Only the reader of `literal` calls expects text between arguments.
    shared = _shared_tag(key_open, close, syntax)
    return replace(
        syntax,
        name_close=before[: len(before) - opening] + shared,
        key_open=key_open[len(shared) :],
        value_close=between[:closing] + shared,
        argument_separator=between[closing : len(between) - opening],
        close=close[len(shared) :],
    )


def _with_json_values(syntax: CallSyntax, region: str) -> CallSyntax:
    """Set `json_key_close` if the template writes different delimiters for values that are not text."""
    key, value = region.find(KEY), region.find(str(_NUMBER))
    if key < 0 or value < key:
        return syntax
    key_close = region[key + len(KEY) : value]
    if key_close == syntax.key_close:
        return syntax
    if syntax.key_open.strip() and f'{key_close}"' == syntax.key_close and syntax.value_close.startswith('"'):
        # The quotes belong to the value: the template writes text as JSON, too.
        return replace(syntax, key_close=key_close, json_key_close=key_close, value_close=syntax.value_close[1:])
    return replace(syntax, json_key_close=_either(key_close, syntax.key_close))


def _with_quoted_text(syntax: CallSyntax, region: str) -> CallSyntax:
    """Set `escapes`, or `text_open` and `text_close`, if the template changes or delimits text that looks like tags."""
    start, value_start = region.find(KEY), region.find(_LIKE_TAGS)
    if escape(_LIKE_TAGS) in region:
        return replace(syntax, escapes=True)
    if start < 0 or value_start < start:
        return syntax
    before, after = region[start + len(KEY) : value_start], region[value_start + len(_LIKE_TAGS) :]
    end = after.find(syntax.value_close)
    if end < 0 or not before.startswith(syntax.key_close):
        return syntax
    return replace(syntax, text_open=before[len(syntax.key_close) :], text_close=after[:end])


def _with_nested(syntax: CallSyntax, region: Callable[[Any], str]) -> CallSyntax:
    """Set `nested` if the template writes objects and lists as tags. `region` renders a call with a value."""

    def written(value: Any) -> str:
        inside = region(value).partition(f"{KEY}{syntax.key_close}")[2]
        after = f"{syntax.value_close}{syntax.close}"
        return inside.removesuffix(after) if inside.endswith(after) else ""

    with contextlib.suppress(TemplateRefused):
        return replace(syntax, nested=find_nested(written))
    return syntax


def _as_literal(syntax: CallSyntax) -> CallSyntax | None:
    """Convert a `tagged` syntax without `key_open` to `literal`; return None if no brackets enclose its arguments."""
    bracket = _BRACKETS.get(syntax.name_close.rstrip()[-1:])
    if bracket is None or not syntax.close.startswith(bracket):
        return None
    quote = syntax.value_close if syntax.key_close.endswith(syntax.value_close) else ""
    return replace(
        syntax,
        style="literal",
        quote=quote,
        key_close=syntax.key_close[: len(syntax.key_close) - len(quote)],
        close=syntax.close[1:],
    )


_BRACKETS = {"(": ")", "{": "}", "[": "]"}


def _either(first: str, second: str) -> str:
    """Return a delimiter that matches both, with `ANY` for the word that differs; `first` if more differs."""
    start, end = common_prefix(first, second), common_suffix(first, second)
    words = [text[start : len(text) - end] for text in (first, second)]
    if not all(re.fullmatch(r"\w+", word) for word in words):
        return first
    return first[:start] + ANY + first[len(first) - end :]


def _with_ordinal(syntax: CallSyntax, region: str) -> CallSyntax:
    """Replace the call's number in `name_close`, if it contains one, by `ANY`. `region` has two calls."""
    close = syntax.name_close
    first, second = (region[region.index(name) + len(name) :][: len(close)] for name in (NAME, OTHER_NAME))
    return syntax if first == second or first != close else replace(syntax, name_close=_either(close, second))


def _split_section(syntax: CallSyntax, region: str) -> CallSyntax:
    """Separate the delimiters of each call from those of the section of calls. `region` has two calls."""
    first = _call_bounds(region, NAME, KEY, VALUE, syntax)
    second = _call_bounds(region, OTHER_NAME, OTHER_KEY, OTHER_VALUE, syntax)
    if first is None or second is None:
        return syntax
    before, between, after = region[: first[0]], region[first[1] : second[0]], region[second[1] :]
    opening = common_suffix(before, between)
    closing = common_prefix(between[: len(between) - opening], after)
    separator = between[closing : len(between) - opening]
    call_open, section_close = between[len(between) - opening :], after[closing:]
    shared = "" if separator else _shared_tag(call_open, section_close, syntax)
    return replace(
        syntax,
        section_open=before[: len(before) - opening] + shared,
        open=call_open[len(shared) :],
        close=between[:closing] + shared,
        separator=separator,
        section_close=section_close[len(shared) :],
    )


def _shared_tag(first: str, second: str, syntax: CallSyntax) -> str:
    """Return the end of an earlier tag with which both delimiters begin, such as `>` in `><b>` and `></a>`.

    A control token ends tags if keys end with it.
    """
    mark = MARK.fullmatch(syntax.key_close[-2:])
    shared, end, _ = first[: common_prefix(first, second)].partition(mark[0] if mark is not None else ">")
    return shared + end if end and "<" not in shared and not MARK.search(shared) else ""


def _call_bounds(region: str, name: str, key: str, value: str, syntax: CallSyntax) -> tuple[int, int] | None:
    """Return the bounds of the call in `region` that contains the three sentinels; None if they can't be found."""
    start = region.index(name)
    if syntax.style in ("tagged", "literal"):
        after = region.index(value) + len(value) + len(syntax.value_close)
        return start, after + (syntax.style == "literal")
    arguments = _json_around(region, region.index(key), {key: value})
    if arguments is None:
        return None
    return (start, arguments[1]) if syntax.style == "named" else _enclosing_object(region, *arguments)


def _json_around(region: str, inside: int, expected: Any) -> tuple[int, int] | None:
    """Return the bounds of the JSON object around position `inside`; None if it does not equal `expected`."""
    start = region.rfind("{", 0, inside)
    if start < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(region, start)
    except ValueError:
        return None
    return (start, end) if value == expected else None


def _string_around(region: str, inside: int, expected: Any) -> tuple[int, int] | None:
    """Return the bounds of the JSON string around position `inside` with the JSON text of `expected`; None if none."""
    start = region.rfind('"{', 0, inside)
    try:
        value, end = json.JSONDecoder().raw_decode(region, max(start, 0))
        return (start, end) if json.loads(value) == expected else None
    except (ValueError, TypeError):
        return None


def _enclosing_object(region: str, start: int, end: int) -> tuple[int, int] | None:
    """Return the bounds of the smallest JSON object that encloses region[start:end]; None if no object does."""
    opening = region.rfind("{", 0, start)
    while opening >= 0:
        with contextlib.suppress(ValueError):
            _, stop = json.JSONDecoder().raw_decode(region, opening)
            if stop >= end:
                return opening, stop
        opening = region.rfind("{", 0, opening)
    return None
