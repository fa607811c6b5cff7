"""An engine from a function: for a trainer's own rollout engine, called in its process through the handle it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from tokentape.engines._base import UNKNOWN_MODE, EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._checks import refuse_call
from tokentape.engines._replies import ReceivedTokens, finish_reason_of
from tokentape.errors import EngineContractError, EngineError, EngineTimeout, EngineUnavailable, TokentapeError
from tokentape.types import FinishReason, TokenIds

_log = logging.getLogger("tokentape.engines")

Sampled: TypeAlias = SampleDelta | tuple[Sequence[int], Sequence[float]]
"""A whole completion: its ids and one log-probability each, or with a finish reason and the version of the weights too.

Without a finish reason it has to end with one of the stop ids, or at the token budget."""

SampleFunction: TypeAlias = Callable[[list[int], SamplingParams], Awaitable[Sampled]]
"""Samples a continuation of prompt ids. When its caller leaves it is cancelled: abort what runs then."""


class FunctionEngine:
    """An engine that calls an async function for each completion.

    >>> async def sample(prompt_ids, params):                                           # doctest: +SKIP
    ...     reply = await handle.generate(prompt_ids, temperature=params.temperature, ...)
    ...     return reply.token_ids, reply.logprobs
    >>> engine = FunctionEngine(sample, vocab_size=151669, max_context=32768, logprobs_mode="processed_logprobs")
    ... # doctest: +SKIP

    The function runs in the event loop in which the engine is made, if there is one: handles belong to their loop.

    Args:
        function: what samples. Its exceptions become `EngineError`, `EngineTimeout` and `EngineUnavailable`.
        vocab_size: ids at or above it are refused, in prompts and in completions.
        max_context: prompt and completion together, in tokens. `SamplingParams.max_tokens` never exceeds it.
        logprobs_mode: which distribution the log-probabilities belong to, see `EngineInfo`. Trainers refuse what is
            not known, the default.
        sampling: the `SamplingParams` fields that the function honors; calls that set another one are refused.
        name: of the engine, for the record.
        version: of the engine, for the record.

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
                raise EngineUnavailable("the event loop that the engine's function belongs to is closed")
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))
        except (TokentapeError, asyncio.CancelledError):
            raise
        except Exception as error:
            # Its text may hold a prompt, so it goes to this process's log and not to callers.
            _log.warning("the engine's function raised", exc_info=error)
            kind = EngineError
            if isinstance(error, TimeoutError):
                kind = EngineTimeout
            elif isinstance(error, OSError):
                kind = EngineUnavailable
            raise kind(f"the engine's function raised {type(error).__name__}; see the log of its process") from error

    def _checked(self, sampled: Sampled, params: SamplingParams) -> SampleDelta:
        """Return what the function returned, with its end. Raises `EngineContractError` for what can't be recorded."""
        # An engine inside the function may end at ids of its own, and a function need not say at which.
        completion = ReceivedTokens(replace(params, supports=0), self.info.vocab_size, own_stops=True)
        if isinstance(sampled, SampleDelta):
            given, reason = sampled, finish_reason_of(sampled.finish_reason)
        else:
            ids, logprobs = ([*map(int, sampled[0])], [*map(float, sampled[1])])
            given, reason = SampleDelta(tuple(ids), tuple(logprobs)), _end_of(ids, params)
        tops = given.top_logprobs
        checked = completion.delta(given.token_ids, given.logprobs, tops)
        stop = given.stop if given.stop is not None else completion.last_id
        return replace(
            given,
            token_ids=checked.token_ids,
            logprobs=checked.logprobs,
            top_logprobs=checked.top_logprobs,
            supports=completion.check_supports(given.token_ids, given.supports) if params.supports else (),
            weight_spans=completion.spans(given.weight_spans) if given.weight_spans else (),
            payloads=given.payloads if params.payloads_from is not None else (),
            finish_reason=reason,
            stop=completion.stop(reason, stop),
        )

    async def check(self) -> None:
        """Return if calls can be taken, else raise `EngineUnavailable`."""
        if self._closed:
            raise EngineUnavailable("the engine is closed; make a new one")

    async def close(self) -> None:
        """Take no more calls. What the function calls stays as it is: it belongs to its owner."""
        self._closed = True


def _end_of(ids: Sequence[int], params: SamplingParams) -> FinishReason:
    if ids and ids[-1] in params.stop_token_ids:
        return "stop"
    if len(ids) >= params.max_tokens:
        return "length"
    raise EngineContractError(
        f"the engine's function returned {len(ids)} ids, fewer than max_tokens, and no stop id at their end; expected "
        "one, or a SampleDelta with a finish_reason"
    )
