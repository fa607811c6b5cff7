"""Types exchanged between wire APIs and `Turns`: turn requests, and the events of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct, field

from tokentape.chat._call_constraint import CallRule
from tokentape.chat._parse import Reply, ReplyDelta
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import IdempotencyMismatch
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
    given: frozenset[str] = frozenset()
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
