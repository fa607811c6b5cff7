"""An engine that calls an async function, for a trainer with its own rollout engine in the same process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import TypeAlias

import numpy as np

from tokentape.engines._base import SPECULATED, UNKNOWN_MODE, EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._checks import refuse_call
from tokentape.engines._replies import ReceivedTokens, finish_reason_of
from tokentape.errors import EngineContractError, EngineError, EngineTimeout, EngineUnavailable, TokentapeError
from tokentape.types import FinishReason, TokenIds

_log = logging.getLogger("tokentape.engines")

Sampled: TypeAlias = SampleDelta | tuple[Iterable[int], Iterable[float]]
"""A whole completion: ids and log-probabilities, or a `SampleDelta`, which also has a finish reason.

Ids without a finish reason must end with a stop id or fill `max_tokens`."""

SampleFunction: TypeAlias = Callable[[list[int], SamplingParams], Awaitable[Sampled]]
"""Samples a continuation of prompt ids. It is cancelled if the client disconnects, and should then abort its call."""


class FunctionEngine:
    """An engine that calls an async function for each completion.

    >>> async def sample(prompt_ids, params):                                           # doctest: +SKIP
    ...     reply = await handle.generate(prompt_ids, temperature=params.temperature, ...)
    ...     return reply.token_ids, reply.logprobs
    >>> engine = FunctionEngine(sample, vocab_size=151669, max_context=32768, logprobs_mode="processed_logprobs")
    ... # doctest: +SKIP

    If the engine is created in an event loop, the function always runs in that loop, because handles belong to a loop.

    Args:
        function: samples a completion. Its exceptions become `EngineError`, `EngineTimeout` and `EngineUnavailable`.
        vocab_size: greater or equal ids are refused, in prompts and in completions.
        max_context: maximum of prompt and completion together, in tokens. It limits `SamplingParams.max_tokens`.
        logprobs_mode: the distribution that the log-probabilities belong to, see `EngineInfo`. The default means that
            it is not known; trainers refuse such log-probabilities.
        sampling: the `SamplingParams` fields that the function honors; calls that set other fields are refused.
        name: the engine's name, for the record.
        version: the engine's version, for the record.

    """

    def __init__(
        self,
        function: SampleFunction,
        *,
        vocab_size: int,
        max_context: int,
        logprobs_mode: str = UNKNOWN_MODE,
        sampling: frozenset[str] = frozenset({"temperature", "top_p", "top_k", "stop_token_ids"}),
        name: str = "function",
        version: str = "1",
    ) -> None:
        self._function = function
        self._closed = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self.info = EngineInfo(
            name=name,
            version=version,
            model=name,
            vocab_size=vocab_size,
            max_context=max_context,
            logprobs_mode=logprobs_mode,
            sampling=sampling | {"max_tokens"},
            late_stops=SPECULATED,
        )

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, in one delta."""
        refuse_call(prompt_ids, params, self.info)
        await self.check()
        params = replace(params, max_tokens=min(params.max_tokens, self.info.max_context - len(prompt_ids)))
        sampled = await self._called(np.asarray(prompt_ids).tolist(), params)
        yield self._checked(sampled, params)

    async def _called(self, prompt_ids: list[int], params: SamplingParams) -> Sampled:
        async def call() -> Sampled:
            return await self._function(prompt_ids, params)

        try:
            if self._loop is None or self._loop is asyncio.get_running_loop():
                return await call()
            if self._loop.is_closed():
                raise EngineUnavailable(
                    "the event loop in which the function runs is closed; create the FunctionEngine in an open one"
                )
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))
        except (TokentapeError, asyncio.CancelledError):
            raise
        except Exception as error:
            # The error's text may contain a prompt, so it goes to this process's log and not to clients.
            _log.warning("the engine's function raised", exc_info=error)
            unavailable = EngineUnavailable if isinstance(error, OSError) else EngineError
            kind = EngineTimeout if isinstance(error, TimeoutError) else unavailable
            raise kind(f"the engine's function raised {type(error).__name__}; see the log of its process") from error

    def _checked(self, sampled: Sampled, params: SamplingParams) -> SampleDelta:
        """Return the function's completion as a delta with a finish reason.

        Raises `EngineContractError` if the completion can't be recorded.
        """
        # The engine that the function calls may have its own stop ids, which the function need not report.
        completion = ReceivedTokens(replace(params, supports=0), self.info.vocab_size, own_stops=True)
        if isinstance(sampled, SampleDelta):
            delta, reason = sampled, finish_reason_of(sampled.finish_reason)
        else:
            try:
                ids, logprobs = sampled
                # `index` refuses fractions, which `int` would cut off.
                delta = SampleDelta(tuple(map(index, ids)), tuple(map(float, logprobs)))
            except (TypeError, ValueError):
                raise EngineContractError(
                    f"the engine's function returned {type(sampled).__name__}; expected a SampleDelta, or a tuple of "
                    "whole numbers (ids) and numbers (logprobs)"
                ) from None
            reason = _end_of(delta.token_ids, params)
        checked = completion.delta(delta.token_ids, delta.logprobs, delta.top_logprobs)
        stop = delta.stop if delta.stop is not None else completion.last_id
        return replace(
            delta,
            token_ids=checked.token_ids,
            logprobs=checked.logprobs,
            top_logprobs=checked.top_logprobs,
            supports=completion.check_supports(delta.token_ids, delta.supports) if params.supports else (),
            weight_spans=completion.spans(delta.weight_spans) if delta.weight_spans else (),
            payloads=delta.payloads if params.payloads_from is not None else (),
            finish_reason=reason,
            stop=completion.stop(reason, stop),
        )

    async def check(self) -> None:
        """Raise `EngineUnavailable` if the engine is closed."""
        if self._closed:
            raise EngineUnavailable("the engine is closed; create a new one")

    async def close(self) -> None:
        """Refuse further calls. The inference engine that the function calls keeps running: the trainer owns it."""
        self._closed = True


def _end_of(ids: Sequence[int], params: SamplingParams) -> FinishReason:
    if ids and ids[-1] in params.stop_token_ids:
        return "stop"
    if len(ids) >= params.max_tokens:
        return "length"
    raise EngineContractError(
        f"the engine's function returned {len(ids)} ids, fewer than max_tokens, without a stop id at the end; return "
        "the stop id too, or a SampleDelta with a finish_reason"
    )
