"""Helpers for tests of the embedded engine: sampling to the end, the engine's log, the slow reference."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import PATIENCE

torch = pytest.importorskip("torch")

from tokentape.engines._base import LogprobsMode, SampleDelta, SamplingParams  # noqa: E402
from tokentape.engines._transformers import FinishedSample, TransformersEngine  # noqa: E402
from tokentape.types import TokenIds  # noqa: E402

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
WARM = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
ENDLESS = SamplingParams(max_tokens=4000, temperature=1.0, seed=1)
"""Seconds of sampling: never over before a test has interrupted it."""


KNOWN = 300
"""Number of ids of the test tokenizer; the model has more rows."""


class Log:
    """The completions that the engine reports as finished."""

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
    """Return logprobs of a plain forward pass over context and completion, float32 [tokens, rows]."""
    context = torch.tensor([[*prompt_ids.tolist(), *ids]])
    return model(context).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)


def assert_recomputable(model: Any, prompt_ids: TokenIds, sampled: Sampled) -> None:
    """Check a completion without penalties and truncation, at temperature 1 or greedy."""
    plain = SamplingParams(max_tokens=1)
    assert_declared(model, prompt_ids, sampled, plain, "processed_logprobs")


def assert_declared(
    model: Any, prompt_ids: TokenIds, sampled: Sampled, params: SamplingParams, mode: LogprobsMode
) -> None:
    """Check every logprob with a plain forward pass and a simple computation of the distribution that `mode` names."""
    context = [*prompt_ids.tolist(), *sampled.ids]
    logits = model(torch.tensor([context])).logits[0, len(prompt_ids) - 1 : -1].double()
    for n, (token_id, logprob) in enumerate(zip(sampled.ids, sampled.logprobs, strict=True)):
        row = logits[n].tolist()
        if mode != "raw_logprobs":
            row = penalised(row[:KNOWN], prompt_ids.tolist(), sampled.ids[:n], params)
        if mode == "raw_logprobs" or params.temperature == 0:
            own = SamplingParams(max_tokens=1)
        elif mode == "scaled_logprobs":
            own = SamplingParams(max_tokens=1, temperature=params.temperature)
        else:
            own = params
        expected = math.log(reference(row, own)[token_id])
        assert abs(logprob - expected) <= 1e-4, (n, token_id, logprob, expected)


def penalised(logits: list[float], prompt: list[int], completion: list[int], params: SamplingParams) -> list[float]:
    """Return the logits after penalties, applied in a loop."""
    made = []
    for token_id, logit in enumerate(logits):
        if token_id in prompt + completion:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * completion.count(token_id)
        logit -= params.presence_penalty * (token_id in completion)
        made.append(logit)
    return made


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """Return normalized probabilities, computed in a simple and slow way."""
    weights = [math.exp(x / params.temperature) for x in logits]
    floor = params.min_p * max(weights)
    alive = {i: w for i, w in enumerate(weights) if w >= floor * (1 - 1e-12)}
    order = sorted(alive, key=lambda i: (-alive[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(alive[i] for i in order)
    nucleus: list[int] = []
    mass = 0.0
    for i in order:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        nucleus.append(i)
        mass += alive[i]
    return [weights[i] / mass if i in nucleus else 0.0 for i in range(len(weights))]
