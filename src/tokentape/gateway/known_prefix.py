"""Requests that begin with the bytes of an earlier one: what was read then is not read again.

An agent sends its whole history with every call. Where a body begins with the very bytes of an earlier request of the
session, up to the end of that one's last message, its messages are the earlier ones and some more, and only those are
decoded and hashed. Whether it does is told by a SHA-256 of those bytes, taken on the way to the body's own: nothing of
the history is kept in memory for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

_WHITE = b" \t\r\n"
"""What may stand between the parts of JSON."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a body its messages stand."""

    head: int
    """Bytes in front of the first message, the opening bracket included."""
    end: int
    """Bytes up to the end of the last one."""
    digest: bytes
    """SHA-256 of the first `end` bytes."""


@dataclass(frozen=True, slots=True)
class Known:
    """The beginning of a request that was read before."""

    place: Place
    setup: str
    """Digest of the setup under which it was asked."""
    key: bytes
    """Of the history that its messages are, see `history_keys`."""


class Body:
    """A request's body, hashed once, whose beginning may be one of `known`."""

    def __init__(self, data: bytes, known: Iterable[Known] = ()) -> None:
        self.data = data
        self._hash = hashlib.sha256()
        self._hashed = 0
        self.known: Known | None = None
        """The longest of `known` with which it begins, and goes on with more messages."""
        for one in sorted(known, key=lambda known: known.place.end):
            end = one.place.end
            if end < len(data) and self._comma(end) is not None and self._prefix(end) == one.place.digest:
                self.known = one

    @property
    def unread(self) -> bytes:
        """The body without the messages that are known."""
        comma = None if self.known is None else self._comma(self.known.place.end)
        if self.known is None or comma is None:
            return self.data
        return self.data[: self.known.place.head] + self.data[comma + 1 :]

    def forget(self) -> None:
        """Take nothing for known."""
        self.known = None

    def place(self) -> Place | None:
        """Where its messages stand; None if that is not where those stand that are known.

        What is unread must be JSON, an object with an array of messages.
        """
        unread = self.unread
        written = memoryview(msgspec.json.decode(unread, type=_Messages).messages)
        # It is a view of `unread`: that is how its place is known beyond doubt.
        start = _address(written) - _address(memoryview(unread))
        end = start + len(written) - 1
        while unread[end - 1] in _WHITE:
            end -= 1
        if self.known is not None:
            if start + 1 != self.known.place.head:
                return None
            end += len(self.data) - len(unread)
        return Place(start + 1, end, self._prefix(end))

    def digest(self, path: str) -> str:
        """Hex SHA-256 of the path, a NUL and the SHA-256 of the body: what tells a call from others."""
        return hashlib.sha256(path.encode() + b"\0" + self._prefix(len(self.data))).hexdigest()

    def _prefix(self, end: int) -> bytes:
        """SHA-256 of the first `end` bytes."""
        if end < self._hashed:
            self._hash, self._hashed = hashlib.sha256(), 0
        self._hash.update(memoryview(self.data)[self._hashed : end])
        self._hashed = end
        return self._hash.copy().digest()

    def _comma(self, at: int) -> int | None:
        """Where the comma is that stands behind the first `at` bytes; None if none does."""
        while at < len(self.data) and self.data[at] in _WHITE:
            at += 1
        return at if self.data[at : at + 1] == b"," else None


class _Messages(msgspec.Struct):
    messages: msgspec.Raw


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
