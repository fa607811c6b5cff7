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
    """Sampling parameters of one call. Every field is always sent, so that a server's own defaults never apply."""

    max_tokens: int
    """Maximum number of sampled tokens, including the stop token."""
    temperature: float = 1.0
    """0 samples greedily."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends after any of these ids, which stays in the completion."""
    stop_strings: tuple[str, ...] = ()
    """Sampling ends with the token that completes any of these strings; that whole token stays in the completion."""
    top_logprobs: int = 0
    """Number of most likely ids to report for each token."""
    min_tokens: int = 0
    """Stop ids and stop strings are ignored until the completion has this many tokens."""
    json_schema: str | None = None
    """A JSON Schema, as JSON text, that the completion must follow; None for no constraint."""
    structural_tag: str | None = None
    """An XGrammar structural tag, as JSON text, that the completion must follow; None for no constraint."""
    adapter: str | None = None
    """Name of the engine's LoRA adapter to sample with; None for the base model."""
    priority: int = 0
    """Priority for the server's scheduler; 0 is its default. Servers differ in whether higher values come first."""
    cache_salt: str | None = None
    """Prompts share cached prefixes in the server only if they have the same salt."""
    session_id: str | None = None
    """Routes calls of one session to the engine that has their prefix cached. It does not change the result."""
    supports: int = 0
    """For each token, report the ids that truncation kept, or only how many if there are more than this; 0 is off."""
    payloads_from: int | None = None
    """Offset in prompt + completion of the first token to return per-token payloads for; None for no payloads."""


Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""The type of a local model's weights and computation."""

LogprobsMode: TypeAlias = Literal["raw_logprobs", "scaled_logprobs", "processed_logprobs"]
"""The modes that the embedded engine supports; see `EngineInfo.logprobs_mode`."""

SPECULATED = 64
"""The most tokens that a server with speculative decoding is expected to sample in a step."""

UNKNOWN_MODE = "unverified_logprobs"
"""The logprobs mode of an engine that does not report it."""

DISTRIBUTION = frozenset({
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop_token_ids", "stop_strings", "top_logprobs",
})  # fmt: skip
"""The `SamplingParams` fields that mean the same on all engines."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """A half-open range of completion tokens sampled with one version of the weights."""

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
    """Shape [tokens, ...]. The last sampled token may have no row, because no forward pass has read it."""


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """An image in a prompt."""

    start: int
    """Offset in the prompt of the image's first placeholder id."""
    length: int
    """Number of placeholder ids that stand for the image."""
    data: bytes
    """The file as received: PNG, JPEG, WebP or GIF."""


Images: TypeAlias = Sequence[PromptMedia]
"""The images of a prompt, in order."""


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """Newly sampled tokens. The last delta of a call, and only it, has a `finish_reason`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One logprob per id, in the engine's logprobs mode."""
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    """With finish_reason "stop": the stop id or stop string that matched."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each position the most likely (id, logprob) pairs, best first; empty unless requested."""
    weight_version: str | None = None
    """Version of the weights that sampled these ids, if the engine reports it. `weight_spans` may correct it."""
    weight_spans: tuple[WeightSpan, ...] = ()
    """In the last delta, if the engine reports versions: spans that cover the whole completion."""
    engine: str | None = None
    """`str(EngineInfo)` of the engine that sampled these ids, if there are several engines."""
    supports: tuple[bytes, ...] = ()
    """For each position the ids that truncation kept, as of `_supports.pack`; empty if not requested or reported."""
    payloads: tuple[Payload, ...] = ()
    """In the last delta: per-token arrays, if `SamplingParams.payloads_from` requests them."""
    cached_tokens: int | None = None
    """In the last delta: number of prompt tokens that the server had cached; None if it does not report it."""


PER_TOKEN = ("token_ids", "logprobs", "top_logprobs", "supports")
"""The fields of `SampleDelta` with an entry for each token."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The facts about an engine, read when it was opened."""

    name: str
    version: str
    model: str
    vocab_size: int
    """Ids greater than or equal to this are never sent and never accepted."""
    max_context: int
    """Maximum of prompt and completion together, in tokens."""
    logprobs_mode: str
    """The distribution that the log-probabilities belong to. `raw_logprobs`: the model's own, before temperature,
    penalties and truncation. `penalised_logprobs`: after penalties. `scaled_logprobs`: after penalties and
    temperature. `processed_logprobs`: after all of them, the distribution sampled from. Greedy sampling counts as
    temperature 1. `unverified_logprobs`: not known."""
    sampling: frozenset[str]
    """Names of the `SamplingParams` fields that the engine honors; others must keep their default."""
    capabilities: tuple[str, ...] = ()
    """Further facts for the record, such as the server route used, weight versions, routed experts, or
    the dtype of a local model that is not in float32."""
    media: frozenset[str] = frozenset()
    """The media types that prompts may contain: `image` or none. If it is not empty, the engine is a `MediaEngine`."""
    prompt_penalties: frozenset[str] = frozenset()
    """The penalties that count prompt tokens like completion tokens."""
    scoring_paths: tuple[str, ...] = ()
    """The server's paths that may return prompt logprobs, in the order to try them."""
    late_stops: int = 0
    """How many tokens may follow a stop string before the engine looks for it. Speculative decoding samples several
    tokens at a time; not all servers look for stops between them."""
    early_stops: bool = False
    """Whether stop strings end a completion before `min_tokens` too."""

    def __str__(self) -> str:
        return " ".join([self.name, self.version, self.logprobs_mode, *self.capabilities])


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts for each stage of a call to an engine, in seconds; each positive and finite.

    Raises:
        InvalidRequest: a value is not a positive, finite number.

    """

    connect: float = 10.0
    """Limit for opening a connection, and for a whole health check."""
    first_token: float = 600.0
    """Limit from sending a streamed request to its first event: queueing and prefill. Also used at start-up."""
    between_tokens: float = 300.0
    """Limit from one stream event to the next. It must exceed the time that the server pauses for a weight update."""
    total: float = 7200.0
    """Limit for the whole call. Only this limit and `connect` apply to calls that are not streamed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise InvalidRequest(f"timeout {field.name} must be a positive, finite number of seconds", field.name)


class Engine(Protocol):
    """A backend that samples from token ids.

    `sample` yields deltas until one has a finish_reason. Closing the iterator early (`aclose`, or cancelling the task)
    aborts the call in the backend. With `stream=False` it may yield a single delta. It raises `EngineError` or a
    subclass; deltas yielded before an error must not be committed.
    """

    @property
    def info(self) -> EngineInfo:
        """The facts about this engine."""
        ...

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`."""
        ...

    async def check(self) -> None:
        """Raise `EngineUnavailable` unless the engine can take a request now."""
        ...

    async def close(self) -> None:
        """Abort running calls and release all resources."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """An engine that can be asked to end a call early."""

    def interrupt(self, request_id: str) -> bool:
        """End a call with finish_reason `abort` and all its sampled tokens. Return False if that is not possible."""
        ...


@runtime_checkable
class KeepsSessions(Protocol):
    """An engine with a server that keeps a session's prefix cached until `close_session`."""

    def close_session(self, session_id: str) -> None:
        """Tell the server, in the background, that the session is over. A later call in the session reopens it."""
        ...


class MediaEngine(Engine, Protocol):
    """An engine that also accepts prompts with images."""

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str, media: Images = ()
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, in which placeholder ids stand for `media`, in order."""
        ...


def common_prefix(first: Sequence[int] | _Ids, second: Sequence[int] | _Ids) -> int:
    """Return the length of the longest common prefix."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:size]) != np.asarray(second[:size]))
    return int(differ[0]) if differ.size else size


UNVERIFIED = "model-unverified"
"""The capability of an engine that is not verified to serve the expected model; see `GuardedEngine`."""

OVER_SUPPORTS = "logprobs-over-supports"
"""The capability of an engine that normalizes logprobs over the supports in calls that report supports."""

BEFORE_GRAMMAR = "logprobs-before-grammar"
"""The capability of an engine that computes logprobs before it masks tokens that a grammar forbids."""

CAPTURED = "captured"
"""The last word of `SampleDelta.engine` if the server rendered the context."""


@dataclass(frozen=True, slots=True)
class StartedCompletion:
    """A running completion of messages that the server rendered."""

    prompt_ids: TokenIds
    """The context that the server rendered, int32 [tokens]."""
    deltas: AsyncGenerator[SampleDelta, None]
    """Deltas as from `Engine.sample`, each with an `engine` that ends with `CAPTURED`. `aclose` aborts the call."""


class ChatServer(Engine, Protocol):
    """An engine that also accepts messages, renders them itself, and returns the prompt ids."""

    async def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: dict[str, Any],
        params: SamplingParams,
        *,
        request_id: str,
    ) -> StartedCompletion:
        """Begin a completion, and return once the server has sent the prompt ids. Raises `EngineError`."""
        ...
