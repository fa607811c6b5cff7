"""What wire APIs and `Turns` exchange: a request for a turn, and the events of the call that takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tokentape.chat._parse import Reply, ReplyDelta
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import IdempotencyMismatch
from tokentape.gateway._pins import Overridden
from tokentape.gateway._prefix import MessagesSpan
from tokentape.types import Media, Message, TokenIds, Tool, Turn

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]
"""Why a reply ended, in replies to clients."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Identifies a call, so that a retry is not taken for a new call."""

    body_digest: str
    """Hex SHA-256 of path and body."""
    key: str | None = None
    """The client's Idempotency-Key: two calls with the same one are the same call."""
    retried: bool = False
    """The client says that it sent this before (OpenAI's and Anthropic's do, in `x-stainless-retry-count`)."""

    def repeats(self, key: str | None, body_digest: str) -> bool:
        """Return whether this is an earlier call again. Raises `IdempotencyMismatch` for a key with another body."""
        if self.key is None:
            return self.retried and key is None and self.body_digest == body_digest
        if self.key == key and self.body_digest != body_digest:
            raise IdempotencyMismatch("this Idempotency-Key came with another body before; use a new key")
        return self.key == key


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for a turn, the same for all wire APIs."""

    session_id: str
    messages: Sequence[Message]
    tools: tuple[Tool, ...]
    template_kwargs: Mapping[str, object]
    sampling: SamplingParams
    """`max_tokens` 0 means as many as fit; `stop_token_ids` are added to those of the model."""
    given: frozenset[str] = frozenset()
    """Which of the parameters in `pins.NAMES` the caller named."""
    overridden: Overridden = field(default_factory=dict)
    """Which of these are not in `sampling` as the caller asked; see `Pins`."""
    n: int = 1
    stream: bool = False
    prompt_ids: TokenIds | None = None
    """A prompt that the caller tokenized, int32 [tokens], in place of messages. The reply is not parsed then."""
    ignore_eos: bool = False
    """The model's own stop ids don't end the completion."""
    media: Mapping[str, Media] = field(default_factory=dict)
    """Images that came with the messages, by hash."""
    owner: str = ""
    """Name of the caller's API key. A session belongs to the key that began it."""
    begins_session: bool = True
    """A session that does not exist is created; not with a session's own key, which would revive a deleted one."""
    client_session: str | None = None
    """The session id that the harness itself sent in a header, if it is not `session_id`."""
    client: Mapping[str, str] = field(default_factory=dict)
    """What headers say of the call's place among others; see `client_headers`."""
    attempt: Attempt | None = None
    """Without, the call is new."""
    span: MessagesSpan | None = None
    """Where the messages are in the body, so that a later body that begins alike is recognized."""


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The first event of a call: its prompt is ready, nothing is sampled yet."""

    reply_id: str
    """Random, 24 hex digits. A retry gets the same."""
    created_at: float
    """Unix seconds."""
    prompt_ids: TokenIds
    """The whole prompt, int32 [tokens]."""
    replayed: bool = False
    """The call was answered before; this is the recorded reply."""
    engine_requests: tuple[str, ...] = ()
    """Ids of the engine's requests, one per choice."""
    sampling: SamplingParams | None = None
    """The request's, pins and defaults included."""
    overridden: Overridden = field(default_factory=dict)
    """The request's."""


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """Newly sampled tokens of one choice, with what they added to the reply."""

    choice: int
    sampled: SampleDelta
    reply: ReplyDelta


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A committed turn. `rest` is what was held back of the reply until sampling had ended."""

    choice: int
    turn: Turn
    reply: Reply
    rest: ReplyDelta
    finish: Finish
    cached_tokens: int | None = None
    """How many tokens of the prompt the engine had cached, if it says; not of replies from the record."""


SampleEvent: TypeAlias = TurnDelta | TurnDone

TurnEvent: TypeAlias = TurnStarted | SampleEvent
"""A `TurnStarted`, then deltas, then a `TurnDone` for each choice."""
