"""Rows of a batch of the embedded engine, compared with single rows and with each other."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from embedded import ENDLESS, GREEDY, KNOWN, WARM, Log, Sampled, collect, prompt, recomputed, sample  # noqa: E402
from tests.searching import examples  # noqa: E402

from tokentape.engines._transformers import TransformersEngine  # noqa: E402
from tokentape.types import TokenIds  # noqa: E402

TOLERANCE = 2e-5
"""Tolerance of logprobs in float32, compared with a single row. Observed: up to 1e-5."""


@pytest.fixture(scope="module")
def log() -> Log:
    return Log()


@pytest.fixture(scope="module")
def engine(untrained_dir: Path, log: Log) -> Iterator[TransformersEngine]:
    opened = TransformersEngine.open(untrained_dir, on_finish=log)
    yield opened
    asyncio.run(opened.close())


def sample_all(engine: TransformersEngine, prompts: list[TokenIds], params: Any) -> list[Sampled]:
    async def together() -> list[Sampled]:
        return await asyncio.gather(*(collect(engine, ids, params) for ids in prompts))

    return asyncio.run(together())


def greedy_alone(model: Any, prompt_ids: TokenIds, tokens: int) -> tuple[list[int], list[float]]:
    """Sample each token from a whole forward pass over an unpadded row: slow and simple."""
    ids: list[int] = []
    logprobs: list[float] = []
    for _ in range(tokens):
        known = recomputed(model, prompt_ids, [*ids, 0])[-1][:KNOWN].log_softmax(-1)
        ids.append(int(known.argmax()))
        logprobs.append(float(known[ids[-1]]))
    return ids, logprobs


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6), tokens=st.integers(1, 6))
def test_ragged_batches_sample_the_same_as_single_rows(
    engine: TransformersEngine, model: Any, lengths: list[int], tokens: int
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    alone = [greedy_alone(model, ids, tokens) for ids in prompts]
    sampled = sample_all(engine, prompts, replace(GREEDY, max_tokens=tokens))
    for got, (ids, logprobs) in zip(sampled, alone, strict=True):
        assert got.ids == ids
        np.testing.assert_allclose(got.logprobs, logprobs, atol=TOLERANCE, rtol=0)


def test_prompt_ids_reach_the_model_unchanged(untrained_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL #5239: paths that tokenize separately feed the model different ids."""
    from transformers import Qwen3ForCausalLM

    seen: list[tuple[list[int], list[int]]] = []
    original = Qwen3ForCausalLM.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids, positions, real = kwargs["input_ids"], kwargs["position_ids"], kwargs["attention_mask"].bool()
        rows = ((ids[row][real[row]], positions[row][real[row]]) for row in range(len(ids)))
        seen.extend((row.tolist(), at.tolist()) for row, at in rows)
        return original(self, *args, **kwargs)

    # A new engine: no prefix is cached.
    engine = TransformersEngine.open(untrained_dir)
    monkeypatch.setattr(Qwen3ForCausalLM, "__call__", noted)
    prompts = [prompt(length) for length in (5, 31, 12)]
    sample_all(engine, prompts, replace(GREEDY, max_tokens=1))
    assert sorted(seen) == sorted((p.tolist(), list(range(len(p)))) for p in prompts)
    asyncio.run(engine.close())


def test_rows_of_a_batch_end_independently(engine: TransformersEngine) -> None:
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


def test_aborted_row_does_not_affect_the_others(engine: TransformersEngine, log: Log) -> None:
    expected = sample(engine, prompt(9), replace(WARM, max_tokens=60)).ids

    async def leave_call() -> tuple[Sampled, int]:
        other = asyncio.create_task(collect(engine, prompt(9), replace(WARM, max_tokens=60)))
        deltas = engine.sample(prompt(4), ENDLESS, stream=True, request_id="left")
        await anext(deltas)
        await deltas.aclose()
        left = await asyncio.to_thread(log.wait, "left")
        assert left.finish_reason == "abort"
        return await other, len(left.token_ids)

    other, left = asyncio.run(leave_call())
    assert other.ids == expected
    assert left >= 1


def test_waiting_call_can_be_canceled(untrained_dir: Path) -> None:
    log = Log()
    engine = TransformersEngine.open(untrained_dir, max_batch=1, on_finish=log)

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


def test_sampling_defaults_of_the_model_folder_are_ignored(
    untrained_dir: Path, tmp_path: Path, engine: TransformersEngine
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(untrained_dir, folder)
    defaults = {"repetition_penalty": 5.0, "do_sample": True, "top_k": 2, "eos_token_id": 7, "max_length": 9}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    other = TransformersEngine.open(folder)
    params = replace(GREEDY, max_tokens=60)
    assert sample(other, prompt(9), params).ids == sample(engine, prompt(9), params).ids
    asyncio.run(other.close())
