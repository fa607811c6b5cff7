"""Which bridge is exact for a turn and the messages after it: local, contextual, or none but a new branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tokentape.chat import grammar
from tokentape.chat.certificate import Certificate, Strategy
from tokentape.chat.media import IMAGE, image_parts
from tokentape.chat.renderer import Renderer
from tokentape.chat.template import plain_message
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup


def choose(
    renderer: Renderer,
    certificate: Certificate,
    reply: Message,
    new_messages: Sequence[Message],
    setup: Setup,
    history: Sequence[Message],
    system: bool | None = None,
) -> Strategy:
    """The bridge strategy for these very messages.

    `system` says whether `history` has a message of the system's or the developer's, if that is known already.

    A continuation that the certificate does not name, or new messages that do not answer each call of `reply`, are
    tried out here and now, at the cost of some full renderings.
    Raises `TemplateRefused` with the certificate's reason for one that the template does not take.
    """
    if system is None:
        system = any(message["role"] in ("system", "developer") for message in history)
    name = grammar.continuation_name(new_messages, tools=bool(setup.tools), system=system)
    found = certificate.continuation(name)
    if renderer.is_external:
        if found is None:
            return "fork"
    elif not grammar.answers(reply, new_messages):
        found = None
    if found is not None and found.strategy == "refused":
        raise TemplateRefused(f"continuation {name!r} is not certified for this chat template: {found.reason}")
    strategy = _try_out(renderer, reply, new_messages, setup, history) if found is None else found.strategy
    if strategy == "local" and image_parts(new_messages) and _counts_images(renderer, reply, new_messages, setup):
        return "contextual"
    return strategy


def _counts_images(renderer: Renderer, reply: Message, new_messages: Sequence[Message], setup: Setup) -> bool:
    """Whether what the template writes of images depends on those before (`Picture 2:`)."""
    behind_image = [{"role": "user", "content": [{"type": IMAGE}, {"type": "text", "text": _TELLING}]}]
    here = renderer.tail(reply, new_messages, setup)
    return renderer.tail(reply, new_messages, setup, behind_image) != here


_TELLING = "tokentapetellingword"


def _try_out(
    renderer: Renderer, reply: Message, new_messages: Sequence[Message], setup: Setup, history: Sequence[Message]
) -> Strategy:
    """Return the strategy for a real conversation. A word put into all that came before shows if it is said again."""
    try:
        tail = renderer.tail(reply, new_messages, setup, history)
    except TemplateRefused:
        if reaches_prompt(renderer, setup, [*history, reply], new_messages):
            return "fork"
        raise
    tools = tuple(
        {**tool, "function": {**tool["function"], "description": _told(tool["function"].get("description") or "")}}
        for tool in setup.tools
    )
    told = [_telling(message) if message["role"] != "assistant" else message for message in history]
    telling = replace(setup, tools=tools)
    if _TELLING in renderer.tail(reply, new_messages, telling, told):
        return "fork"
    return local_or_contextual(lambda: renderer.tail(reply, new_messages, setup), tail)


def reaches_prompt(renderer: Renderer, setup: Setup, before: Sequence[Message], new: Sequence[Message]) -> bool:
    """Whether a rendering from the start has, wherever, the turn that `before` ends with and each new message."""
    messages = [*before, *new]
    return all(
        _TELLING in renderer.marked([*messages[:n], _telling(messages[n]), *messages[n + 1 :]], setup, generate=True)
        for n in range(len(before) - 1, len(messages))
    )


def _telling(message: Message) -> Message:
    """The message with the telling word in its content, or in the name of its last call."""
    plain = plain_message(message)
    if not plain.get("tool_calls"):
        content = plain.get("content", "")
        told = _told(content) if isinstance(content, str) else [{"type": "text", "text": _TELLING}, *content]
        return {**plain, "content": told}
    *calls, last = plain["tool_calls"]
    name = _told(last["function"]["name"])
    return {**plain, "tool_calls": [*calls, {**last, "function": {**last["function"], "name": name}}]}


def _told(text: str) -> str:
    # In the middle: templates look at how texts begin and end.
    return text[: len(text) // 2] + _TELLING + text[len(text) // 2 :]


def local_or_contextual(local_tail: Callable[[], str], tail: str) -> Strategy:
    """`local` if the tail after a made-up question, which `local_tail` renders, is `tail`."""
    try:
        return "local" if local_tail() == tail else "contextual"
    except TemplateRefused:
        return "contextual"
