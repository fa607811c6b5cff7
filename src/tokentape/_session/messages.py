"""Sequences of messages that are parsed, encoded or compressed at most once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

from tokentape._canonical import canonical_json
from tokentape.types import Message

_recent: OrderedDict[int, SharedMessages] = OrderedDict()
"""Messages that keep their canonical JSON, by `id`. It takes as much memory as the messages, so only a few keep it."""

_MOST_RECENT = 16


class SharedMessages(tuple[Message, ...]):
    """The first messages of several sessions, which are encoded and compressed only once."""

    digest: bytes = b""
    """Digest of the JSON of all messages but the last; see `PromptBuilder`."""
    compressed: bytes | None = None
    _canonical: bytes | None = None

    def canonical(self) -> bytes:
        """Return the canonical JSON of the messages. Raises `InvalidRequest` for values that are not JSON."""
        return self._canonical or self._keep(canonical_json(self).encode("ascii"))

    def begin_like(self, other: SharedMessages | None) -> None:
        """Reuse the canonical JSON that `other` keeps, if any. Only the last messages of the two may differ."""
        if other is not None and (text := other._canonical) is not None:
            other._keep(text)
            self._keep(text[: -len(canonical_json(other[-1])) - 1] + canonical_json(self[-1]).encode("ascii") + b"]")

    def _keep(self, text: bytes) -> bytes:
        self._canonical = text
        _recent.pop(id(self), None)
        _recent[id(self)] = self
        if len(_recent) > _MOST_RECENT:
            _recent.popitem(last=False)[1]._canonical = None
        return text


@dataclass(eq=False, repr=False)
class LazyMessages(Sequence[Message]):
    """A request's messages, parsed by `read` on first access."""

    read: Callable[[], Sequence[Message]]
    tail: Sequence[Message] = ()
    """The last messages, already parsed."""
    key: bytes = b""
    """The history key (see `history_keys`) of the messages before them, under the setup with the digest `setup`."""
    setup: str = ""
    known: SharedMessages | None = None
    """The messages before `tail`, and one more that is not used. With them, `read` is not called."""
    _messages: tuple[Message, ...] | None = field(default=None, init=False)

    def _all(self) -> tuple[Message, ...]:
        if self._messages is None:
            self._messages = tuple(self.read()) if self.known is None else (*self.known[:-1], *self.tail)
        return self._messages

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())
