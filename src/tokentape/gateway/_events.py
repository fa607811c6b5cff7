"""Types exchanged between wire APIs and `Turns`: requests for turns, and the events of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tokentape.chat._call_constraint import CallRule
from tokentape.chat._parse import Reply, ReplyDelta
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import IdempotencyMismatch
from tokentape.gateway._pins import Overridden
from tokentape.gateway._prefix import MessagesSpan
from tokentape.types import Media, Message, TokenIds, Tool, Turn

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]
"""Finish reason as clients see it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Identity of a call, used to recognize retries."""

    body_digest: str
    """Hex SHA-256 of path and body."""
    key: str | None = None
    """The client's Idempotency-Key: two calls with the same key are the same call."""
    retried: bool = False
    """Whether the client marks it as a retry (OpenAI's and Anthropic's SDKs do, in `x-stainless-retry-count`)."""

    def repeats(self, key: str | None, body_digest: str) -> bool:
        """Return whether this repeats the earlier call with this key and body.

        Raises `IdempotencyMismatch` if the keys are equal and the bodies are not.
        """
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
    """`max_tokens` 0 means as many as fit. `stop_token_ids` are added to the model's own stop ids."""
    given: frozenset[str] = frozenset()
    """The parameters of `pins.NAMES` that the caller set."""
    overridden: Overridden = field(default_factory=dict)
    """Parameters set by the caller that `Pins` replaced in `sampling`."""
    n: int = 1
    stream: bool = False
    prompt_ids: TokenIds | None = None
    """A prompt that the caller tokenized, int32 [tokens], instead of messages. Its reply is not parsed."""
    ignore_eos: bool = False
    """Whether sampling continues after the model's own stop ids."""
    media: Mapping[str, Media] = field(default_factory=dict)
    """Images sent with the messages, by hash."""
    calls: CallRule | None = None
    """What the engine has to hold the reply's tool calls to."""
    owner: str = ""
    """Name of the caller's API key. A session belongs to the key that created it."""
    begins_session: bool = True
    """Whether to create a missing session. False for a session's own key, which could revive a deleted session."""
    client_session: str | None = None
    """The session id that the harness sent in a header, if it differs from `session_id`."""
    client: Mapping[str, str] = field(default_factory=dict)
    """Session, agent and parent that the client's headers name; see `client_headers`."""
    attempt: Attempt | None = None
    """None marks a call that repeats no other."""
    span: MessagesSpan | None = None
    """Position of the messages in the body, to recognize a later body with the same beginning."""


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """First event of a call: the prompt is ready, nothing is sampled yet."""

    reply_id: str
    """Random id, 24 hex digits. A retry gets the same id."""
    created_at: float
    """Unix seconds."""
    prompt_ids: TokenIds
    """The whole prompt, int32 [tokens]."""
    replayed: bool = False
    """Whether the reply comes from the record, because the call was answered before."""
    engine_requests: tuple[str, ...] = ()
    """Ids of the engine's requests, one per choice."""
    sampling: SamplingParams | None = None
    """The request's sampling parameters after pins and defaults."""
    overridden: Overridden = field(default_factory=dict)
    """`TurnRequest.overridden`."""


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """Newly sampled tokens of one choice, with what they added to the reply."""

    choice: int
    sampled: SampleDelta
    reply: ReplyDelta


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A committed turn. `rest` is the end of the reply, held back until sampling ended."""

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
