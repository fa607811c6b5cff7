"""An engine made of a function."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.waiting import PATIENCE

from tokentape._supports import pack
from tokentape.engines import FunctionEngine, SampleDelta, SamplingParams, WeightSpan
from tokentape.engines._base import Payload
from tokentape.errors import (
    EngineContractError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    UnsupportedParameter,
)

PARAMS = SamplingParams(max_tokens=4, stop_token_ids=(2,))
WITH_SUPPORTS = replace(PARAMS, top_k=2, supports=64)
KEPT = pack([3, 5], 64)
PROMPT = np.array([5, 6], dtype=np.int32)


def engine_of(result: Any, **options: Any) -> FunctionEngine:
    async def function(prompt_ids: list[int], params: SamplingParams) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    return FunctionEngine(function, vocab_size=10, max_context=8, **options)


async def sampled(engine: FunctionEngine, params: SamplingParams = PARAMS) -> SampleDelta:
    (delta,) = [delta async for delta in engine.sample(PROMPT, params, stream=True, request_id="r")]
    return delta


@pytest.mark.parametrize(
    ("returned", "reason", "stop"),
    [
        (([3, 2], [-0.5, -0.25]), "stop", 2),
        (([3, 3, 3, 3], [-1.0] * 4), "length", None),
        (SampleDelta((3, 9), (-0.5, -0.25), "stop", weight_version="8"), "stop", 9),
        (SampleDelta((3,), (-0.5,), "abort"), "abort", None),
    ],
)
def test_completion_ends_by_its_ids_or_as_the_function_reports(returned: Any, reason: str, stop: int | None) -> None:
    delta = asyncio.run(sampled(engine_of(returned)))
    assert (delta.finish_reason, delta.stop) == (reason, stop)
    expected_delta = returned if isinstance(returned, SampleDelta) else SampleDelta(*map(tuple, returned))
    assert (delta.token_ids, delta.logprobs) == (expected_delta.token_ids, expected_delta.logprobs)
    assert delta.weight_version == expected_delta.weight_version


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (([3, 3], [-0.5, -0.5]), "without a stop id at the end"),
        (([3, 2], [-0.5]), "1 log-probabilities for 2 ids"),
        (([11, 2], [-0.5, -0.5]), "the vocabulary has ids 0 to 9"),
        (([3, 2], [-0.5, float("nan")]), "no usable log-probability"),
        (([3, 2], [-0.5, 0.5]), "logits instead of log-probabilities"),
        (([3] * 5, [-1.0] * 5), "expected at most 4"),
        (SampleDelta((3,), (-0.5,)), "expected stop, length or abort"),
        (SampleDelta((3, 9), (-0.5, -0.5), "stop", 4), "stopped without a requested stop"),
        (SampleDelta((3,), (-0.5,), "abort", weight_spans=(WeightSpan("1", 0, 2),)), "do not cover the 1 tokens"),
        (SampleDelta((3,), (-0.5,), "abort", supports=(KEPT, KEPT)), "2 supports for 1 ids"),
        (SampleDelta((4,), (-0.5,), "abort", supports=(KEPT,)), "id 4, which is not among the 2 ids"),
        (SampleDelta((3,), (-0.5,), "abort", supports=(pack([3, 10], 64),)), "the vocabulary has ids 0 to 9"),
        (SampleDelta((3,), (-0.5,), "abort", supports=(b"kept",)), "a support that can't be read"),
    ],
)
def test_returned_values_that_can_not_be_recorded_are_refused(returned: Any, message: str) -> None:
    with pytest.raises(EngineContractError, match=message):
        asyncio.run(
            sampled(engine_of(returned, sampling=frozenset({"top_k", "supports", "stop_token_ids"})), WITH_SUPPORTS)
        )


def test_supports_and_payloads_are_passed_on_only_if_requested() -> None:
    spans = (WeightSpan("1", 0, 1), WeightSpan("2", 1, 2))
    rows = (Payload("routed_experts", 0, np.zeros((3, 2))),)
    returned = SampleDelta((3, 7), (-0.5, -0.5), "abort", weight_spans=spans, supports=(KEPT, b""), payloads=rows)
    engine = engine_of(returned, sampling=frozenset({"top_k", "supports", "payloads_from", "stop_token_ids"}))
    asked = asyncio.run(sampled(engine, replace(WITH_SUPPORTS, payloads_from=0)))
    assert (asked.supports, asked.weight_spans, asked.payloads) == ((KEPT, b""), spans, rows)
    unasked = asyncio.run(sampled(engine, replace(WITH_SUPPORTS, supports=0)))
    assert (unasked.supports, unasked.payloads) == ((), ())


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (TimeoutError("the secret prompt"), EngineTimeout),
        (ConnectionResetError("the secret prompt"), EngineUnavailable),
        (RuntimeError("the secret prompt"), EngineError),
    ],
)
def test_errors_are_engine_errors_without_text_of_the_function(raised: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        asyncio.run(sampled(engine_of(raised)))
    assert type(caught.value) is kind
    assert "secret" not in str(caught.value)


def test_parameters_that_the_function_does_not_honor_are_refused() -> None:
    with pytest.raises(UnsupportedParameter, match="function does not support min_p"):
        asyncio.run(sampled(engine_of(([2], [-0.5])), SamplingParams(max_tokens=4, min_p=0.1)))


def test_the_budget_ends_with_the_context() -> None:
    asked: list[int] = []

    async def function(prompt_ids: list[int], params: SamplingParams) -> Any:
        asked.append(params.max_tokens)
        return [3] * params.max_tokens, [-1.0] * params.max_tokens

    engine = FunctionEngine(function, vocab_size=10, max_context=4)
    assert asyncio.run(sampled(engine)).finish_reason == "length"
    assert asked == [2]
    with pytest.raises(InvalidRequest, match="context holds 4"):
        asyncio.run(anext(engine.sample(np.arange(4), PARAMS, stream=False, request_id="r")))


def in_thread(work: Callable[[], Awaitable[None]]) -> None:
    """Run an event loop in another thread, as a gateway does."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work())  # type: ignore[arg-type]
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_function_runs_and_is_canceled_in_the_engine_s_event_loop() -> None:
    async def main() -> None:
        loops: list[object] = []
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def function(prompt_ids: list[int], params: SamplingParams) -> Any:
            loops.append(asyncio.get_running_loop())
            began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        engine = FunctionEngine(function, vocab_size=10, max_context=8)
        gone = threading.Event()

        async def caller() -> None:
            async with aclosing(engine.sample(PROMPT, PARAMS, stream=False, request_id="r")) as deltas:
                task = asyncio.ensure_future(anext(deltas))
                await asyncio.to_thread(gone.wait, PATIENCE)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        thread = asyncio.create_task(asyncio.to_thread(in_thread, caller))
        await asyncio.wait_for(began.wait(), PATIENCE)
        gone.set()
        await asyncio.wait_for(cancelled.wait(), PATIENCE)
        await thread
        assert loops == [asyncio.get_running_loop()]

    asyncio.run(main())


def test_a_closed_engine_and_a_closed_loop_take_no_calls() -> None:
    async def make() -> FunctionEngine:
        return engine_of(([2], [-0.5]))

    with pytest.raises(EngineUnavailable, match=r"event loop .* is closed"):
        asyncio.run(sampled(asyncio.run(make())))

    async def closed() -> None:
        engine = await make()
        await engine.close()
        await sampled(engine)

    with pytest.raises(EngineUnavailable, match="the engine is closed"):
        asyncio.run(closed())


@pytest.mark.parametrize("result", [None, "ab", {"token_ids": [2]}, ([5.5, 2], [-0.1, -0.2]), ([5, 2],)])
def test_a_result_that_is_not_ids_and_logprobs_breaks_the_contract(result: Any) -> None:
    with pytest.raises(EngineContractError, match="expected a SampleDelta, or a tuple"):
        asyncio.run(anext(engine_of(result).sample(PROMPT, PARAMS, stream=False, request_id="r")))
