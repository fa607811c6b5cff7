"""SkyRL's generator over an inference client that keeps a ledger, called as SkyRL a9564572 calls it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training import live
from tokentape.demo import MODEL
from tokentape.engines import SamplingParams
from tokentape.errors import InvalidRequest
from tokentape.training.skyrl import AgentGenerator


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


@pytest.fixture
def engines() -> Iterator[live.SkyRlClient]:
    live.LEDGER.append(live.Ledger())
    yield live.SkyRlClient(live.LEDGER[-1])
    live.LEDGER.clear()


def config(**changes: Any) -> Any:
    sampling = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_generate_length=80)
    engine = SimpleNamespace(engine_init_kwargs={})
    arguments = {"sampling_params": sampling, "inference_engine": engine, "step_wise_trajectories": True}
    return SimpleNamespace(**arguments | changes)


def generated(client: Any, instances: dict[str, list[int]], cfg: Any = None, phase: str = "train", **batch: Any) -> Any:
    tokenizer, options = SimpleNamespace(name_or_path=str(MODEL)), {"stop_rule": batch.pop("stop_rule", None)}
    generator = AgentGenerator(live.sequential_agent(), cfg or config(), client, tokenizer, max_seq_len=500, **options)
    pairs = [(TrajectoryID(name, n), number) for name, own in instances.items() for n, number in enumerate(own)]
    inputs = {
        "prompts": [[{"role": "user", "content": "p"}] for _ in pairs],
        "env_classes": ["env"] * len(pairs),
        "env_extras": [{"number": number} for _, number in pairs],
        "trajectory_ids": [trajectory_id for trajectory_id, _ in pairs],
        "batch_metadata": SimpleNamespace(global_step=3, training_phase=phase),
        "sampling_params": None,
    }
    return asyncio.run(generator.generate(inputs | batch))


def test_skyrl_gets_the_tokens_that_its_engines_sampled(engines: live.SkyRlClient) -> None:
    output = generated(engines, {"a": [0, 1, 2], "b": [3, 4]})
    rows, rewards = live.skyrl_rows(output, engines.ledger)
    assert live.findings_of(live.golden_of(engines.ledger.calls, rewards), rows) == set()
    assert [(trajectory_id.instance_id, trajectory_id.repetition_id) for trajectory_id in output["trajectory_ids"]] == [
        *(("a", 0), ("a", 1), ("a", 1), ("a", 2), ("b", 0), ("b", 1))
    ]
    assert output["is_last_step"] == [True, False, True, True, True, True]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("failed", [5, 6, 7])
def test_a_prompt_with_a_failed_rollout_is_not_trained(engines: live.SkyRlClient, failed: int) -> None:
    output = generated(engines, {"a": [0, failed], "b": [3]})
    assert [sum(mask) > 0 for mask in output["loss_masks"]] == [False, False, True]
    assert output["stop_reasons"][:2] == ["error", "error"]
    assert output["rewards"][:2] == [0.0, 0.0]
    assert output["rollout_metrics"]["generate/num_masked_instances"] == 1


def test_evaluation_is_at_any_temperature_and_without_logprobs(engines: live.SkyRlClient) -> None:
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 40}
    output = generated(engines, {"a": [0]}, phase="eval", sampling_params=sampling)
    assert (output["rewards"], output["rollout_logprobs"]) == ([1.0], None)
    assert {request["temperature"] for request in engines.asked} == {0.0}


def test_branches_need_steps(engines: live.SkyRlClient) -> None:
    plain = config(step_wise_trajectories=False)
    output = generated(engines, {"a": [0]}, plain)
    assert (output["is_last_step"], output["trajectory_ids"], output["rewards"]) == (None, None, [1.0])
    with pytest.raises(InvalidRequest, match="step_wise_trajectories=true"):
        generated(engines, {"a": [1]}, plain)


def test_both_weight_versions_of_a_call_are_named(engines: live.SkyRlClient) -> None:
    plain = engines.generate

    async def generate(batch: Any, model: str | None = None) -> Any:
        engines.ledger.version += 1
        return await plain(batch)

    engines.generate = generate  # type: ignore[method-assign]
    generator = AgentGenerator(live.agent, config(), engines, SimpleNamespace(name_or_path=str(MODEL)), max_seq_len=500)
    delta = asyncio.run(generator._sample([1, 2], SamplingParams(max_tokens=20)))
    assert delta.weight_version == "7-8"


def test_raw_logprobs_are_refused_at_another_temperature(engines: live.SkyRlClient) -> None:
    cfg = config()
    cfg.sampling_params.temperature = 0.7
    with pytest.raises(InvalidRequest, match=r"sampled at 0\.7"):
        generated(engines, {"a": [0]}, cfg)
    cfg.inference_engine.engine_init_kwargs = {"logprobs_mode": "processed_logprobs"}
    assert generated(engines, {"a": [0]}, cfg)["rewards"] == [1.0]
