"""Experts that the embedded engine reports, compared with forward passes that route as reported."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from embedded import ENDLESS, Sampled, collect, load, prompt, sample  # noqa: E402
from routing import replayed, route_by_chance, routers, write_mixture  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from tokentape.engines._base import SamplingParams  # noqa: E402
from tokentape.engines._kv import chosen_experts, expert_layers  # noqa: E402
from tokentape.engines._transformers import TransformersEngine  # noqa: E402
from tokentape.errors import UnsupportedParameter  # noqa: E402
from tokentape.types import TokenIds  # noqa: E402

ROUTED = SamplingParams(max_tokens=12, temperature=1.0, seed=1, payloads_from=0)


@pytest.fixture(scope="module")
def mixture_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_mixture(tmp_path_factory.mktemp("mixture"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def engine(mixture_dir: Path) -> Iterator[TransformersEngine]:
    """An engine that routes each token with random noise."""
    engine = TransformersEngine.open(mixture_dir, logprobs_mode="raw_logprobs")
    route_by_chance(engine._model, seed=7)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def model(mixture_dir: Path) -> Any:
    """The same weights, without the noise."""
    return load(mixture_dir)


def experts(sampled: Sampled) -> Any:
    """Return the rows of a call that requested rows of all its tokens."""
    (payload,) = sampled.last.payloads
    assert (payload.name, payload.start) == ("routed_experts", 0)
    assert all(not delta.payloads for delta in sampled.deltas[:-1])
    return payload.rows


def apart(model: Any, prompt_ids: TokenIds, sampled: Sampled, rows: Any = None) -> float:
    """Return the largest difference of the engine's logprobs from a forward pass routed by `rows`."""
    own = replayed(model, [*prompt_ids.tolist(), *sampled.ids], rows)[len(prompt_ids) - 1 :]
    return float((own - torch.tensor(sampled.logprobs)).abs().max())


def test_only_routing_as_reported_reproduces_the_logprobs(engine: TransformersEngine, model: Any) -> None:
    sampled = sample(engine, prompt(9), ROUTED)
    rows = experts(sampled)
    assert rows.shape == (9 + len(sampled.ids) - 1, 2, 2)
    assert apart(model, prompt(9), sampled, rows) < 1e-5
    assert apart(model, prompt(9), sampled) > 1e-2
    assert apart(model, prompt(9), sampled, rows[:, ::-1].copy()) > 1e-2
    assert apart(model, prompt(9), sampled, np.roll(rows, 1, axis=0)) > 1e-2


def test_experts_of_scoring_in_another_thread_are_not_mixed_in(model: Any) -> None:
    ids = torch.arange(5)[None]
    with chosen_experts(expert_layers(model)) as experts:
        other = threading.Thread(target=model, args=(ids,))
        other.start()
        other.join()
        assert experts == []
        model(ids)
    assert [rows.shape for rows in experts] == [(5, 2)] * 2


def test_calls_in_a_shared_batch_have_separate_rows(engine: TransformersEngine, model: Any) -> None:
    prompts = [prompt(length) for length in (5, 30, 11, 2, 5)]

    async def all_calls() -> list[Sampled]:
        calls = (collect(engine, prompt_ids, ROUTED, request_id=str(n)) for n, prompt_ids in enumerate(prompts))
        return await asyncio.gather(*calls)

    for _ in range(2):  # the second time, all prompts are cached
        for prompt_ids, sampled in zip(prompts, asyncio.run(all_calls()), strict=True):
            assert apart(model, prompt_ids, sampled, experts(sampled)) < 1e-5


def test_later_turn_reports_the_tokens_not_yet_reported(engine: TransformersEngine, model: Any) -> None:
    first = sample(engine, prompt(9), ROUTED)
    context = np.array([*prompt(9).tolist(), *first.ids, 4, 5, 6], np.int32)
    start = len(context) - 4
    second = sample(engine, context, replace(ROUTED, payloads_from=start))
    (payload,) = second.last.payloads
    assert payload.start == start
    assert apart(model, context, second, np.concatenate([experts(first), payload.rows])) < 1e-5


def test_interrupted_call_has_the_rows_of_its_sampled_tokens(engine: TransformersEngine, model: Any) -> None:
    async def cut() -> Sampled:
        deltas = []
        async for delta in engine.sample(prompt(9), replace(ENDLESS, payloads_from=0), stream=True, request_id="cut"):
            deltas.append(delta)
            engine.interrupt("cut")
        return Sampled(
            [i for item in deltas for i in item.token_ids], [x for item in deltas for x in item.logprobs], deltas
        )

    sampled = asyncio.run(cut())
    assert sampled.last.finish_reason == "abort"
    assert len(experts(sampled)) >= 9 + len(sampled.ids) - 1
    assert apart(model, prompt(9), sampled, experts(sampled)) < 1e-5


def test_rows_continue_after_new_weights(engine: TransformersEngine, mixture_dir: Path, model: Any) -> None:
    asyncio.run(engine.push_weights(model.state_dict().items(), "1"))
    sampled = sample(engine, prompt(9), ROUTED)
    assert sampled.last.weight_version == "1"
    assert apart(model, prompt(9), sampled, experts(sampled)) < 1e-5


@pytest.mark.parametrize("kind", ["Mixtral", "Olmoe", pytest.param("Qwen2Moe", marks=pytest.mark.slow)])
def test_other_moe_models_report_the_choices_of_their_routers(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(write_mixture(tmp_path / "mixture", kind) / "tokenizer.json"))
    engine = TransformersEngine.open(tmp_path / "mixture")
    sampled = sample(engine, prompt(9), ROUTED)
    asyncio.run(engine.close())
    chosen: list[Any] = []
    model = load(tmp_path / "mixture")
    for router in routers(model):
        router.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    model(torch.tensor([[*prompt(9).tolist(), *sampled.ids[:-1]]]))
    assert np.array_equal(np.sort(experts(sampled)), np.sort(torch.stack(chosen, 1).numpy()))


def test_a_model_without_experts_refuses_to_report_any(untrained_dir: Path) -> None:
    engine = TransformersEngine.open(untrained_dir)
    assert expert_layers(engine._model) == []
    with pytest.raises(UnsupportedParameter, match="payloads_from"):
        sample(engine, prompt(9), ROUTED)
    asyncio.run(engine.close())
