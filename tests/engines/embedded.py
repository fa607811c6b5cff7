"""What the tests of the embedded engine share: sampling to the end, the engine's log, the slow reference."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tests.waiting import PATIENCE

torch = pytest.importorskip("torch")

from tokentape.engines.base import SampleDelta, SamplingParams  # noqa: E402
from tokentape.engines.transformers import FinishedSample, ForwardPath, TransformersEngine  # noqa: E402
from tokentape.types import TokenIds  # noqa: E402

PATHS: tuple[ForwardPath, ...] = get_args(ForwardPath)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
WARM = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
ENDLESS = SamplingParams(max_tokens=4000, temperature=1.0, seed=1)
"""Seconds of sampling: never over before a test has interrupted it."""


class Log:
    """What the engine says it sampled."""

    def __init__(self) -> None:
        self.finished: dict[str, FinishedSample] = {}
        self._changed = threading.Condition()

    def __call__(self, sample: FinishedSample) -> None:
        with self._changed:
            self.finished[sample.request_id] = sample
            self._changed.notify_all()

    def wait(self, request_id: str) -> FinishedSample:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.finished, timeout=PATIENCE)
        return self.finished.pop(request_id)


@dataclass
class Sampled:
    ids: list[int]
    logprobs: list[float]
    deltas: list[SampleDelta]

    @property
    def last(self) -> SampleDelta:
        return self.deltas[-1]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def prompt(length: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed + 1000 * length).integers(0, 300, length, dtype=np.int32)


async def collect(
    engine: TransformersEngine,
    prompt_ids: TokenIds,
    params: SamplingParams,
    *,
    stream: bool = True,
    request_id: str = "test",
) -> Sampled:
    deltas = [delta async for delta in engine.sample(prompt_ids, params, stream=stream, request_id=request_id)]
    assert all(len(delta.token_ids) == len(delta.logprobs) for delta in deltas)
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return Sampled([i for delta in deltas for i in delta.token_ids], [x for d in deltas for x in d.logprobs], deltas)


def sample(engine: TransformersEngine, prompt_ids: TokenIds, params: SamplingParams, **kwargs: Any) -> Sampled:
    return asyncio.run(collect(engine, prompt_ids, params, **kwargs))


def recomputed(model: Any, prompt_ids: TokenIds, ids: list[int]) -> Any:
    """Logprobs that one plain forward pass over context and completion gives, float32 [tokens, rows]."""
    context = torch.tensor([[*prompt_ids.tolist(), *ids]])
    return model(context).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)


def assert_recomputable(model: Any, prompt_ids: TokenIds, sampled: Sampled) -> None:
    expected = recomputed(model, prompt_ids, sampled.ids)[range(len(sampled.ids)), sampled.ids]
    torch.testing.assert_close(torch.tensor(sampled.logprobs), expected, atol=1e-4, rtol=0)
