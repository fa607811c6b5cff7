"""A renderer object of the `renderers` library, or of that shape, in place of what is read off a template.

Its word is taken for how messages become ids, but not for the one promise that training depends on: that a bridge
leaves what came before as it was. That is checked on every bridge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tokentape.chat.reply import CallStatus, Reply, ToolCall
from tokentape.chat.template import plain_message
from tokentape.errors import InvariantViolation, TemplateRefused
from tokentape.types import Message, Setup, TokenIds


class ForeignRenderer(Protocol):
    """What is used of a renderer object, as in `renderers` 0.1.12. Nothing of that library is imported."""

    def render_ids(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> Sequence[int]:
        """Ids of a conversation."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
    ) -> Any:
        """Ids of prompt, completion and new messages, as a sequence or an object with `token_ids`; None: no bridge."""
        ...

    def parse_response(self, token_ids: list[int]) -> Any:
        """An object with `content`, `reasoning_content` and `tool_calls`."""
        ...


def foreign_render(renderer: ForeignRenderer, messages: Sequence[Message], setup: Setup) -> TokenIds:
    """Ids of a conversation, int32 [tokens], ending with the generation prompt."""
    ids = renderer.render_ids(_plain(messages), tools=_tools(setup), add_generation_prompt=True)
    return np.asarray(ids, dtype=np.int32)


def foreign_bridge(
    renderer: ForeignRenderer,
    context_ids: TokenIds,
    completion_ids: TokenIds,
    new_messages: Sequence[Message],
    setup: Setup,
) -> TokenIds:
    """Ids to append behind `context_ids`, int32 [tokens]; that context ends with the sampled `completion_ids`.

    Raises `TemplateRefused` if there is no bridge for these messages, and `InvariantViolation` if the one given would
    change the context.
    """
    prompt_ids = context_ids[: len(context_ids) - len(completion_ids)]
    found = renderer.bridge_to_next_turn(
        prompt_ids.tolist(), completion_ids.tolist(), _plain(new_messages), tools=_tools(setup)
    )
    if found is None:
        roles = ", ".join(message["role"] for message in new_messages)
        raise TemplateRefused(
            f"the overriding renderer {type(renderer).__name__} has no bridge for messages of {roles}"
        )
    ids = np.asarray(getattr(found, "token_ids", found), dtype=np.int32)
    kept = ids[: len(context_ids)]
    if not np.array_equal(kept, context_ids):
        same = kept == context_ids[: len(kept)]
        at = len(kept) if same.all() else int(np.argmin(same))
        raise InvariantViolation(
            f"the overriding renderer {type(renderer).__name__} does not keep the context: it returned {len(ids)} ids "
            f"for a context of {len(context_ids)}, and they differ from position {at} on "
            f"({'in the prompt' if at < len(prompt_ids) else 'in the completion'}). Expected is all of the context, "
            "then what is new."
        )
    return ids[len(context_ids) :]


def foreign_parse(renderer: ForeignRenderer, completion_ids: Sequence[int], setup: Setup) -> Reply:
    """The reply that it reads in a completion."""
    parsed = renderer.parse_response(list(completion_ids))
    known = {tool["function"]["name"] for tool in setup.tools}
    calls = [_call(call, known, len(completion_ids)) for call in parsed.tool_calls or ()]
    return Reply(
        content=parsed.content or "",
        reasoning=parsed.reasoning_content or "",
        tool_calls=tuple(calls),
        reasoning_open=getattr(parsed, "reasoning_complete", True) is False,
    )


def call_of(name: Any, arguments: Any, known: set[str], span: tuple[int, int], call_id: Any = None) -> ToolCall:
    """A call as some other parser found it, its arguments an object or the JSON text of one."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    status: CallStatus = "ok" if name in known else "unknown_tool"
    try:
        if not isinstance(json.loads(text), Mapping):
            status = "bad_arguments"
    except ValueError:
        status = "bad_arguments"
    return ToolCall(str(name or ""), text, status, span, None if call_id is None else str(call_id))


def _call(call: Any, known: set[str], length: int) -> ToolCall:
    status = str(getattr(call.status, "value", call.status)).lower()
    span = (0, length) if call.token_span is None else (int(call.token_span[0]), int(call.token_span[1]))
    if "unclosed" in status:
        return ToolCall(str(call.name or ""), str(call.raw), "unclosed", span)
    if call.name is None or status not in ("ok", "unknown_tool"):
        return ToolCall(str(call.name or ""), str(call.raw), "bad_arguments", span)
    return call_of(call.name, call.arguments, known, span, call.id)


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [plain_message(message) for message in messages]


def _tools(setup: Setup) -> list[Any] | None:
    return list(setup.tools) or None
