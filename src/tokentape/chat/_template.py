"""Render a model's chat template in a sandbox, as `transformers.apply_chat_template` renders it.

This follows transformers 5.23: message keys with the value None are dropped, reasoning is passed under each name that
templates read, and `tojson` keeps unicode and key order. There are two differences: the date is an argument, and
reasoning is also passed as `reasoning` because templates that read only that key would lose it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from tokentape.chat._compared_strings import Compared, Noting, compared, is_text, with_made
from tokentape.chat._limits import Escapes, TimeOver, limited, usage
from tokentape.chat._media import IMAGE, image_parts
from tokentape.chat._sandbox import Sandbox
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable
from tokentape.types import Message, Tool

_ASKED, _JANUARY = "asked-word", datetime(2026, 1, 1)
_FAILURES = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
)
"""Errors that expressions in a template can raise: for example, `cycler()` raises RuntimeError."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The keys that templates and callers use for an assistant message's reasoning."""


class ChatTemplate:
    """A compiled template and its `tool_use` variant, if the model has one. Create it with `ChatTemplate.load`."""

    def __init__(self, source: str, tool_use_source: str | None = None) -> None:
        self.source, self.tool_use_source = source, tool_use_source
        self.whole_source = f"{source}\0{tool_use_source or ''}"
        """The source, followed by the source of the `tool_use` variant."""
        self.sha256 = hashlib.sha256(self.whole_source.encode()).hexdigest()
        self._default = _compile(source)
        self._tool_use = _compile(tool_use_source) if tool_use_source is not None else self._default
        self.takes_parts_only = _takes_parts_only(self._default)
        """Whether the template renders text only in a list of parts, like those of some vision models."""

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, str | None]]:
        """Pickle the sources, because compiled templates can't be pickled."""
        return ChatTemplate, (self.source, self.tool_use_source)

    @classmethod
    def load(cls, folder: str | Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
        """Load the template from `chat_template.jinja`, else from the tokenizer's configuration, as transformers does.

        Raises `TokenizerUnusable` if neither has a template or if it is not valid Jinja in UTF-8.
        """
        folder = Path(folder)
        path = folder / "chat_template.jinja"
        if path.is_file():
            tool_use = folder / "additional_chat_templates" / "tool_use.jinja"
            return cls(read_source(path), read_source(tool_use) if tool_use.is_file() else None)
        value = tokenizer_config.get("chat_template")
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, list):
            named = listed_templates(value)
            if "default" in named:
                return cls(named["default"], named.get("tool_use"))
        raise TokenizerUnusable(
            f"no chat template in {folder}: neither chat_template.jinja nor `chat_template` in tokenizer_config.json. "
            "Base models have no template; pass one with `--chat-template FILE`."
        )

    @cached_property
    def compared(self) -> Compared:
        """What the template compares with messages: its constants, and the strings that it makes."""
        made = [text for source in (self.source, self.tool_use_source) if source for text in _made_strings(source)]
        return with_made(self.constants, made)

    @cached_property
    def constants(self) -> Compared:
        """The constants that the template compares with messages."""
        return compared(parse_template(self.whole_source.replace("\0", "\n")))

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads, its own variables included."""
        tree = parse_template(self.whole_source.replace("\0", "\n"))
        return frozenset(node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "load")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        add_generation_prompt: bool,
        date: str,
        variables: Mapping[str, Any],
        escapes: Escapes | None = None,
    ) -> str:
        """Return the rendered text. `variables` are special tokens and template kwargs; `date` is in ISO 8601.

        `escapes` says how texts in the messages were escaped.

        Raises `TemplateRefused` with the template's own reason.
        """
        context = {
            "documents": None,
            **variables,
            "messages": [_with_parts(message) for message in messages] if self.takes_parts_only else messages,
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": datetime.fromisoformat(date).strftime,
        }
        with limited(context, escapes):
            return _render(self._tool_use if tools else self._default, context)


def check_objects(values: Sequence[Any], param: str, *, key: str = "") -> None:
    """Raise `InvalidRequest` unless `values` is a list of dictionaries that have the `key`, if one is given."""
    listed = isinstance(values, Sequence)
    wrong = [value for value in values if not isinstance(value, Mapping)] if listed else [values]
    if wrong:
        raise InvalidRequest(f"{param}: found {type(wrong[0]).__name__}, expected a list of dictionaries", param)
    without = next((value for value in values if key not in value), None) if key else None
    if without is not None:
        raise InvalidRequest(f"{param}: found an entry with the keys {[*without]}, expected a `{key}`", param)


def check_variables(kwargs: Mapping[str, Any], date: str) -> None:
    """Raise `InvalidRequest` for template kwargs that `ChatTemplate.render` would replace, and for an invalid date."""
    if not isinstance(kwargs, Mapping) or {"messages", "tools", "strftime_now"} & kwargs.keys():
        raise InvalidRequest(
            f"template_kwargs is {kwargs!r}: expected a dictionary without messages, tools and strftime_now; pass "
            "messages, tools and date as arguments",
            "template_kwargs",
        )
    if kwargs.get("add_generation_prompt", True) is not True:
        raise InvalidRequest("add_generation_prompt can only be True: a prompt ends with it", "template_kwargs")
    try:
        datetime.fromisoformat(date)
    except (TypeError, ValueError):
        raise InvalidRequest(f"date is {date!r}: expected text such as '2026-01-31'", "date") from None


@lru_cache(maxsize=32)
def _takes_parts_only(template: jinja2.Template) -> bool:
    """Return whether the template renders a word in a list of parts but not as a string.

    Raises `TokenizerUnusable` if either rendering takes too long.
    """

    def shows(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            return _ASKED in _render(template, {**variables, "messages": messages})
        except TemplateRefused as refused:
            if isinstance(refused.__cause__, TimeOver):
                raise TokenizerUnusable(
                    f"the chat template can't render one word: {refused.__cause__.message}"
                ) from refused
            return False

    strftime = _JANUARY.strftime
    variables = {"bos_token": "", "eos_token": "", "add_generation_prompt": True, "strftime_now": strftime}
    with limited():
        return not shows(_ASKED) and shows([{"type": "text", "text": _ASKED}])


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render within the current limits. Raises `TemplateRefused`."""
    try:
        # Don't use `Template.render`: it rewrites tracebacks, which takes several times the memory of the rendering.
        return template.environment.concat(template.root_render_func(template.new_context(variables)))
    except jinja2.TemplateError as error:
        raise TemplateRefused(f"the chat template refused this conversation: {error.message}") from error
    except _FAILURES as error:
        # Only a TypeError's text is certain to name types and not to contain callers' text.
        detail = f"TypeError: {error}" if isinstance(error, TypeError) else type(error).__name__
        raise TemplateRefused(f"the chat template failed on this conversation: {detail}") from error


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def plain_message(message: Message) -> dict[str, Any]:
    """Return the message as templates expect it: no None values, text parts joined, reasoning under each of its keys.

    Content with images stays a list of parts; image parts keep only their type.

    Raises `InvalidRequest` if the content is neither text nor a list of text and image parts.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if image_parts([plain]):
        plain["content"] = _parts(plain["content"])
    elif content is not None and not isinstance(content, str):
        plain["content"] = join_parts(content)
    reasoning = next((plain[key] for key in REASONING_FIELDS if key in plain), None)
    if reasoning is not None:
        plain = {**dict.fromkeys(REASONING_FIELDS, reasoning), **plain, "reasoning_content": reasoning}
    return plain


def with_argument_objects(message: Message) -> Message:
    """Return the message with its calls' arguments parsed from JSON text to objects: templates would quote the text."""
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = call.get("function") or {}
        if isinstance(function.get("arguments"), str):
            try:
                parsed = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                continue
            if isinstance(parsed, dict):
                call["function"] = {**function, "arguments": parsed}
    return {**message, "tool_calls": calls} if calls else message


def _parts(content: Sequence[Any]) -> list[dict[str, str]]:
    """Return the content as a list of parts, with adjacent text parts joined and image parts reduced to their type."""
    parts: list[dict[str, str]] = []
    for is_image, run in groupby(content, lambda part: bool(image_parts([{"content": [part]}]))):
        if is_image:
            parts += [{"type": IMAGE} for _ in run]
        elif text := join_parts(list(run)):
            parts.append({"type": "text", "text": text})
    return parts


def join_parts(content: Any) -> str:
    """Return the text of a list of content parts. Raises `InvalidRequest` if a part is not text."""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"content is a {type(content).__name__}, expected text or a list of parts", "messages")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(
                f"content part of type {kind!r} is not supported: this engine accepts only text", "messages"
            )
    return "".join(texts)


class _GenerationBlocks(jinja2.ext.Extension):
    """Reads `{% generation %}` tags, which mark assistant text for loss masks; Tokentape's come from provenance.

    As in transformers, what is set inside is not set after the block.
    """

    tags = {"generation"}  # noqa: RUF012 - the attribute is jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """Replaces `dict` for templates: creates a dict without giving access to the class.

    The time is checked for each key because a template can choose numbers with equal hashes; each key is then compared
    with all others.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*map(usage().counted, args), **kwargs)

    def fromkeys(self, keys: Any, *value: Any) -> dict[Any, Any]:
        # `counted` would yield the items of a mapping.
        return dict.fromkeys(usage().counted(list(keys) if isinstance(keys, Mapping) else keys), *value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def read_source(path: Path) -> str:
    """Return the text of a template file. Raises `TokenizerUnusable` if it can't be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        shown = f"{str(path)[:80]!r}"
        raise TokenizerUnusable(
            f"can't read the chat template {shown} ({error.strerror}): pass the path of a file, not the template's text"
        ) from None
    except UnicodeDecodeError:
        raise TokenizerUnusable(f"{path} is not a chat template: expected UTF-8 text") from None


def listed_templates(listed: Sequence[Any]) -> dict[str, str]:
    """Return the templates of a list in tokenizer_config.json, by name. Raises `TokenizerUnusable`."""
    try:
        return {entry["name"]: entry["template"] for entry in listed}
    except (KeyError, TypeError):
        raise TokenizerUnusable(
            "an entry of `chat_template` in tokenizer_config.json has another form; expected objects with `name` and "
            "`template`"
        ) from None


def parse_template(source: str) -> jinja2.nodes.Template:
    """Return the syntax tree of a template."""
    return _environment().parse(source)


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _Dict()
    return environment


@lru_cache(maxsize=32)
def _made_strings(source: str) -> list[str]:
    """Return the strings that the template compares in a conversation and that do not come from the conversation.

    Unlike constants, they can't be read from the source: the template makes them with a filter, a macro or a set block.
    """
    noted: dict[str, None] = {}

    def note(value: Any) -> Any:
        values = value if isinstance(value, list | tuple | dict) else [value]
        # Filtered at once: the template's own limits don't count what is kept here.
        noted.update(dict.fromkeys(each for each in values if isinstance(each, str) and is_text(each)))
        return value

    environment = _environment()
    environment.filters["noted"] = note
    call = {"id": "asked0000", "type": "function", "function": {"name": _ASKED, "arguments": {_ASKED: _ASKED}}}
    system, user, answer = ({"role": role, "content": _ASKED} for role in ("system", "user", "assistant"))
    thought = dict.fromkeys(REASONING_FIELDS, _ASKED)
    calling = {"role": "assistant", "content": "", "tool_calls": [call], **thought}
    result = {"role": "tool", "name": _ASKED, "tool_call_id": call["id"], "content": _ASKED}
    said = [user, calling, result, {**answer, **thought}, user]
    parameters = {"type": "object", "properties": {_ASKED: {"type": "string", "description": _ASKED}}}
    tools = [{"type": "function", "function": {"name": _ASKED, "description": _ASKED, "parameters": parameters}}]
    with contextlib.suppress(jinja2.TemplateError, *_FAILURES):  # `_compile` reports what is wrong with a template.
        with limited():
            template = environment.compiled(source, Noting())
        for messages in ([system, *said], said, [user, answer, user], [user, calling, result], [user]):
            variables = {"messages": messages, "add_generation_prompt": True, "strftime_now": _JANUARY.strftime}
            with contextlib.suppress(TemplateRefused), limited():
                _render(template, variables | {"tools": tools if calling in messages else None})
    known = json.dumps([system, *said, *tools])
    return [value for value in noted if value not in known and _ASKED not in value]


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    """Compile a template. The result is cached and shared because renderings do not change it.

    Raises `TokenizerUnusable` if the source is not valid.
    """
    try:
        with limited():
            return _environment().compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerUnusable(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise TokenizerUnusable(
            f"the chat template is too large or too deeply nested to compile: {type(error).__name__}"
        ) from error
