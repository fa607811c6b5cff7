"""What wire APIs and `Turns` say to each other: a request for a turn, and what happens while it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from tokentape.chat.parse import Reply, ReplyDelta
from tokentape.engines.base import SampleDelta, SamplingParams
from tokentape.gateway.known_prefix import Known, Place
from tokentape.gateway.pins import Overridden
from tokentape.types import Media, Message, TokenIds, Tool, Turn

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]
"""Why a reply ended, as clients are told."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What tells a retry from a new call."""

    body_digest: str
    """Hex SHA-256 of path and body."""
    key: str | None = None
    """The client's Idempotency-Key: two calls with the same one are the same call."""
    retried: bool = False
    """The client says that it sent this before (OpenAI's and Anthropic's do, in `x-stainless-retry-count`)."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a wire API asks for, whatever its dialect."""

    session_id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    template_kwargs: Mapping[str, object]
    sampling: SamplingParams
    """`max_tokens` 0 stands for as many as fit; `stop_token_ids` are added to those of the model."""
    given: frozenset[str] = frozenset()
    """Which of the parameters in `pins.NAMES` the caller named."""
    overridden: Overridden = field(default_factory=dict)
    """Which of these are not in `sampling` as the caller asked; see `Pins`."""
    n: int = 1
    stream: bool = False
    prompt_ids: TokenIds | None = None
    """A context that the caller made, int32 [tokens], in place of messages. The reply is not parsed then."""
    ignore_eos: bool = False
    """The model's own stop ids don't end the completion."""
    media: Mapping[str, Media] = field(default_factory=dict)
    """By hash the bytes of images that came with the messages."""
    owner: str = ""
    """Name of the API key that asks. A session belongs to the one that began it."""
    attempt: Attempt | None = None
    """Without, the call is new."""
    place: Place | None = None
    """Where the messages stand in the body, so that the next request may be known by them."""
    known: Known | None = None
    """The messages before `messages`, if they were not read."""
    read: Callable[[], tuple[Message, ...]] | None = None
    """Reads all messages; with `known`."""

    def whole(self) -> TurnRequest:
        """The request with all of its messages."""
        if self.read is None:
            return self
        return replace(self, messages=self.read(), known=None, read=None)


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The first event of a call: its context is made, nothing is sampled yet."""

    reply_id: str
    """Random, 24 hex digits. A retry is told the same."""
    created_at: float
    """Unix seconds."""
    prompt_ids: TokenIds
    """The whole context that is sent, int32 [tokens]."""
    replayed: bool = False
    """The call was answered before; this is the recorded reply again."""
    engine_requests: tuple[str, ...] = ()
    """Ids under which the engine is asked, one per choice."""
    sampling: SamplingParams | None = None
    """The request's, pins and defaults included; None of a call that is answered from elsewhere."""
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


TurnEvent: TypeAlias = TurnStarted | TurnDelta | TurnDone
"""A `TurnStarted`, then deltas, then a `TurnDone` for each choice."""
