"""Parse completions with a tokenizer's `response_template` (transformers 5), its authors' description of the format.

The parser is from transformers, which is imported only if a tokenizer has such a template; torch is not needed.
It reads text, so letters that spell a control token count as the token.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from tokentape.chat._external_renderer import call_of
from tokentape.chat._overrides import Completion, Overrides, parse_whole
from tokentape.chat._reply import Reply

if TYPE_CHECKING:
    from tokentape.chat._renderer import Renderer

_REASONING = ("thinking", "reasoning_content", "reasoning")

_log = logging.getLogger("tokentape.chat")


def shipped_parser(renderer: Renderer, template: Any) -> Overrides | None:
    """Return overrides with a parser for a `response_template`. If it can't be used, log a warning and return None."""
    try:
        # Import here, because few tokenizers have such a template.
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
        reasoning=str(next((message[key] for key in _REASONING if message.get(key)), "")),
        tool_calls=tuple(
            call_of(function.get("name"), function.get("arguments"), tool_names, span, call_id)
            for (function, call_id), span in zip(functions, spans, strict=True)
        ),
        reasoning_open=derived.reasoning_open,
    )
