"""Changes that a server may make to a conversation before it renders it: to texts, to messages, to their fields."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Literal, TypeAlias

from tokentape.audit._skew.backends.base import SkewChat
from tokentape.types import Message

Change: TypeAlias = Callable[[SkewChat], SkewChat]

_FORMS: tuple[Literal["NFC", "NFKC", "NFD", "NFKD"], ...] = ("NFC", "NFKC", "NFD", "NFKD")
OF_TEXT: tuple[tuple[str, Callable[[str], str]], ...] = (
    *((f"in Unicode form {form}", partial(unicodedata.normalize, form)) for form in _FORMS),
    ("without white space around it", str.strip),
    ("without white space at its end", str.rstrip),
    ("without white space at its start", str.lstrip),
    (r"with \r\n as \n", lambda text: text.replace("\r\n", "\n")),
    ("without NUL", lambda text: text.replace("\0", "")),
    (r"without \r", lambda text: text.replace("\r", "")),
    ("with tabs as spaces", lambda text: text.expandtabs(4)),
    ("with several spaces as one", lambda text: " ".join(filter(None, text.split(" ")))),
    ("in lower case", str.lower),
)
"""Changes of a text, by what the text is like after it."""


def changes_of(conversation: SkewChat) -> Iterator[tuple[str, Change]]:
    """Yield a description of each change that may matter for a conversation, and the change."""
    for what, change in OF_TEXT:
        yield f"the content of messages {what}", partial(_content, change)
    for none in ("", "None"):
        yield f"content None as {none!r}", partial(_content, str, none=none)
    for between in ("\n\n", "\n", " ", ""):
        yield f"messages of one role as one message, joined by {between!r}", partial(_joined, between)
    yield "one message for equal messages in a row", _once
    for field in dict.fromkeys(key for message in conversation.messages for key in message):
        if field not in ("role", "content"):
            yield f"messages without {field}", partial(_without, field)
    for kept in range(1, len(conversation.messages)):
        yield f"the last {kept} messages only", partial(_last, kept)


def _messages(conversation: SkewChat, messages: Any) -> SkewChat:
    return replace(conversation, messages=tuple(messages))


def _content(change: Callable[[str], str], conversation: SkewChat, none: str | None = None) -> SkewChat:
    def changed(content: Any) -> Any:
        return change(content) if isinstance(content, str) else none if content is None else content

    return _messages(
        conversation,
        ({**one, "content": changed(one["content"])} if "content" in one else one for one in conversation.messages),
    )


def _joined(between: str, conversation: SkewChat) -> SkewChat:
    made: list[Message] = []
    for role, group in groupby(conversation.messages, lambda one: one["role"]):
        some = list(group)
        plain = role in ("user", "system") and all(isinstance(one.get("content"), str) for one in some)
        made += [{**some[0], "content": between.join(one["content"] for one in some)}] if plain else some
    return _messages(conversation, made)


def _once(conversation: SkewChat) -> SkewChat:
    messages = conversation.messages
    return _messages(conversation, [*messages[:1], *(new for old, new in pairwise(messages) if old != new)])


def _without(field: str, conversation: SkewChat) -> SkewChat:
    return _messages(
        conversation, ({key: value for key, value in one.items() if key != field} for one in conversation.messages)
    )


def _last(kept: int, conversation: SkewChat) -> SkewChat:
    return _messages(conversation, conversation.messages[-kept:])
