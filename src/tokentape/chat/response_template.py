"""A tokenizer's own `response_template` (transformers 5): how its makers say that completions are to be parsed.

The parser is that of transformers, imported when a tokenizer has such a template and never otherwise: it neither needs
torch nor is it needed for anything else here. It reads text, so letters that spell a control token count as one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokentape.chat.foreign_renderer import call_of
from tokentape.chat.overrides import Overrides, ReplyParser
from tokentape.chat.reader import Reader
from tokentape.chat.reply import Reply, ReplyDelta
from tokentape.types import Setup

if TYPE_CHECKING:
    from tokentape.chat.renderer import Renderer

_REASONING = ("thinking", "reasoning_content", "reasoning")

_log = logging.getLogger("tokentape.chat")


def shipped_parser(renderer: Renderer, template: Any) -> Overrides | None:
    """The override that a `response_template` amounts to; None, with a warning, if it can't be used here."""
    try:
        # By name: nothing on the gateway's path may import transformers, and this is not on it for other tokenizers.
        response_parser = import_module("transformers.utils.chat_parsing").ResponseParser
        response_parser(template, prefix="")
    except (ImportError, AttributeError, ValueError) as error:
        _log.warning(
            "the tokenizer's response_template is not used, completions are parsed by its chat template: %s: %s",
            type(error).__name__,
            error,
        )
        return None
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()

    def parser(setup: Setup, stop_strings: Sequence[str]) -> ReplyParser:
        question = {"role": "user", "content": "?"}
        prompt = renderer.tokenizer.spell_marks(renderer.marked([question], setup, generate=True))
        known = {tool["function"]["name"] for tool in setup.tools}
        reader = Reader(renderer.tokenizer, renderer.stop_ids(setup), stop_strings)
        parsing = response_parser(template, prefix=prompt, tools=list(setup.tools))
        return _Parser(reader, parsing, known, renderer.derived_parser(setup, stop_strings))

    return Overrides(f"response_template {digest[:16]}", parser=parser)


class _Parser:
    """Feeds a transformers `ResponseParser`; where that gives up, the parser read off the template takes over.

    Nothing is told before the completion ends: values are trimmed and joined when their region closes.
    """

    def __init__(self, reader: Reader, parsing: Any, known: set[str], derived: ReplyParser) -> None:
        self._reader = reader
        self._parsing = parsing
        self._known = known
        self._derived = derived
        self._ids: list[int] = []

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        fed = list(ids)
        self._ids += fed
        self._reader.feed(fed)
        return ReplyDelta()

    def finish(self) -> tuple[ReplyDelta, Reply]:
        self._derived.feed(self._ids)
        _, derived = self._derived.finish()
        self._reader.finish()
        text = self._reader.tokenizer.spell_marks(self._reader.text)
        try:
            self._parsing.feed(text)
            message, _ = self._parsing.finalize()
            reply = self._reply(message, derived)
        except (ValueError, KeyError, TypeError, AttributeError):
            # Half a call, say: transformers raises for what it can't read, and a turn may not be lost for that.
            reply = derived
        return ReplyDelta(reply.content, reply.reasoning, reply.calls_for_client), reply

    def _reply(self, message: dict[str, Any], derived: Reply) -> Reply:
        calls = message.get("tool_calls") or []
        functions = [(call.get("function", call), call.get("id")) for call in calls]
        # It does not say where a call stands; the other parser's spans are right where both found the same calls.
        spans = [call.span for call in derived.tool_calls]
        if len(spans) != len(functions):
            spans = [(0, len(self._ids))] * len(functions)
        return Reply(
            content=str(message.get("content") or ""),
            reasoning=str(next((message[key] for key in _REASONING if message.get(key)), "")),
            tool_calls=tuple(
                call_of(function.get("name"), function.get("arguments"), self._known, span, call_id)
                for (function, call_id), span in zip(functions, spans, strict=True)
            ),
            reasoning_open=derived.reasoning_open,
        )
