"""Whether what follows a reply depends on what came before it, by the template's own renderings.

No code of the product is used: the reply and the new messages are rendered after many histories, and what stands after
the reply's last word is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.generator.conversations import Conversation, Message, words_in
from tests.generator.oracle import Reference, Refused, end_of_reply

QUESTION: Message = {"role": "user", "content": "What is it?"}
_ANSWER: Message = {"role": "assistant", "content": "It is this."}
_SYSTEM: Message = {"role": "system", "content": "Be kind."}
_FEWEST = 14
"""The number of renderings below which no result is given."""
_REPLIES = 2
"""Replies that are tried after every history."""


def answered(conversation: Conversation) -> bool:
    """Whether the new messages answer each call of the reply, as in the conversations that certificates speak of."""
    results = [message for message in conversation.new if message["role"] == "tool"]
    return len(results) == len(conversation.reply.get("tool_calls") or ())


def _after_a_call(content: str | None, arguments: object) -> tuple[Message, ...]:
    call = {"id": "past00000", "type": "function", "function": {"name": "past", "arguments": arguments}}
    calling = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "name": "past", "tool_call_id": "past00000", "content": "It was."}
    return QUESTION, calling, result, _ANSWER, QUESTION


_CALLED = [_after_a_call(content, form) for content in (None, "") for form in ({"of": "then"}, '{"of": "then"}')]
"""Histories with a call. Templates take its arguments as an object or as text, and no content or an empty one."""

AFTER_RESULTS = [(*before, *history[:-2]) for history in _CALLED for before in ((), (_SYSTEM,))]
"""Histories that end with a result, for conversations with tools, where it does not matter who speaks first."""


def _ids_in(messages: Sequence[Message]) -> set[str]:
    return {call["id"] for message in messages for call in message.get("tool_calls") or ()}


def has_shortest(name: str, conversations: Sequence[Conversation]) -> bool:
    """Whether one of them continues with as few messages as any of this name. A template may count messages."""
    fewest = len(name.partition("/")[0].replace("tools", "tool+tool").split("+"))
    return any(len(conversation.new) == fewest for conversation in conversations)


def histories_with(constants: Sequence[str]) -> Iterator[list[Message]]:
    """Histories in which each role in turn uses each of these strings, which a template looks for."""
    for constant in constants[:32]:
        for text in (constant, f"so {constant} then"):
            yield [{"role": "system", "content": text}, QUESTION]
            yield [{"role": "user", "content": text}, _ANSWER, QUESTION]
            yield [QUESTION, {"role": "assistant", "content": text}, QUESTION]
            yield [QUESTION, _ANSWER, {"role": "user", "content": text}]
            yield [_SYSTEM, {"role": "user", "content": text}, _ANSWER, QUESTION]
            yield [_SYSTEM, QUESTION, {"role": "assistant", "content": text}, QUESTION]


def depends_on_constants(
    reference: Reference, conversation: Conversation, constants: Sequence[str], *, tools: bool
) -> str:
    """Why new messages with a string that a template looks for depend on earlier ones with it; empty if they do not."""
    for constant in constants[:32]:
        histories: list[Sequence[Message]] = [[{"role": "user", "content": constant}, _ANSWER, QUESTION]]
        for history in AFTER_RESULTS[::2] if tools else ():
            histories.append([*history[:-1], {**history[-1], "content": constant}])
        new = [{**message, "content": f"{constant} {words_in(message)[-1]}"} for message in conversation.new]
        tails: set[str] = set()
        for history in ([QUESTION], *histories):
            try:
                full = reference.render([*history, conversation.reply, *new], conversation.tools, generate=True)
            except Refused:
                continue
            end = end_of_reply(full, conversation.reply, new)
            tails |= {full[end:]} if end is not None else set()
        if len(tails) > 1:
            return f"{constant!r} again: {min(tails)[-120:]!r} and {max(tails)[-120:]!r}"
    return ""


def dependence(
    reference: Reference, conversations: Sequence[Conversation], histories: Sequence[Sequence[Message]]
) -> str | None:
    """Why what follows such replies depends on the history; empty if it is always the same. None if nothing is known.

    All `conversations` continue alike; some of the shortest are tried after all of `histories`, and after a question.
    """
    tried = 0
    # Templates that fail on a reply without content fail after most histories.
    shortest = sorted(
        conversations, key=lambda conversation: (len(conversation.new), conversation.reply.get("content") is None)
    )
    calling = [
        conversation
        for conversation in shortest
        if conversation.reply.get("tool_calls") and not conversation.reply.get("content")
    ][:1]
    silent = [replace(conversation, reply={**conversation.reply, "content": None}) for conversation in calling]
    for probe in [*shortest[:_REPLIES], *silent]:
        tails: set[str] = set()
        for history in [(QUESTION,), probe.history, *_CALLED, *histories]:
            # Within one conversation no two calls have the same id.
            if history is not probe.history and not _ids_in([probe.reply]).isdisjoint(_ids_in(history)):
                continue
            try:
                full = reference.render([*history, probe.reply, *probe.new], probe.tools, generate=True)
            except Refused:
                continue
            end = end_of_reply(full, probe.reply, probe.new)
            if end is None and probe in silent:
                continue
            if end is None:
                return None
            tails.add(full[end:])
            tried += 1
            if any(word in full[end:] for word in words_in([*history, *probe.tools])):
                return "the history is said again"
            if not all(word in full[end:] for word in words_in(list(probe.new))):
                return "a new message is written elsewhere"
            if len(tails) > 1:
                tail, other = sorted(tails)
                return f"another history, another tail: {tail[-120:]!r} and {other[-120:]!r}"
    return "" if tried >= _FEWEST else None
