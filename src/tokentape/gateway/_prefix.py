"""Decode only the new messages of a request body that begins like an earlier body.

An agent sends its whole history with every call. If a body begins with the same bytes as an earlier request in the
session, up to the end of that request's last message, then it begins with the same messages, and only the remaining
messages are decoded. The first body of a session is compared with the first bodies of other sessions, up to the end of
the message before their last, because sessions in a group begin alike. The SHA-256 of those bytes is compared, computed
while the whole body is hashed, so that no earlier bodies are kept in memory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from tokentape._session.messages import SharedMessages

_COMMA = re.compile(rb"[ \t\r\n]*,")


class MessagesSpan(msgspec.Struct, frozen=True):
    head: int
    """Number of bytes before the first message, including the opening bracket."""
    end: int
    """Number of bytes up to the end of the last message."""
    digest: bytes
    """SHA-256 of the first `end` bytes."""
    count: int = 0
    """Number of messages and their parts; see `check_count`."""
    before: MessagesSpan | None = None
    """The span without the last message, for other sessions; None if there are no other messages, or the body continues
    an earlier one of its session."""


class ParsedPrefix(msgspec.Struct, frozen=True):
    """The prefix of an earlier request body, up to the end of a message."""

    span: MessagesSpan
    setup: str
    """Digest of the setup of that request."""
    key: bytes
    """Key of the history that its messages form; see `history_keys`."""
    known: SharedMessages | None = None
    """Its messages and one more, if the body was another session's; None if it was this session's."""
    size: int = 0
    """Number of bytes in that body up to the end of `known`."""


class RequestBody:
    """A request body, hashed once and compared with the `prefixes` of earlier bodies."""

    def __init__(self, data: bytes, prefixes: Iterable[ParsedPrefix] = ()) -> None:
        self.data = data
        self._hash = hashlib.sha256()
        self._hashed = 0
        self.prefix: ParsedPrefix | None = None
        """The longest prefix that the body begins with and extends by more messages."""
        self.unread = data
        """The body without the messages in `prefix`."""
        for prefix in sorted(prefixes, key=attrgetter("span.end")):
            end = prefix.span.end
            comma = _COMMA.match(data, end)
            if comma is not None and self._digest(end) == prefix.span.digest:
                self.prefix, self.unread = prefix, data[: prefix.span.head] + data[comma.end() :]

    def span(self, count: int = 0, counted: Callable[[Any], int] = lambda _: 0) -> MessagesSpan | None:
        """Return the span of the messages, with their `count`. `counted` returns the count of a body."""
        unread = self.unread
        try:
            messages = msgspec.json.decode(unread, type=dict[str, msgspec.Raw])["messages"]
            entries = msgspec.json.decode(messages, type=list[msgspec.Raw])
        except (msgspec.DecodeError, KeyError):
            return None
        # `messages` is a view of `unread`, so the difference of the addresses is its offset.
        start = _address(memoryview(unread))
        head = _address(memoryview(messages)) - start + 1
        if self.prefix is not None and head != self.prefix.span.head:
            return None
        start -= len(self.data) - len(unread)
        ends = [_address(memoryview(raw)) + len(memoryview(raw)) - start for raw in entries[-2:]]
        before = None
        # Only a session's first call needs it, and other sessions must decode what this one did not: their first
        # replies name ignored fields.
        if self.prefix is None or self.prefix.known is not None:
            if len(ends) > 1:
                last = counted({"messages": [msgspec.json.decode(entries[-1])]})
                before = MessagesSpan(head, ends[0], self._digest(ends[0]), count - last)
            elif self.prefix is not None:
                before = structs.replace(self.prefix.span, before=None)
        return MessagesSpan(head, ends[-1], self._digest(ends[-1]), count, before) if ends else None

    def digest(self, path: str) -> str:
        """Return the hex SHA-256 of the path, a NUL and the SHA-256 of the body. It identifies a call."""
        return hashlib.sha256(path.encode() + b"\0" + self._digest(len(self.data))).hexdigest()

    def _digest(self, end: int) -> bytes:
        if end < self._hashed:
            self._hash, self._hashed = hashlib.sha256(), 0
        self._hash.update(memoryview(self.data)[self._hashed : end])
        self._hashed = end
        return self._hash.copy().digest()


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
