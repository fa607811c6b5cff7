"""Push weights of this process into the embedded engine. Tests of TRL's trainers check sampling with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.embedded import prompt

from tokentape.engines._base import SamplingParams
from tokentape.engines._loading import load_model
from tokentape.engines._transformers import TransformersEngine
from tokentape.errors import EngineError, EngineUnavailable
from tokentape.types import TokenIds

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def sampled(engine: TransformersEngine, prompt: TokenIds) -> tuple[list[int], list[float], set[str | None]]:
    async def run() -> Any:
        deltas = [delta async for delta in engine.sample(prompt, GREEDY, stream=False, request_id="a")]
        ids = [token for delta in deltas for token in delta.token_ids]
        return ids, [value for delta in deltas for value in delta.logprobs], {delta.weight_version for delta in deltas}

    result: tuple[list[int], list[float], set[str | None]] = asyncio.run(run())
    return result


def test_pushed_weights_sample_like_the_same_weights_from_a_folder(make_model: Callable[..., Path]) -> None:
    other = make_model(seed=1)
    opened = TransformersEngine.open(other)
    expected = sampled(opened, prompt(6))
    engine = TransformersEngine.open(make_model(seed=0))
    # Named as in a trainer's model: one of two tied weights is enough, and they arrive in sequence.
    weights = load_model(other, dtype="float32", device="cpu").named_parameters()
    asyncio.run(engine.push_weights(((name, value) for name, value in weights), "8"))
    ids, logprobs, versions = sampled(engine, prompt(6))
    assert ids == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-5)
    assert versions == {"8"}
    asyncio.run(engine.close())
    asyncio.run(opened.close())


def test_mismatched_weights_do_not_change_the_running_model(make_model: Callable[..., Path]) -> None:
    engine = TransformersEngine.open(make_model(seed=0))
    before = sampled(engine, prompt(6))
    name, value = next(load_model(make_model(seed=1), dtype="float32", device="cpu").named_parameters())
    for wrong in ([(name, value)], [(name, value), ("nowhere", torch.zeros(2))]):
        with pytest.raises(EngineError):
            asyncio.run(engine.push_weights(wrong, "8"))
    ids, logprobs, versions = sampled(engine, prompt(6))
    assert (ids, versions) == (before[0], {"0"})
    # The cached prompt may round differently.
    assert logprobs == pytest.approx(before[1], abs=1e-5)
    asyncio.run(engine.close())


def test_closed_engine_refuses_weights(make_model: Callable[..., Path]) -> None:
    engine = TransformersEngine.open(make_model(seed=0))
    asyncio.run(engine.close())
    with pytest.raises(EngineUnavailable):
        asyncio.run(engine.push_weights([], "8"))
