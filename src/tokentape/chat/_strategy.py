"""Choose the bridge strategy for a turn and the messages after it (see `Continuation.strategy`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Certificate, Strategy
from tokentape.chat._media import IMAGE
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import plain_message, with_argument_objects
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup


def choose(
    renderer: Renderer,
    certificate: Certificate,
    reply: Message,
    new_messages: Sequence[Message],
    setup: Setup,
    history: Sequence[Message],
    name: str | None = None,
) -> Strategy:
    """Return the bridge strategy for `new_messages` after `history` and `reply`.

    `name` is the continuation's name; if it is None, it is found from the messages and the history.

    If the certificate lacks the continuation, or if the new messages do not answer each call in `reply` or have fields
    that certificates do not cover, the strategy is determined from a few full renderings of this conversation.
    Raises `TemplateRefused` with the certificate's reason if the template does not accept the continuation.
    """
    if name is None:
        system = any(message["role"] in ("system", "developer") for message in history)
        name = grammar.continuation_name(new_messages, tools=bool(setup.tools), system=system)
    continuation = certificate.continuation(name)
    if renderer.is_external:
        if continuation is None:
            return "fork"
    elif not grammar.answers(reply, new_messages) or any(
        set(message) - (_RESULT_FIELDS if message["role"] == "tool" else _FIELDS) for message in new_messages
    ):
        continuation = None
    if continuation is not None and continuation.strategy == "refused":
        raise TemplateRefused(f"continuation {name!r} is not certified for this chat template: {continuation.reason}")
    strategy = (
        _try_out(renderer, reply, new_messages, setup, history) if continuation is None else continuation.strategy
    )
    if strategy == "local" and renderer.images is not None:
        # Certificates are made without images. The template may count them, like `Picture 2:`.
        after_image = [{"role": "user", "content": [{"type": IMAGE}, {"type": "text", "text": _MARKER}]}]
        here = renderer.suffix(reply, new_messages, setup)
        return local_or_contextual(lambda: renderer.suffix(reply, new_messages, setup, after_image), here)
    return strategy


_FIELDS = {"role", "content"}
_RESULT_FIELDS = {"role", "content", "tool_call_id", "name"}
"""Fields of the messages, and of the tool results, that certificates are made from. A template may compare any other,
such as a user's name, with that of earlier messages."""

_MARKER = "tokentapetellingword"


def _try_out(
    renderer: Renderer, reply: Message, new_messages: Sequence[Message], setup: Setup, history: Sequence[Message]
) -> Strategy:
    """Return the strategy for a conversation, from its renderings.

    A marker word in tools and earlier messages shows whether the suffix repeats any of them.
    """
    reply = with_argument_objects(reply)
    try:
        suffix = renderer.suffix(reply, new_messages, setup, history)
    except TemplateRefused:
        if reaches_prompt(renderer, setup, [*history, reply], new_messages):
            return "fork"
        raise
    tools = tuple(
        {**tool, "function": {**tool["function"], "description": _marked(tool["function"].get("description") or "")}}
        for tool in setup.tools
    )
    marked = [_with_marker(message) if message["role"] != "assistant" else message for message in history]
    if _MARKER in renderer.suffix(reply, new_messages, replace(setup, tools=tools), marked):
        return "fork"
    return local_or_contextual(lambda: renderer.suffix(reply, new_messages, setup), suffix)


def reaches_prompt(renderer: Renderer, setup: Setup, before: Sequence[Message], new: Sequence[Message]) -> bool:
    """Return whether the last turn in `before` and each new message appear anywhere in a full rendering."""
    messages = [*before, *new]
    return all(
        _MARKER
        in renderer.render_text([*messages[:n], _with_marker(messages[n]), *messages[n + 1 :]], setup, generate=True)
        for n in range(len(before) - 1, len(messages))
    )


def _with_marker(message: Message) -> Message:
    """Return the message with the marker word in its content, or in the name of its last call."""
    plain = plain_message(message)
    if not plain.get("tool_calls"):
        content = plain.get("content", "")
        marked = _marked(content) if isinstance(content, str) else [{"type": "text", "text": _MARKER}, *content]
        return {**plain, "content": marked}
    *calls, last = plain["tool_calls"]
    name = _marked(last["function"]["name"])
    return {**plain, "tool_calls": [*calls, {**last, "function": {**last["function"], "name": name}}]}


def _marked(text: str) -> str:
    # The marker goes into the middle because templates check how texts begin and end.
    return text[: len(text) // 2] + _MARKER + text[len(text) // 2 :]


def local_or_contextual(local_suffix: Callable[[], str], suffix: str) -> Strategy:
    """Return `local` if `local_suffix`, rendered after a placeholder question, equals `suffix`, else `contextual`."""
    try:
        return "local" if local_suffix() == suffix else "contextual"
    except TemplateRefused:
        return "contextual"
