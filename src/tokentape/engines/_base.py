"""The interface of engines: sample from exact ids, stream exact ids back."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from tokentape.errors import InvalidRequest
from tokentape.types import FinishReason, Message, TokenIds, Tool

_Ids: TypeAlias = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Every field is always sent, so that a server's own defaults never apply."""

    max_tokens: int
    """Upper bound of sampled tokens, the stop token included."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends after one of these; it stays in the ids."""
    stop_strings: tuple[str, ...] = ()
    """Sampling ends with the token that completes one of these; that whole token stays in the ids."""
    top_logprobs: int = 0
    """How many alternatives to report per token."""
    min_tokens: int = 0
    """No stop id or stop string ends the completion before it has so many tokens."""
    json_schema: str | None = None
    """A JSON Schema, as JSON text: tokens that would not follow it are ruled out. None rules out none."""
    adapter: str | None = None
    """Name of the server's LoRA adapter that samples; None is the model without any."""
    priority: int = 0
    """For the server's scheduler; 0 is its default. Which order it means depends on the server."""
    cache_salt: str | None = None
    """Prompts share cached prefixes in the server only under the same salt."""
    session_id: str | None = None
    """Calls of one session go to where their prefix is cached. It does not change what is sampled."""
    supports: int = 0
    """Report which ids truncation kept for each token, or only how many where it kept more than this; 0: don't."""
    payloads_from: int | None = None
    """Offset in prompt + completion from which on per-token payloads are returned; None asks for none."""


LogprobsMode: TypeAlias = Literal["raw_logprobs", "scaled_logprobs", "processed_logprobs"]
"""The modes that the embedded engine supports; see `EngineInfo.logprobs_mode`."""

UNKNOWN_MODE = "unverified_logprobs"
"""The mode if it is not known."""

DISTRIBUTION = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "stop_strings",
        "top_logprobs",
    }
)
"""The `SamplingParams` fields that define what is sampled and reported; the others depend on the server."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens of a completion, `start` to before `end`, that were sampled by one version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Payload:
    """A named array with one row per token, for example the experts that each token was routed to."""

    name: str
    start: int
    """Offset in prompt + completion of the token that the first row belongs to."""
    rows: npt.NDArray[Any]
    """Shape [tokens, ...]. There may be no row for the last sampled token, which no forward pass has seen."""


@dataclass(frozen=True, slots=True)
class PromptMedia:
    start: int
    """Offset in the prompt of its first placeholder id."""
    length: int
    """How many placeholder ids stand for it."""
    data: bytes
    """As received: PNG, JPEG, WebP or GIF."""


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """Newly sampled tokens. The last delta of a call, and only it, has a `finish_reason`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per id, in the engine's logprobs mode."""
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    """With finish_reason "stop": the stop id or stop string that matched."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per id the most likely (id, logprob) pairs, best first; empty unless asked for."""
    weight_version: str | None = None
    """Version of the weights that sampled these ids, if the engine reports it. `weight_spans` may correct it."""
    weight_spans: tuple[WeightSpan, ...] = ()
    """With the last delta, if the engine reports them: spans that cover the whole completion."""
    engine: str | None = None
    """Which of several engines sampled these ids; as `str(EngineInfo)`."""
    supports: tuple[bytes, ...] = ()
    """Per id which ids truncation kept, as `_supports.pack` has it; empty where none were asked for or reported."""
    payloads: tuple[Payload, ...] = ()
    """With the last delta: per-token arrays, if `SamplingParams.payloads_from` asked for them."""
    cached_tokens: int | None = None
    """With the last delta: how many tokens of the prompt the server had cached; None if it does not say."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and can do, found out when it was opened."""

    name: str
    version: str
    model: str
    vocab_size: int
    """Ids at or above this are never sent and never accepted."""
    max_context: int
    """Prompt and completion together, in tokens."""
    logprobs_mode: str
    """Which distribution the log-probabilities belong to. `raw_logprobs`: the model's own, before temperature,
    penalties and truncation. `penalised_logprobs`: after penalties. `scaled_logprobs`: after penalties and
    temperature. `processed_logprobs`: after all, the one sampled from. Greedy sampling counts as temperature 1.
    `unverified_logprobs`: not known."""
    sampling: frozenset[str]
    """Names of the `SamplingParams` fields that it honors; others must keep their default."""
    capabilities: tuple[str, ...] = ()
    """What else matters to the record: the route that is used, weight versions, routed experts."""
    media: frozenset[str] = frozenset()
    """Which media prompts may hold: `image`. If there are any, the engine is a `MediaEngine`."""
    prompt_penalties: frozenset[str] = frozenset()
    """Penalties that count a token of the prompt exactly as one of the completion."""

    def __str__(self) -> str:
        return " ".join([self.name, self.version, self.logprobs_mode, *self.capabilities])


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds allowed for each stage of a call to an engine; each positive and finite.

    Raises:
        InvalidRequest: a value is not a positive, finite number.

    """

    connect: float = 10.0
    """To open a connection, and for the whole of a health check."""
    first_token: float = 600.0
    """From sending a streamed request to its first event: queueing and prefill. Also for questions at start-up."""
    between_tokens: float = 300.0
    """From one event of a stream to the next. A server that pauses for a weight update is silent as long."""
    total: float = 7200.0
    """For the whole call. The only limit, besides `connect`, on a call that is not streamed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise InvalidRequest(f"timeout {field.name} must be a positive number of seconds", field.name)


class Engine(Protocol):
    """A backend that samples from token ids.

    `sample` yields deltas until one has a finish_reason. Closing the iterator early (`aclose`, or cancelling the task)
    aborts the call in the backend. `stream=False` allows, but does not force, a single delta. It raises `EngineError`
    or one of its kinds; what was yielded before must not be committed.
    """

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        ...

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`."""
        ...

    async def check(self) -> None:
        """Return if the engine can take a request now, else raise `EngineUnavailable`."""
        ...

    async def close(self) -> None:
        """Abort what runs and release what is held."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """An engine that can be asked to end a call early."""

    def interrupt(self, request_id: str) -> bool:
        """End a call with finish_reason `abort` and all that was sampled of it; False if it can't."""
        ...


class MediaEngine(Engine, Protocol):
    """An engine that also takes prompts with images."""

    def sample(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        *,
        stream: bool,
        request_id: str,
        media: Sequence[PromptMedia] = (),
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, whose placeholder ids stand for `media`, in order."""
        ...


def common_prefix(one: Sequence[int] | _Ids, other: Sequence[int] | _Ids) -> int:
    """Return how many ids the two begin with in common."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(differ[0]) if differ.size else size


UNVERIFIED = "model-unverified"
"""A capability of an engine that is not known to serve the expected model; see `GuardedEngine`."""

OVER_SUPPORTS = "logprobs-over-supports"
"""A capability of an engine that reports log-probabilities over the supports, where it reports these."""

BEFORE_GRAMMAR = "logprobs-before-grammar"
"""A capability of an engine that computes log-probabilities before it rules out what would not follow a grammar."""

CAPTURED = "captured"
"""The last word of `SampleDelta.engine` if the server rendered the context."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A completion that a server began from messages."""

    prompt_ids: TokenIds
    """The context that the server rendered, int32 [tokens]."""
    deltas: AsyncGenerator[SampleDelta, None]
    """As from `Engine.sample`, each with an `engine` that ends with `CAPTURED`. Closing it aborts the call."""


class ChatServer(Engine, Protocol):
    """An engine that also takes messages, renders them itself, and returns the ids."""

    async def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: dict[str, Any],
        params: SamplingParams,
        *,
        request_id: str,
    ) -> ChatCall:
        """Begin a completion; returns when the server has sent the prompt's ids. Raises as `sample`."""
        ...
