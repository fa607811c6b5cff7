from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from embedded import (  # noqa: E402
    ENDLESS,
    GREEDY,
    WARM,
    Log,
    Sampled,
    assert_declared,
    assert_recomputable,
    collect,
    load,
    prompt,
    sample,
)
from forwards import Forwards  # noqa: E402
from tests.searching import examples  # noqa: E402
from tests.waiting import until  # noqa: E402

from tokentape.engines._base import SampleDelta, SamplingParams  # noqa: E402
from tokentape.engines._transformers import FinishedSample, TransformersEngine  # noqa: E402
from tokentape.errors import EngineContractError, EngineError  # noqa: E402
from tokentape.types import TokenIds  # noqa: E402


@pytest.fixture(scope="module")
def log() -> Log:
    return Log()


@pytest.fixture(scope="module")
def engine(untrained_dir: Path, log: Log) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.open(untrained_dir, on_finish=log)
    yield engine
    asyncio.run(engine.close())


# Many at once


def test_concurrent_requests_share_their_forward_passes(engine: TransformersEngine, forwards: Forwards) -> None:
    calls = [collect(engine, prompt(40 + n), replace(WARM, max_tokens=30)) for n in range(16)]
    asyncio.run(forwards.together(*calls))
    # Each alone would take 30. All except the first, which began before the others, run together.
    assert len(forwards) < 2 * 30
    assert max(rows for rows, columns in forwards if columns == 1) == 16


def test_more_requests_than_rows_wait_their_turn(untrained_dir: Path, model: Any, forwards: Forwards) -> None:
    engine = TransformersEngine.open(untrained_dir, max_batch=3)
    forwards.clear()

    async def all_at_once() -> list[Sampled]:
        return await asyncio.gather(*(collect(engine, prompt(5 + n), WARM) for n in range(8)))

    for n, sampled in enumerate(asyncio.run(all_at_once())):
        assert_recomputable(model, prompt(5 + n), sampled)
    assert max(rows for rows, _ in forwards) == 3
    asyncio.run(engine.close())


def test_long_prompts_are_prefilled_a_few_at_a_time(engine: TransformersEngine, forwards: Forwards) -> None:
    async def all_at_once() -> None:
        await asyncio.gather(*(collect(engine, prompt(500, seed=n), WARM) for n in range(8)))

    asyncio.run(all_at_once())
    prefills = [(rows, columns) for rows, columns in forwards if columns > 1]
    assert sum(rows for rows, _ in prefills) == 8
    assert all(rows * columns <= 2048 for rows, columns in prefills)


@pytest.mark.parametrize("prefix_cache_bytes", [pytest.param(0, marks=pytest.mark.slow), 1 << 20])
def test_joining_and_leaving_requests_do_not_change_samples(
    untrained_dir: Path, model: Any, prefix_cache_bytes: int
) -> None:
    engine = TransformersEngine.open(untrained_dir, max_batch=6, prefix_cache_bytes=prefix_cache_bytes)
    rng = random.Random(0)

    def plan(n: int) -> tuple[TokenIds, SamplingParams]:
        # Few distinct prefixes, so that cached ones are used.
        ids = np.concatenate([prompt(rng.choice([30, 60]), seed=n % 2), prompt(rng.randrange(1, 40), seed=n)])
        params = SamplingParams(
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([0.9, 1.0]),
            top_k=rng.choice([0, 5]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            seed=n,
        )
        return ids, params

    plans = [plan(n) for n in range(examples(20, least=12))]

    async def run_plan(n: int) -> Sampled | None:
        await asyncio.sleep(n * 0.004)
        ids, params = plans[n]
        if n % 5:
            return await collect(engine, ids, params, stream=n % 2 == 0)
        async for _ in (deltas := engine.sample(ids, params, stream=True, request_id="gone")):
            await deltas.aclose()
        return None

    async def together() -> list[Sampled | None]:
        return await asyncio.gather(*map(run_plan, range(len(plans))))

    crowded = asyncio.run(together())
    asyncio.run(engine.close())
    alone = TransformersEngine.open(untrained_dir, prefix_cache_bytes=0)
    for (ids, params), got in zip(plans, crowded, strict=True):
        if got is not None:
            expected = sample(alone, ids, params)
            assert got.ids == expected.ids
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5, rtol=0)
            assert_declared(model, ids, got, params, "processed_logprobs")
    asyncio.run(alone.close())


def test_a_reader_that_stalls_does_not_hold_up_the_others(engine: TransformersEngine) -> None:
    async def both() -> tuple[Sampled, list[int]]:
        slow = engine.sample(prompt(4), replace(WARM, max_tokens=100), stream=True, request_id="slow")
        first = await anext(slow)
        quick = await collect(engine, prompt(6), replace(WARM, max_tokens=120))
        return quick, [*first.token_ids, *[i async for delta in slow for i in delta.token_ids]]

    quick, slow = asyncio.run(both())
    assert (len(quick.ids), len(slow)) == (120, 100)


def test_next_turn_of_a_session_computes_only_new_tokens(untrained_dir: Path, model: Any, forwards: Forwards) -> None:
    engine = TransformersEngine.open(untrained_dir)
    first = sample(engine, prompt(50), WARM)
    context = np.concatenate([prompt(50), np.array(first.ids, dtype=np.int32), prompt(7)])
    forwards.clear()
    second = sample(engine, context, WARM)
    # All except the last sampled id, which was never an input, and the 7 new ones.
    assert forwards[0] == (1, 8)
    assert_recomputable(model, context, second)
    asyncio.run(engine.close())


# Leaving early


def test_closing_the_iterator_takes_the_row_out_of_the_batch(
    engine: TransformersEngine, log: Log, forwards: Forwards
) -> None:
    async def leave() -> Sampled:
        deltas = engine.sample(prompt(4), ENDLESS, stream=True, request_id="left")
        await anext(deltas)
        await deltas.aclose()
        await asyncio.to_thread(log.wait, "left")
        forwards.clear()
        return await collect(engine, prompt(5), WARM)

    asyncio.run(leave())
    assert {rows for rows, _ in forwards} == {1}


@pytest.mark.parametrize("stream", [True, False])
def test_cancelling_the_task_aborts_the_call(
    engine: TransformersEngine, log: Log, forwards: Forwards, stream: bool
) -> None:
    async def cancel() -> FinishedSample:
        task = asyncio.create_task(collect(engine, prompt(4), ENDLESS, stream=stream, request_id="cancelled"))
        await asyncio.to_thread(until, lambda: len(forwards) > 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(log.wait, "cancelled")

    finished = asyncio.run(cancel())
    assert finished.finish_reason == "abort"
    assert len(finished.token_ids) < 4000


def test_close_ends_running_calls_with_abort_and_partial_ids(untrained_dir: Path, model: Any) -> None:
    log = Log()
    engine = TransformersEngine.open(untrained_dir, max_batch=1, on_finish=log)

    async def close_midway() -> tuple[Sampled, Sampled]:
        started = asyncio.Event()

        async def running() -> Sampled:
            deltas = []
            async for delta in engine.sample(prompt(4), ENDLESS, stream=True, request_id="running"):
                deltas.append(delta)
                started.set()
            ids = [i for delta in deltas for i in delta.token_ids]
            return Sampled(ids, [x for delta in deltas for x in delta.logprobs], deltas)

        run = asyncio.create_task(running())
        wait = asyncio.create_task(collect(engine, prompt(5), ENDLESS, stream=False, request_id="waiting"))
        await started.wait()
        await engine.close()
        return await run, await wait

    run, wait = asyncio.run(close_midway())
    assert run.last.finish_reason == wait.last.finish_reason == "abort"
    assert 0 < len(run.ids) < 4000
    assert wait.ids == []
    assert_recomputable(model, prompt(4), run)
    assert log.wait("running").token_ids == tuple(run.ids)


# When the model fails


def test_failing_forward_pass_fails_only_its_requests(
    engine: TransformersEngine, model: Any, forwards: Forwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    original = Qwen3ForCausalLM.__call__
    calls = iter(range(1000))

    def fail_later(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5:
            raise MemoryError("no memory left")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3ForCausalLM, "__call__", fail_later)
        both = (collect(engine, prompt(length), WARM) for length in (5, 6))
        outcomes = asyncio.run(forwards.together(*both))
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert "MemoryError" in str(outcomes[0])
    assert_recomputable(model, prompt(5), sample(engine, prompt(5), WARM))


@pytest.fixture(scope="module")
def nan_model_dir(make_model: Callable[..., Path]) -> Path:
    from safetensors.torch import load_file, save_file

    folder = make_model()
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_model_that_computes_nan_is_refused(nan_model_dir: Path) -> None:
    with pytest.raises(EngineError, match="nan"):
        TransformersEngine.open(nan_model_dir)


@pytest.mark.parametrize("params", [GREEDY, WARM])
def test_nan_logits_fail_the_request(untrained_dir: Path, nan_model_dir: Path, params: SamplingParams) -> None:
    engine = TransformersEngine.open(untrained_dir)
    asyncio.run(engine.update_weights(nan_model_dir, "broken"))
    with pytest.raises(EngineContractError, match="not finite"):
        sample(engine, prompt(3), params)
    asyncio.run(engine.close())


# New weights


def test_new_weights_apply_between_two_tokens(untrained_dir: Path, make_model: Callable[..., Path]) -> None:
    engine = TransformersEngine.open(untrained_dir, weight_version="7")

    async def swap_midway() -> list[str | None]:
        versions = []
        deltas = engine.sample(prompt(4), ENDLESS, stream=True, request_id="swap")
        async for delta in deltas:
            versions.append(delta.weight_version)
            if len(versions) == 1:
                swapped = asyncio.create_task(engine.update_weights(make_model(seed=1), "8"))
            if versions[-1] == "8":
                break
        await deltas.aclose()
        await swapped
        return versions

    versions = asyncio.run(swap_midway())
    assert versions == ["7"] * (len(versions) - 1) + ["8"]
    asyncio.run(engine.close())


def test_a_delta_never_mixes_weights_even_when_not_streaming(
    untrained_dir: Path, make_model: Callable[..., Path], forwards: Forwards
) -> None:
    engine = TransformersEngine.open(untrained_dir, weight_version="7")

    async def swap_midway() -> list[SampleDelta]:
        async def all_deltas() -> list[SampleDelta]:
            return [d async for d in engine.sample(prompt(4), ENDLESS, stream=False, request_id="swap")]

        sampling = asyncio.create_task(all_deltas())
        await asyncio.to_thread(until, lambda: len(forwards) > 3)
        await engine.update_weights(make_model(seed=1), "8")
        before = len(forwards)
        await asyncio.to_thread(until, lambda: len(forwards) > before + 3)
        await engine.close()
        return await sampling

    deltas = asyncio.run(swap_midway())
    assert [delta.weight_version for delta in deltas] == ["7", "8"]
    assert all(delta.token_ids for delta in deltas)


def test_results_of_old_weights_are_not_reused(untrained_dir: Path, make_model: Callable[..., Path]) -> None:
    other_dir = make_model(seed=1)
    engine = TransformersEngine.open(untrained_dir)

    async def swap_midway() -> None:
        await collect(engine, prompt(60), WARM)
        running = asyncio.create_task(collect(engine, prompt(70), replace(ENDLESS, max_tokens=200)))
        await engine.update_weights(other_dir, "8")
        await running

    asyncio.run(swap_midway())
    for length in (60, 70):
        assert_recomputable(load(other_dir), prompt(length), sample(engine, prompt(length), WARM))
    asyncio.run(engine.close())


def test_weights_of_another_shape_are_refused(
    engine: TransformersEngine, model: Any, make_model: Callable[..., Path]
) -> None:
    with pytest.raises(EngineError, match="different tensor names or shapes"):
        asyncio.run(engine.update_weights(make_model(intermediate_size=96), "8"))
    assert sample(engine, prompt(4), WARM).last.weight_version == "0"
