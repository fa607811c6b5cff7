"""Replace the parser or the renderer that Tokentape derives from a chat template.

Pass `Overrides` to `Renderer.load`, or register a function under the entry point group `tokentape.renderers`. A
tokenizer's `response_template` also overrides the parser. The first of these is used: the argument, the entry points
in order of their names, the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias

from tokentape.chat._parse import ReplyParser
from tokentape.chat._reader import Reader
from tokentape.chat._reply import CallStatus, Reply, ReplyDelta, ToolCall
from tokentape.errors import TokentapeError
from tokentape.types import Setup

if TYPE_CHECKING:
    from tokentape.chat._external_renderer import RendererObject
    from tokentape.chat._renderer import Renderer

GROUP = "tokentape.renderers"
"""The entry point group. Each entry is a `FindOverrides`."""

_REASONING_FIELDS = ("thinking", "reasoning_content", "reasoning")
"""Where parsers of transformers return reasoning, the first of these that is not empty."""

_log = logging.getLogger("tokentape.chat")

MakeParser: TypeAlias = Callable[[Setup, Sequence[str]], ReplyParser]
"""Takes a completion's setup and stop strings, and returns the parser for that completion."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """A parser and a renderer that replace those derived from the template. None keeps the derived one."""

    name: str
    """A part of the fingerprint. Change it when the behavior changes, because certificates are cached under it."""
    parser: MakeParser | None = None
    renderer: RendererObject | None = None
    """Renders and bridges. It also parses if `parser` is None."""


FindOverrides: TypeAlias = "Callable[[Renderer], Overrides | None]"
"""Takes a renderer (see its `template.source`, `tokenizer`, `fingerprint`) and returns its overrides, or None."""


def find_overrides(renderer: Renderer) -> Overrides | None:
    """Return a renderer's overrides from the entry points or its tokenizer's `response_template`, or None.

    Raises `TokentapeError` if an entry point can't be imported or fails.
    """
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            overrides: Overrides | None = entry.load()(renderer)
        except Exception as error:
            raise TokentapeError(
                f"the entry point {entry.name!r} in group {GROUP!r} ({entry.value}) failed: {type(error).__name__}: "
                f"{error}. Uninstall or fix the package that registers it."
            ) from error
        if overrides is not None:
            return overrides
    template = renderer.tokenizer.config.get("response_template")
    return None if template is None else _shipped_parser(renderer, template)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion, the argument of functions passed to `parse_whole`."""

    ids: tuple[int, ...]
    """All sampled ids."""
    text: str
    """The text before the stop token or stop string. Control tokens are spelled out, so they look like text."""
    stopped: bool
    """Whether a stop token or stop string ended the completion. If not, it was truncated."""
    setup: Setup
    stop_strings: tuple[str, ...] = ()


def parse_whole(renderer: Renderer, parse: Callable[[Completion], Reply]) -> MakeParser:
    """Return a parser that calls `parse` once, when the completion ends. Until then, it returns no text.

    >>> Overrides("shouting", parser=parse_whole(renderer, parse))      # doctest: +SKIP
    """
    return lambda setup, stop_strings: _WholeParser(renderer, parse, setup, stop_strings)


class _WholeParser:
    def __init__(
        self, renderer: Renderer, parse: Callable[[Completion], Reply], setup: Setup, stop_strings: Sequence[str]
    ) -> None:
        self._parse = parse
        self._setup = setup
        self._stop_strings = stop_strings
        self._reader = Reader(renderer.tokenizer, renderer.stop_ids(setup), stop_strings)
        self._ids: list[int] = []

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        fed = list(ids)
        self._ids += fed
        self._reader.feed(fed)
        return ReplyDelta()

    def finish(self) -> tuple[ReplyDelta, Reply]:
        self._reader.finish()
        text = self._reader.tokenizer.spell_marks(self._reader.text)
        try:
            reply = self._parse(
                Completion(tuple(self._ids), text, self._reader.stopped, self._setup, tuple(self._stop_strings))
            )
        except Exception as error:
            # The error's text is left out because it may quote the completion.
            raise TokentapeError(f"the overriding parser failed with {type(error).__name__}") from error
        return ReplyDelta(reply.content, reply.reasoning, reply.calls_for_client), reply


def _shipped_parser(renderer: Renderer, template: Any) -> Overrides | None:
    """Return overrides with a parser for a `response_template` of transformers 5, which describes the format.

    The parser is from transformers, which is imported only if a tokenizer has such a template; torch is not needed. It
    reads text, so letters that spell a control token count as the token. If the template can't be used, log a warning
    and return None.
    """
    try:
        from transformers.utils.chat_parsing import ResponseParser

        ResponseParser(template, prefix="")
    except (ImportError, AttributeError, ValueError) as error:
        _log.warning(
            "can't use the tokenizer's response_template; completions are parsed by its chat template: %s: %s",
            type(error).__name__,
            error,
        )
        return None

    def parse(completion: Completion) -> Reply:
        derived_parser = renderer.derived_parser(completion.setup, completion.stop_strings)
        derived_parser.feed(completion.ids)
        _, derived = derived_parser.finish()
        question = {"role": "user", "content": "?"}
        prompt = renderer.tokenizer.spell_marks(renderer.render_text([question], completion.setup, generate=True))
        parsing = ResponseParser(template, prefix=prompt, tools=list(completion.setup.tools))
        try:
            parsing.feed(completion.text)
            return _reply(parsing.finalize()[0], completion, derived)
        except (ValueError, KeyError, TypeError, AttributeError):
            # transformers raises for text that it can't parse, such as half a call. That must not lose the turn.
            return derived

    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
    return Overrides(f"response_template {digest[:16]}", parser=parse_whole(renderer, parse))


def _reply(message: dict[str, Any], completion: Completion, derived: Reply) -> Reply:
    tool_names = {tool["function"]["name"] for tool in completion.setup.tools}
    calls = message.get("tool_calls") or []
    functions = [(call.get("function", call), call.get("id")) for call in calls]
    # transformers returns no spans. Use the derived parser's spans if both parsers found the same number of calls.
    spans = [call.span for call in derived.tool_calls]
    if len(spans) != len(functions):
        spans = [(0, len(completion.ids))] * len(functions)
    return Reply(
        content=str(message.get("content") or ""),
        reasoning=str(next((message[key] for key in _REASONING_FIELDS if message.get(key)), "")),
        tool_calls=tuple(
            call_of(function.get("name"), function.get("arguments"), tool_names, span, call_id)
            for (function, call_id), span in zip(functions, spans, strict=True)
        ),
        reasoning_open=derived.reasoning_open,
    )


def call_of(name: Any, arguments: Any, tool_names: set[str], span: tuple[int, int], call_id: Any = None) -> ToolCall:
    """Return a `ToolCall` for a call that an external parser found. `arguments` is an object or its JSON text.

    `tool_names` contains the names of the tools, and `span` is the range of completion tokens.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    status: CallStatus = "ok" if name in tool_names else "unknown_tool"
    try:
        if not isinstance(json.loads(text), Mapping):
            status = "bad_arguments"
    except ValueError:
        status = "bad_arguments"
    return ToolCall(str(name or ""), text, status, span, None if call_id is None else str(call_id))
