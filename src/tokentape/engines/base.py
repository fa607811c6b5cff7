"""What the gateway asks of any engine: sample from exact ids, stream exact ids back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from tokentape.types import FinishReason, TokenIds


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
    """Version of the weights that sampled these ids, where the engine tells."""


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
    """`raw_logprobs`: of the model's own distribution, before temperature, penalties and truncation."""
    sampling: frozenset[str]
    """Names of the `SamplingParams` fields that it honours; others must keep their default."""

    def __str__(self) -> str:
        return f"{self.name} {self.version} {self.logprobs_mode}"


class Engine(Protocol):
    """A backend that samples from token ids.

    `sample` yields deltas until one has a finish_reason. Closing the iterator early (`aclose`, or cancelling
    the task) aborts the call in the backend. `stream=False` allows, but does not force, a single delta. It
    raises `EngineError` and its kinds; what it yielded before then must not be committed.
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
