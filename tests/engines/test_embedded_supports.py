"""Ids that truncation kept, compared with the slow reference over a plain forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from embedded import KNOWN, collect, prompt, reference, sample  # noqa: E402

from tokentape._supports import kept_ids, pack, too_many  # noqa: E402
from tokentape.engines._base import SamplingParams  # noqa: E402
from tokentape.engines._transformers import TransformersEngine  # noqa: E402
from tokentape.errors import InvalidRequest  # noqa: E402
from tokentape.training import renormalized_logprobs  # noqa: E402

TRUNCATED = [
    SamplingParams(max_tokens=20, temperature=0.7, top_p=0.8, seed=1, supports=1000),
    SamplingParams(max_tokens=20, temperature=1.3, top_k=7, top_p=0.9, repetition_penalty=1.0, seed=2, supports=1000),
    SamplingParams(max_tokens=20, temperature=1.0, min_p=0.2, seed=3, supports=1000),
]


@pytest.fixture(scope="module")
def engine(untrained_dir: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.open(untrained_dir)
    yield engine
    asyncio.run(engine.close())


@dataclass
class Drawn:
    """Sampled tokens with all their reported data."""

    logits: Any
    """Logits of a plain forward pass, float32 [tokens, rows]."""
    ids: list[int]
    logprobs: list[float]
    supports: Any
    params: SamplingParams

    def renormalized(self, supports: Any = None) -> Any:
        ids = torch.tensor(self.ids)
        rows = self.supports if supports is None else supports
        return renormalized_logprobs(self.logits, ids, rows, self.params.temperature)

    def errors(self, supports: Any = None) -> Any:
        return (self.renormalized(supports) - torch.tensor(self.logprobs)).abs()


def draw(engine: TransformersEngine, model: Any, params: SamplingParams, calls: int) -> Iterator[Drawn]:
    async def all_calls() -> list[Any]:
        prompts = [prompt(9, seed) for seed in range(calls)]
        return await asyncio.gather(
            *(
                collect(engine, messages, replace(params, seed=number), request_id=str(number))
                for number, messages in enumerate(prompts)
            )
        )

    for number, sampled in enumerate(asyncio.run(all_calls())):
        context = torch.tensor([[*prompt(9, number).tolist(), *sampled.ids]])
        supports = np.full(len(sampled.ids), b"", object)
        supports[:] = [support for delta in sampled.deltas for support in delta.supports]
        # Like the engine, without embedding rows that have no tokenizer id.
        yield Drawn(model(context).logits[0, 8:-1, :KNOWN], sampled.ids, sampled.logprobs, supports, params)


def assert_sampled_within(drawn: Drawn) -> None:
    for row, token_id, support in zip(drawn.logits, drawn.ids, drawn.supports, strict=True):
        kept = kept_ids(support)
        assert kept is not None
        assert token_id in kept
        expected = {i for i, share in enumerate(reference(row.double().tolist(), drawn.params)) if share}
        assert set(kept.tolist()) == expected
    assert drawn.errors().max() < 1e-5


@pytest.mark.parametrize("params", TRUNCATED)
def test_draws_stay_within_their_supports_and_have_their_declared_logprobs(
    engine: TransformersEngine, model: Any, params: SamplingParams
) -> None:
    for drawn in draw(engine, model, params, 6):
        assert_sampled_within(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("params", TRUNCATED)
def test_ten_thousand_draws_stay_within_their_supports(
    engine: TransformersEngine, model: Any, params: SamplingParams
) -> None:
    tokens = 0
    for drawn in draw(engine, model, replace(params, max_tokens=50), 70):
        assert_sampled_within(drawn)
        tokens += len(drawn.ids)
    assert tokens == 3500


def test_id_missing_from_a_support_is_detected(engine: TransformersEngine, model: Any) -> None:
    (drawn,) = draw(engine, model, TRUNCATED[1], 1)
    count = 0
    for at, (token_id, support) in enumerate(zip(drawn.ids, drawn.supports, strict=True)):
        kept = kept_ids(support)
        assert kept is not None
        for other in kept.tolist():
            damaged = drawn.supports.copy()
            damaged[at] = pack([token_id for token_id in kept.tolist() if token_id != other] or [other + 1], 1000)
            if other == token_id:
                with pytest.raises(InvalidRequest, match="not in its support"):
                    drawn.errors(damaged)
            else:
                assert drawn.errors(damaged)[at] > 1e-5
                count += 1
    assert count > 20


def test_shifted_supports_are_detected(engine: TransformersEngine, model: Any) -> None:
    (drawn,) = draw(engine, model, TRUNCATED[0], 1)
    with pytest.raises(InvalidRequest, match="same tokens"):
        drawn.errors(np.roll(drawn.supports, 1))


def test_gradients_reach_only_the_kept_ids() -> None:
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    supports = np.array([pack([1, 5], 9), b""], object)
    renormalized_logprobs(logits, torch.tensor([5, 2]), supports, torch.tensor([0.5, 1.0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].nonzero().ravel().tolist() == [1, 5]
    assert logits.grad[1].all()
    expected = torch.log_softmax(logits[0, [1, 5]] / 0.5, -1)[1]
    logprobs = renormalized_logprobs(logits, torch.tensor([5, 2]), supports, 0.5)
    torch.testing.assert_close(logprobs[0], expected)


def test_no_support_without_truncation_and_too_large_supports_are_counted(engine: TransformersEngine) -> None:
    whole = sample(engine, prompt(9), replace(TRUNCATED[0], top_p=1.0))
    assert not any(delta.supports for delta in whole.deltas)
    greedy = sample(engine, prompt(9), replace(TRUNCATED[0], temperature=0.0))
    assert not any(delta.supports for delta in greedy.deltas)
    few = sample(engine, prompt(9), replace(TRUNCATED[1], supports=1))
    assert {too_many(support) for delta in few.deltas for support in delta.supports} <= {None, *range(2, 8)}
    assert any(too_many(support) for delta in few.deltas for support in delta.supports)
