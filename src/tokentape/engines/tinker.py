"""A Tinker sampling client, passed in: the service samples, token ids go in and come out.

Nothing is imported before a call: the module needs the package `tinker` only where there is a client of it anyway.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from tokentape.engines.base import UNKNOWN_MODE, EngineInfo, SampleDelta, SamplingParams
from tokentape.engines.checks import refuse_params, refuse_prompt, refuse_unhonoured
from tokentape.engines.replies import Completion, alternatives
from tokentape.errors import EngineContractError, EngineError, EngineTimeout, EngineUnavailable, InvalidRequest
from tokentape.types import FinishReason, TokenIds

_HONOURED = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "stop_strings", "top_logprobs"}
)


class SamplingClient(Protocol):
    """What is used of `tinker.SamplingClient`."""

    def sample(
        self, prompt: Any, num_samples: int, sampling_params: Any, *, topk_sample_logprobs: int
    ) -> Awaitable[Any]:
        """Sample completions of a `tinker.ModelInput`; awaited, it gives a `tinker.SampleResponse`."""
        ...


class TinkerEngine:
    """A Tinker sampling client, sampled from through exact token ids.

        client = await service.create_sampling_client_async(base_model="Qwen/Qwen3-8B")
        engine = TinkerEngine(client, model="Qwen/Qwen3-8B", vocab_size=len(tokenizer), max_context=32768)

    The service does not stream and can't be told to abort: a completion is one delta, and leaving a call early only
    stops waiting for it. It takes stop ids or stop strings, not both.

    Args:
        client: samples; its weights never change, so they are named once by `weight_version`.
        model: its name, for the record.
        vocab_size: ids at or above it are never sent and never accepted.
        max_context: prompt and completion together, in tokens.
        weight_version: names the weights, for example the path they were saved under.

    """

    def __init__(
        self,
        client: SamplingClient,
        *,
        model: str,
        vocab_size: int,
        max_context: int,
        weight_version: str | None = None,
    ) -> None:
        self._client = client
        self._types: Any = import_module("tinker")
        self._weight_version = weight_version
        self._info = EngineInfo(
            name="tinker",
            version=self._types.__version__,
            model=model,
            vocab_size=vocab_size,
            max_context=max_context,
            # The service documents no choice, and there was none here to ask.
            logprobs_mode=UNKNOWN_MODE,
            sampling=_HONOURED,
        )

    @property
    def info(self) -> EngineInfo:
        """What was said when it was made."""
        return self._info

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, int32 [tokens], as a single delta; see `Engine`.

        `stream` and `request_id` change nothing.

        Raises:
            InvalidRequest: the prompt is empty, too long or holds an unknown id; a parameter is out of range;
                there are both stop ids and stop strings; or the service refused the request.
            UnsupportedParameter: the service would ignore a parameter that was set.
            EngineContractError: the reply lacks ids or log-probabilities, or they disagree.
            EngineUnavailable: the service can't be reached or takes no requests.
            EngineTimeout: it did not answer in time.
            EngineError: it failed.

        """
        refuse_prompt(prompt_ids, self._info)
        refuse_params(params)
        refuse_unhonoured(params, self._info)
        if params.stop_token_ids and params.stop_strings:
            raise InvalidRequest("Tinker takes stop ids or stop strings, not both", "stop_strings")
        budget = min(params.max_tokens, self._info.max_context - len(prompt_ids))
        prompt = self._types.ModelInput.from_ints(np.asarray(prompt_ids).tolist())
        # An empty list ends at nothing; None would end at the model's own end-of-sequence ids.
        stop: Sequence[int] | Sequence[str] = params.stop_token_ids or params.stop_strings
        asked = self._types.SamplingParams(
            max_tokens=budget,
            seed=params.seed,
            stop=list(stop),
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )
        try:
            response = await self._client.sample(prompt, 1, asked, topk_sample_logprobs=params.top_logprobs)
        except self._types.TinkerError as error:
            raise self._translated(error) from None
        if len(response.sequences) != 1:
            raise EngineContractError(f"the service returned {len(response.sequences)} sequences; asked for was one")
        yield self._delta(response.sequences[0], params, budget)

    async def check(self) -> None:
        """Return: a client has no cheap question to ask, and finds out on the next call."""

    async def close(self) -> None:
        """Do nothing: the client belongs to the caller."""

    def _delta(self, sequence: Any, params: SamplingParams, budget: int) -> SampleDelta:
        completion = Completion(params, self._info.vocab_size)
        ids: list[int] = sequence.tokens
        rows = (sequence.topk_logprobs or []) if params.top_logprobs else []
        top = [alternatives(row or [], params.top_logprobs) for row in rows]
        delta = completion.delta(ids, sequence.logprobs or [], top)
        reason: FinishReason
        match sequence.stop_reason:
            case "stop":
                reason = "stop"
            case "length":
                reason = "length"
                if len(ids) < budget:
                    raise EngineContractError(f"the service says length after {len(ids)} of {budget} tokens")
            case _:
                raise EngineContractError("the service stopped for an unknown reason; expected stop or length")
        return SampleDelta(
            delta.token_ids,
            delta.logprobs,
            finish_reason=reason,
            stop=completion.stop(reason, _matched(ids, params)),
            top_logprobs=delta.top_logprobs,
            weight_version=self._weight_version,
        )

    def _translated(self, error: Exception) -> EngineError | InvalidRequest:
        """The service's error as one of ours: its name, not its sentence, which may quote the prompt."""
        tinker, name = self._types, type(error).__name__
        if isinstance(error, tinker.BadRequestError | tinker.UnprocessableEntityError):
            return InvalidRequest(f"Tinker refuses the request ({name})")
        if isinstance(error, tinker.APITimeoutError):
            return EngineTimeout("Tinker did not answer in time")
        if isinstance(error, tinker.APIConnectionError | tinker.RateLimitError):
            return EngineUnavailable(f"Tinker can't be reached or takes no requests now ({name}); try again")
        return EngineError(f"Tinker failed ({name})")


def _matched(ids: Sequence[int], params: SamplingParams) -> int | str | None:
    """What it stopped at: the service tells that it did, not where.

    With several stop strings it can't be told which one it was without decoding; the first stands for them.
    """
    if params.stop_strings:
        return params.stop_strings[0]
    return ids[-1] if ids else None
