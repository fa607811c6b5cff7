"""The ways of running the model against each other, against transformers used plainly, and against one row alone."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from embedded import (  # noqa: E402
    ENDLESS,
    GREEDY,
    KNOWN,
    PATHS,
    WARM,
    Log,
    Sampled,
    assert_declared,
    assert_recomputable,
    collect,
    load,
    prompt,
    recomputed,
    sample,
)
from forwards import Forwards  # noqa: E402
from tests.searching import examples  # noqa: E402

from tokentape.engines.base import SamplingParams  # noqa: E402
from tokentape.engines.regular import left_padded  # noqa: E402
from tokentape.engines.transformers import ForwardPath, TransformersEngine  # noqa: E402
from tokentape.errors import EngineContractError, EngineError  # noqa: E402
from tokentape.types import TokenIds  # noqa: E402

Engines = dict[ForwardPath, TransformersEngine]

TOLERANCE = 2e-5
"""Of logprobs in float32, between paths and against one row alone. Seen: up to 1e-5."""

SHAPED = SamplingParams(
    max_tokens=24,
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    seed=5,
)


@pytest.fixture(scope="module")
def logs() -> dict[ForwardPath, Log]:
    return {path: Log() for path in PATHS}


@pytest.fixture(scope="module")
def engines(model_dir: Path, logs: dict[ForwardPath, Log]) -> Iterator[Engines]:
    opened = {path: TransformersEngine.open(model_dir, path=path, on_finish=logs[path]) for path in PATHS}
    yield opened
    for engine in opened.values():
        asyncio.run(engine.close())


@pytest.fixture(params=["regular", pytest.param("paged", marks=pytest.mark.slow)])
def path(request: pytest.FixtureRequest) -> ForwardPath:
    return request.param  # type: ignore[no-any-return]


def sample_all(engine: TransformersEngine, prompts: list[TokenIds], params: SamplingParams) -> list[Sampled]:
    async def together() -> list[Sampled]:
        return await asyncio.gather(*(collect(engine, ids, params) for ids in prompts))

    return asyncio.run(together())


def greedy_alone(model: Any, prompt_ids: TokenIds, tokens: int) -> tuple[list[int], list[float]]:
    """Each token from a whole forward pass over one unpadded row: slow and obvious."""
    ids: list[int] = []
    logprobs: list[float] = []
    for _ in range(tokens):
        known = recomputed(model, prompt_ids, [*ids, 0])[-1][:KNOWN].log_softmax(-1)
        ids.append(int(known.argmax()))
        logprobs.append(float(known[ids[-1]]))
    return ids, logprobs


# The same ids on all paths


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6), tokens=st.integers(1, 6))
def test_ragged_batches_sample_what_each_row_samples_alone(
    engines: Engines, model: Any, lengths: list[int], tokens: int
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    alone = [greedy_alone(model, ids, tokens) for ids in prompts]
    for engine in engines.values():
        for got, (ids, logprobs) in zip(
            sample_all(engine, prompts, replace(GREEDY, max_tokens=tokens)), alone, strict=True
        ):
            assert got.ids == ids
            np.testing.assert_allclose(got.logprobs, logprobs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("params", [WARM, SHAPED])
def test_one_seed_samples_the_same_ids_on_every_path(engines: Engines, params: SamplingParams) -> None:
    prompts = [prompt(length) for length in (3, 50, 17, 80)]
    own = sample_all(engines["own"], prompts, params)
    for path in ("regular", "paged"):
        for expected, got in zip(own, sample_all(engines[path], prompts, params), strict=True):
            assert got.ids == expected.ids
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)


def test_a_plain_generate_on_the_same_batch_gives_the_same_ids(engines: Engines, model: Any) -> None:
    prompts = [prompt(length) for length in (3, 50, 17, 80)]
    ids, mask = left_padded([p.tolist() for p in prompts])
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=0,
        suppress_tokens=list(range(300, 320)),
    )
    for engine in engines.values():
        assert [got.ids for got in sample_all(engine, prompts, GREEDY)] == output[:, ids.shape[1] :].tolist()


@pytest.mark.filterwarnings("ignore:.*psutil")
def test_a_plain_generate_batch_gives_the_same_ids_and_logprobs(model_dir: Path, path: ForwardPath) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts = [prompt(length) for length in (3, 50, 17, 80)]
    outputs = load(model_dir).generate_batch(
        [p.tolist() for p in prompts],
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=32, max_batch_tokens=256, use_cuda_graph=False, return_logprobs=True
        ),
    )
    # Theirs are of the model's own distribution, which ids that the tokenizer does not know are a part of.
    engine = TransformersEngine.open(model_dir, path=path, logprobs_mode="raw_logprobs")
    for got, output in zip(sample_all(engine, prompts, GREEDY), outputs.values(), strict=True):
        # Ids that the tokenizer does not know are for us only to refuse; up to the first they are the same.
        theirs = output.generated_tokens
        same = next((i for i, token_id in enumerate(theirs) if token_id >= 300), len(theirs))
        assert same >= 1
        assert got.ids[:same] == theirs[:same]
        np.testing.assert_allclose(got.logprobs[:same], output.logprobs[:same], atol=TOLERANCE, rtol=0)
    asyncio.run(engine.close())


@pytest.mark.parametrize("path", PATHS)
def test_the_same_prompt_ids_reach_the_model_on_every_path(
    model_dir: Path, path: ForwardPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL #5239: paths that tokenize for themselves feed the model different ids."""
    from transformers import Qwen3ForCausalLM

    seen: list[tuple[list[int], list[int]]] = []
    original = Qwen3ForCausalLM.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids, positions = kwargs["input_ids"], kwargs["position_ids"]
        if "cache" in kwargs:  # paged: the requests follow each other in one row
            lengths = kwargs["cu_seq_lens_q"].diff().tolist()
            rows = zip(ids[0].split(lengths), positions[0].split(lengths), strict=True)
        else:
            mask = kwargs.get("attention_mask")
            real = torch.ones_like(ids).bool() if mask is None else mask.bool()
            rows = ((ids[row][real[row]], positions[row][real[row]]) for row in range(len(ids)))
        seen.extend((row.tolist(), at.tolist()) for row, at in rows)
        return original(self, *args, **kwargs)

    # A new engine: nothing of the prompts is in a cache.
    engine = TransformersEngine.open(model_dir, path=path)
    monkeypatch.setattr(Qwen3ForCausalLM, "__call__", noted)
    prompts = [prompt(length) for length in (5, 31, 12)]
    sample_all(engine, prompts, replace(GREEDY, max_tokens=1))
    assert sorted(seen) == sorted((p.tolist(), list(range(len(p)))) for p in prompts)
    asyncio.run(engine.close())


def test_requests_that_come_and_go_sample_what_they_sample_alone(
    model_dir: Path, model: Any, path: ForwardPath, engines: Engines
) -> None:
    # Room for two or three of them at a time, so that pages are waited for and thrown out.
    engine = TransformersEngine.open(model_dir, path=path, max_batch=6, max_context=256, page_cache_tokens=256)
    rng = random.Random(0)

    def plan(n: int) -> tuple[TokenIds, SamplingParams]:
        ids = np.concatenate([prompt(rng.choice([32, 64]), seed=n % 2), prompt(rng.randrange(1, 40), seed=n)])
        params = SamplingParams(
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.0, 0.7]),
            top_k=rng.choice([0, 5]),
            seed=n,
            stop_token_ids=tuple(rng.sample(range(300), 10)) if n % 3 else (),
        )
        return ids, params

    plans = [plan(n) for n in range(30)]

    async def one(n: int) -> Sampled | None:
        await asyncio.sleep(n * 0.004)
        ids, params = plans[n]
        if n % 5:
            return await collect(engine, ids, params, stream=n % 2 == 0)
        async for _ in (deltas := engine.sample(ids, params, stream=True, request_id="gone")):
            await deltas.aclose()
        return None

    async def together() -> list[Sampled | None]:
        return await asyncio.gather(*map(one, range(30)))

    crowded = asyncio.run(together())
    asyncio.run(engine.close())
    for (ids, params), got in zip(plans, crowded, strict=True):
        if got is not None:
            expected = sample(engines["own"], ids, params)
            assert (got.ids, got.last.finish_reason) == (expected.ids, expected.last.finish_reason)
            assert_declared(model, ids, got, params, "processed_logprobs")


def test_the_next_turn_shares_the_pages_of_the_last(engines: Engines, model: Any, forwards: Forwards) -> None:
    engine = engines["paged"]
    first = sample(engine, prompt(50, seed=3), WARM)
    context = np.concatenate([prompt(50, seed=3), np.array(first.ids, dtype=np.int32), prompt(7)])
    forwards.clear()
    second = sample(engine, context, WARM)
    # 50 + 20 sampled + 7, of which four whole pages of 16 are known.
    assert forwards[0] == (1, 77 - 64)
    assert_recomputable(model, context, second)


# Each row its own


def test_rows_of_one_batch_end_each_in_its_own_way(engines: Engines, path: ForwardPath) -> None:
    engine = engines[path]
    free = [sample(engine, prompt(4 + n), WARM).ids for n in range(3)]
    plans = [
        replace(WARM, stop_token_ids=(free[0][6],)),
        replace(WARM, max_tokens=3),
        WARM,
    ]

    async def together() -> list[Sampled]:
        return await asyncio.gather(*(collect(engine, prompt(4 + n), plan) for n, plan in enumerate(plans)))

    stopped, cut, whole = asyncio.run(together())
    assert stopped.ids == free[0][: free[0].index(free[0][6]) + 1]
    assert (stopped.last.finish_reason, stopped.last.stop) == ("stop", free[0][6])
    assert (cut.ids, cut.last.finish_reason) == (free[1][:3], "length")
    assert (whole.ids, whole.last.finish_reason) == (free[2], "length")


def test_one_row_is_aborted_and_the_others_go_on(
    engines: Engines, logs: dict[ForwardPath, Log], path: ForwardPath
) -> None:
    engine = engines[path]
    expected = sample(engine, prompt(9), replace(WARM, max_tokens=60)).ids

    async def leave_one() -> tuple[Sampled, int]:
        other = asyncio.create_task(collect(engine, prompt(9), replace(WARM, max_tokens=60)))
        deltas = engine.sample(prompt(4), ENDLESS, stream=True, request_id="left")
        await anext(deltas)
        await deltas.aclose()
        left = await asyncio.to_thread(logs[path].wait, "left")
        assert left.finish_reason == "abort"
        return await other, len(left.token_ids)

    other, left = asyncio.run(leave_one())
    assert other.ids == expected
    assert left >= 1


def test_an_aborted_request_is_not_computed_any_more(
    engines: Engines, logs: dict[ForwardPath, Log], forwards: Forwards
) -> None:
    engine = engines["paged"]

    async def leave() -> Sampled:
        deltas = engine.sample(prompt(4), ENDLESS, stream=True, request_id="left")
        await anext(deltas)
        await deltas.aclose()
        await asyncio.to_thread(logs["paged"].wait, "left")
        forwards.clear()
        return await collect(engine, prompt(5), WARM)

    asyncio.run(leave())
    # One column per request and step. The step that was under way during the abort may end after it.
    begun = forwards.index((1, 5))
    assert begun <= 1
    assert forwards[begun + 1 :] == [(1, 1)] * 19


def test_a_call_that_waits_can_be_given_up(model_dir: Path, path: ForwardPath) -> None:
    log = Log()
    engine = TransformersEngine.open(model_dir, path=path, max_batch=1, on_finish=log)

    async def give_up() -> None:
        running = engine.sample(prompt(4), ENDLESS, stream=True, request_id="running")
        await anext(running)
        waiting = asyncio.create_task(collect(engine, prompt(5), WARM, request_id="waiting"))
        await asyncio.sleep(0)  # it runs until it waits for the engine
        waiting.cancel()
        await asyncio.wait([waiting])
        await running.aclose()

    asyncio.run(give_up())
    assert log.wait("running").finish_reason == "abort"
    assert log.wait("waiting").token_ids == ()
    asyncio.run(engine.close())


def test_close_ends_what_runs_with_abort_and_the_partial_ids(model_dir: Path, model: Any, path: ForwardPath) -> None:
    log = Log()
    engine = TransformersEngine.open(model_dir, path=path, max_batch=1, on_finish=log)

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
        wait = asyncio.create_task(collect(engine, prompt(5), ENDLESS, stream=False))
        await started.wait()
        await engine.close()
        return await run, await wait

    run, wait = asyncio.run(close_midway())
    assert run.last.finish_reason == wait.last.finish_reason == "abort"
    assert 0 < len(run.ids) < 4000
    assert wait.ids == []
    assert_recomputable(model, prompt(4), run)
    assert log.wait("running").token_ids == tuple(run.ids)


def test_what_the_model_folder_says_of_sampling_is_not_used(
    model_dir: Path, tmp_path: Path, engines: Engines, path: ForwardPath
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    defaults = {"repetition_penalty": 5.0, "do_sample": True, "top_k": 2, "eos_token_id": 7, "max_length": 9}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    engine = TransformersEngine.open(folder, path=path)
    params = replace(GREEDY, max_tokens=60)
    assert sample(engine, prompt(9), params).ids == sample(engines["own"], prompt(9), params).ids
    asyncio.run(engine.close())


# When the model fails, and new weights


def failing_at(call: int) -> Callable[..., Any]:
    from transformers import Qwen3ForCausalLM

    original = Qwen3ForCausalLM.__call__
    calls = iter(range(1000))

    def fail_later(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise MemoryError("no memory left")
        return original(self, *args, **kwargs)

    return fail_later


def test_a_failing_forward_pass_fails_its_requests(
    model_dir: Path, path: ForwardPath, model: Any, forwards: Forwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    engine = TransformersEngine.open(model_dir, path=path)

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3ForCausalLM, "__call__", failing_at(5))
        both = (collect(engine, prompt(length), WARM) for length in (5, 6))
        outcomes = asyncio.run(forwards.together(*both))
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert any("no memory left" in str(outcome) for outcome in outcomes)
    assert_recomputable(model, prompt(5), sample(engine, prompt(5), WARM))
    asyncio.run(engine.close())


def test_a_path_that_can_not_begin_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import continuous_api

    def full(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room for pages")

    monkeypatch.setattr(continuous_api, "PagedAttentionCache", full)
    with pytest.raises(EngineError, match="can't be run on this path"):
        TransformersEngine.open(model_dir, path="paged")


def test_logits_that_are_no_numbers_fail_their_request_alone(
    engines: Engines, path: ForwardPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokentape.engines import requests

    expected = sample(engines[path], prompt(6), WARM).ids
    original = requests.Sampler.step

    def spoilt(self: Any, batch: Any, logits: Any) -> Any:
        for row, request in enumerate(batch):
            if len(request.prompt_ids) == 5:
                logits[row] = float("nan")
        return original(self, batch, logits)

    async def two() -> tuple[Sampled | BaseException, ...]:
        return tuple(
            await asyncio.gather(
                collect(engines[path], prompt(5), WARM), collect(engines[path], prompt(6), WARM), return_exceptions=True
            )
        )

    with monkeypatch.context() as patch:
        patch.setattr(requests.Sampler, "step", spoilt)
        bad, good = asyncio.run(two())
    assert isinstance(bad, EngineContractError)
    assert isinstance(good, Sampled)
    assert good.ids == expected


def test_a_model_that_gives_other_logprobs_on_a_path_is_refused(
    model_dir: Path, path: ForwardPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    original = Qwen3ForCausalLM.__call__

    def blurred(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if kwargs.keys() != {"input_ids", "use_cache"}:  # not the reference
            output.logits = output.logits * 0.9
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "__call__", blurred)
    with pytest.raises(EngineError, match="other logprobs on this path"):
        TransformersEngine.open(model_dir, path=path)


def test_new_weights_take_over_in_the_middle_of_a_generate(model_dir: Path, make_model: Callable[..., Path]) -> None:
    other = make_model(seed=1)
    engine = TransformersEngine.open(model_dir, path="regular", weight_version="7")

    async def swap_midway() -> list[str | None]:
        versions = []
        deltas = engine.sample(prompt(4), ENDLESS, stream=True, request_id="swap")
        async for delta in deltas:
            versions.append(delta.weight_version)
            if len(versions) == 1:
                swapped = asyncio.create_task(engine.update_weights(other, "8"))
            if versions[-1] == "8":
                break
        await deltas.aclose()
        await swapped
        return versions

    versions = asyncio.run(swap_midway())
    assert versions == ["7"] * (len(versions) - 1) + ["8"]
    assert_recomputable(load(other), prompt(5), sample(engine, prompt(5), WARM))
    asyncio.run(engine.close())


def test_the_paged_path_takes_no_new_weights(engines: Engines, make_model: Callable[..., Path]) -> None:
    with pytest.raises(EngineError, match="keeps its weights"):
        asyncio.run(engines["paged"].update_weights(make_model(seed=1), "8"))
    assert sample(engines["paged"], prompt(4), WARM).last.weight_version == "0"
