"""What wire APIs and `Turns` exchange: turn requests, the events of a call, and the call in flight that keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from tokentape.chat._call_constraint import CallRule
from tokentape.chat._parse import Reply, ReplyDelta
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import EngineUnavailable, IdempotencyMismatch
from tokentape.gateway._pins import Overridden
from tokentape.gateway._prefix import MessagesSpan
from tokentape.types import Media, Message, TokenIds, Tool, Turn

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]
"""The finish reason that clients get."""


class Attempt(Struct, frozen=True):
    """Identity of a call, used to recognize retries."""

    body_digest: str
    """Hex SHA-256 of path and body."""
    key: str | None = None
    """The client's Idempotency-Key. Calls with the same key are the same call."""
    retried: bool = False
    """Whether the client marks the call as a retry (OpenAI's and Anthropic's SDKs do, in `x-stainless-retry-count`)."""

    def repeats(self, key: str | None, body_digest: str) -> bool:
        """Return whether this call repeats the earlier call with `key` and `body_digest`.

        Raises `IdempotencyMismatch` if the keys are equal but the bodies differ.
        """
        if self.key is None:
            return self.retried and key is None and self.body_digest == body_digest
        if self.key == key and self.body_digest != body_digest:
            raise IdempotencyMismatch("this Idempotency-Key was used with a different body before; use a new key")
        return self.key == key


class TurnRequest(Struct, frozen=True):
    """A turn request, in the same form for all wire APIs."""

    session_id: str
    messages: Sequence[Message]
    tools: tuple[Tool, ...]
    template_kwargs: Mapping[str, object]
    sampling: SamplingParams
    """`max_tokens` 0 means as many tokens as fit. `stop_token_ids` are added to the model's own stop ids."""
    set_parameters: frozenset[str] = frozenset()
    """The parameters in `pins.NAMES` that the caller set."""
    overridden: Overridden = field(default_factory=dict)
    """Parameters set by the caller that `Pins` replaced in `sampling`."""
    n: int = 1
    stream: bool = False
    prompt_ids: TokenIds | None = None
    """A prompt that the caller tokenized, int32 [tokens], in place of messages. The reply is not parsed."""
    ignore_eos: bool = False
    """Whether sampling continues past the model's own stop ids."""
    media: Mapping[str, Media] = field(default_factory=dict)
    """Images sent with the messages, by hash."""
    calls: CallRule | None = None
    """The constraint on tool calls in the reply that the engine has to enforce."""
    owner: str = ""
    """Name of the caller's API key. A session belongs to the key that created it."""
    begins_session: bool = True
    """Whether to create a missing session. False for a session's own key, which could recreate a deleted session."""
    client_session: str | None = None
    """The session id in a header from the harness, if it differs from `session_id`."""
    client: Mapping[str, str] = field(default_factory=dict)
    """Session, agent and parent from the client's headers; see `client_headers`."""
    attempt: Attempt | None = None
    """None if the call can't be a retry."""
    span: MessagesSpan | None = None
    """Position of the messages in the body, to recognize a later body with the same prefix."""


class TurnStarted(Struct, frozen=True):
    """First event of a call. The prompt is ready, and nothing is sampled yet."""

    reply_id: str
    """Random id, 24 hex digits. A retry gets the same id."""
    created_at: float
    """Unix seconds."""
    prompt_ids: TokenIds
    """The whole prompt, int32 [tokens]."""
    replayed: bool = False
    """Whether the reply comes from the record because the call was already answered."""
    engine_requests: tuple[str, ...] = ()
    """Ids of the engine requests, one per choice."""
    sampling: SamplingParams | None = None
    """The request's sampling parameters after pins and defaults."""
    overridden: Overridden = field(default_factory=dict)
    """`TurnRequest.overridden`."""


class TurnDelta(Struct, frozen=True):
    """Newly sampled tokens of a choice, and the parsed text and calls that they add to the reply."""

    choice: int
    sampled: SampleDelta
    reply: ReplyDelta


class TurnDone(Struct, frozen=True):
    """A committed turn. `rest` is the end of the reply, which was held back until sampling ended."""

    choice: int
    turn: Turn
    reply: Reply
    rest: ReplyDelta
    finish: Finish
    cached_tokens: int | None = None
    """Number of prompt tokens that the engine had cached, if it reports it. None for replies from the record."""


SampleEvent: TypeAlias = TurnDelta | TurnDone

TurnEvent: TypeAlias = TurnStarted | SampleEvent
"""A `TurnStarted`, then deltas, then a `TurnDone` for each choice."""


class InFlightCall:
    """A call with `turns` choices, independent of the connections that wait for it. Call its methods on one event loop.

    It keeps its events, so that a client that disconnects and retries joins it: one completion serves both requests.
    After all clients have disconnected, the call continues for `grace` seconds if no client has read any of its reply,
    because official clients retry half a second after a timeout. A stream that a client has begun to read is aborted
    at once.
    """

    def __init__(self, attempt: Attempt | None, turns: int, *, stream: bool, grace: float) -> None:
        self.attempt = attempt
        self.turns = turns
        self.abort_cause = "client_left"
        self.aborted = False
        """Whether the work is cancelled. Retries can't join the call then."""
        self._stream = stream
        self._grace = grace
        self._events: list[TurnEvent] = []
        self._changed = asyncio.Event()
        self._readers = 0
        self._read = False
        self._read_to_end = False
        self._expiry: asyncio.TimerHandle | None = None
        self._committing = False
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[BaseException | None], None]) -> None:
        """Start `work`, which calls `publish`. It is cancelled once no client waits for it. `on_end` gets its error."""
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(partial(self._ended, on_end))

    def publish(self, event: TurnEvent) -> None:
        self._events.append(event)
        # A reply that is not streamed is sent when the call has ended, which wakes the clients too.
        if self._stream or isinstance(event, TurnStarted):
            self._wake()

    async def wait_for_reader(self) -> None:
        while not self._readers:
            await self._changed.wait()

    def begin_commit(self) -> None:
        """Forbid aborts from now on, because only recording remains, and a retry will find the reply."""
        self._committing = True

    def abort(self, cause: str = "client_left") -> None:
        if self._task is not None and not self._committing:
            self.abort_cause = cause
            self.aborted = True
            self._task.cancel()

    @property
    def left_reply(self) -> str | None:
        """Id of the reply if it has begun and all clients disconnected before its end, else None."""
        started = self._events[0] if self._events else None
        abandoned = not self._readers and not self._read_to_end
        return started.reply_id if isinstance(started, TurnStarted) and abandoned else None

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def follow(self) -> AsyncGenerator[TurnEvent, None]:
        """Yield all events from the first one on. Raises the error that ended the work."""
        assert self._task is not None
        self._readers += 1
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._wake()
        index = 0
        try:
            while index < len(self._events) or not self._task.done():
                if index < len(self._events):
                    yield self._events[index]
                    self._read = self._read or (self._stream and isinstance(self._events[index], TurnDelta))
                    index += 1
                    continue
                await self._changed.wait()
            self._read_to_end = True
        finally:
            self._readers -= 1
            if not self._readers and not self._task.done():
                self._leave()
        if self._task.cancelled():
            raise EngineUnavailable("the gateway cancelled this call before it finished; send it again")
        self._task.result()

    def _leave(self) -> None:
        if self._read or self._grace <= 0:
            self.abort()
        else:
            self._expiry = asyncio.get_running_loop().call_later(self._grace, self.abort)

    def _ended(self, on_end: Callable[[BaseException | None], None], task: asyncio.Task[None]) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        # Retrieve the exception, or asyncio logs a failure that no client was waiting for.
        on_end(None if task.cancelled() else task.exception())
        self._wake()

    def _wake(self) -> None:
        # Only what waits now continues.
        self._changed.set()
        self._changed.clear()
