"""Sequences of messages that are parsed, encoded or compressed at most once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import overload

from tokentape._canonical import canonical_json
from tokentape.types import Message

_recent: deque[SharedMessages] = deque()
"""The messages that keep their canonical JSON. It takes as much memory as the messages, so only a few keep it."""

_MOST_RECENT = 16


class SharedMessages(tuple[Message, ...]):
    """The first messages of several sessions, which are encoded and compressed only once."""

    in_order: bytes | None = None
    """Their JSON by `quick_json_in_order`, if it is known and they are not compressed yet."""
    compressed: bytes | None = None
    _canonical: bytes | None = None

    def canonical(self) -> bytes:
        """Return the canonical JSON of the messages. Raises like `canonical_json`."""
        text = self._canonical
        if text is None:
            text = self._canonical = canonical_json(self).encode("ascii")
            _recent.append(self)
            if len(_recent) > _MOST_RECENT:
                _recent.popleft()._canonical = None
        return text


class LazyMessages(Sequence[Message]):
    """A request's messages, parsed by `read` on first access.

    `tail` contains the last messages, already parsed. `key` is the history key (see `history_keys`) of the messages
    before them, under the setup with the digest `setup`.
    """

    def __init__(
        self, read: Callable[[], Sequence[Message]], tail: Sequence[Message] = (), key: bytes = b"", setup: str = ""
    ) -> None:
        self.tail = tail
        self.key = key
        self.setup = setup
        self._read = read
        self._messages: tuple[Message, ...] | None = None

    def _all(self) -> tuple[Message, ...]:
        if self._messages is None:
            self._messages = tuple(self._read())
        return self._messages

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())
