"""Agent, gateway, samples, and steps of TRL's own trainer on the tiny model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from tests.training.trl_runs import Run, ShopAgent
from tokentape.chat._renderer import Renderer
from tokentape.client import ClientSession
from tokentape.training._logprob_check import LogprobLimits, check_logprobs
from tokentape.training._samples import Sample
from tokentape.training.exports import trl_rollouts
from tokentape.training.trl import GatewayRollouts, Row, serving
from tokentape.types import Trajectory

pytestmark = [
    # TRL warns that rollout functions are experimental, and transformers that TRL uses old names.
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def recorded(client: Any, run: Run, step: int) -> list[Trajectory]:
    return [trajectory for name in run.fields[step]["session_id"] for trajectory in client.session(name).trajectories()]


def test_the_trainer_s_logprobs_are_the_recorded_ones_at_every_step(model_dir: Path, tmp_path: Path) -> None:
    agent = ShopAgent()
    with serving(model_dir, threads=1) as policy:
        run = Run(model_dir, tmp_path, GatewayRollouts(policy.client, agent, sync=policy.sync), steps=2)
        before = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}
        run.trainer.train()
        for step in (0, 1):
            sessions = recorded(policy.client, run, step)
            # Sampled by the weights of that step, as recorded.
            assert {version for session in sessions for version in session.weight_versions} == {str(step)}
            report = check_logprobs(sessions, rows=run.rows(step))
            assert report.failures(LogprobLimits(mean=1e-4, delta=1e-3, k3=1e-6)) == []
            assert report.numeric.tokens > 100
        metadata = [session.metadata for session in policy.client.sessions()]
    # TRL repeats each prompt once per completion.
    assert sorted(row["task"] for row in agent.rows) == [0, 0, 0, 0, 1, 1, 1, 1]
    # The sessions that are compared with each other are those of a group.
    assert set(Counter(entry.pop("group") for entry in metadata).values()) == {2}
    assert metadata.count({"step": 1, "mode": "train", "prompt": 1}) == 2
    # TRL's own comparison, over the tokens that its loss is taken over.
    assert max(run.logged("sampling/sampling_logp_difference/max")) < 1e-3
    assert run.logged("sampling/importance_sampling_ratio/mean") == pytest.approx([1, 1], abs=1e-3)
    assert run.logged("rewards/recorded_reward/mean") == [0.5, 0.5]
    assert any(not torch.equal(before[name], value) for name, value in run.trainer.model.state_dict().items())


@pytest.mark.slow
def test_retokenized_batch_is_reported(model_dir: Path, renderer: Renderer, tmp_path: Path) -> None:
    tokenizer = renderer.tokenizer

    def retokenized(samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the batch of a trainer that keeps text: retokenized ids, logprobs truncated or padded to match."""
        fields = trl_rollouts(samples)
        for number, ids in enumerate(fields["completion_ids"]):
            again = tokenizer.encode_plain(tokenizer.decode(ids))
            for name in ("logprobs", "env_mask"):
                fields[name][number] = [*fields[name][number], *[0] * len(again)][: len(again)]
            fields["completion_ids"][number] = again
        return fields

    with serving(model_dir, threads=1) as policy:
        rollouts = GatewayRollouts(policy.client, ShopAgent(), sync=policy.sync, fields=retokenized)
        run = Run(model_dir, tmp_path, rollouts, steps=1)
        run.trainer.train()
        report = check_logprobs(recorded(policy.client, run, 0), rows=run.rows(0), tokenizer=tokenizer)
    assert {channel for channel, _ in report.failures(LogprobLimits())} == {"id drift"}
    assert min(run.logged("sampling/sampling_logp_difference/max")) > 0.1


@pytest.mark.slow
def test_outdated_engine_weights_are_reported(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, threads=1) as policy:
        run = Run(model_dir, tmp_path, GatewayRollouts(policy.client, ShopAgent()), steps=2)
        run.trainer.train()
        first, second = (check_logprobs(recorded(policy.client, run, step), rows=run.rows(step)) for step in (0, 1))
    assert first.failures(LogprobLimits(delta=1e-3)) == []
    # Nothing was pushed, so the second step's samples are of the first weights.
    assert second.numeric.max > 1e-2
    assert run.logged("sampling/sampling_logp_difference/max")[1] > 1e-2


async def single_turn(session: ClientSession, row: Row) -> float:
    """Every token after the prompt is sampled: RLOOTrainer has no mask for others."""
    number = next(SEEDS)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
        messages = [{"role": "user", "content": "Tell me."}]
        await openai.chat.completions.create(model="any", messages=messages, max_tokens=12, seed=number)  # type: ignore[arg-type]
    return float(number % 3)


SEEDS = itertools.count()


@pytest.mark.slow
def test_grpo_without_scales_has_the_gradient_of_trl_s_rloo(model_dir: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    rloo = RLOOTrainer(
        str(model_dir),
        lambda **_: [],
        args=RLOOConfig(str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[]),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
    )
    with serving(model_dir, threads=1) as policy:
        rollouts = GatewayRollouts(policy.client, single_turn, sync=policy.sync)
        settings = {"loss_type": "dr_grpo", "scale_rewards": "none", "max_grad_norm": 1e9, "weight_decay": 0.0}
        run = Run(model_dir, tmp_path, rollouts, 1, **settings)
        gradients: dict[str, torch.Tensor] = {}

        class Keep(TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
                gradients.update({name: value.grad.clone() for name, value in model.named_parameters()})

        run.trainer.add_callback(Keep())
        run.trainer.train()
    (batch,) = run.batches
    assert (batch["tool_mask"] * batch["completion_mask"] == batch["completion_mask"]).all()
    rows = {name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    rloo.model.train()
    rloo.compute_loss(
        rloo.model,
        {
            **rows,
            "old_logps": (batch["old_per_token_logps"] * batch["completion_mask"]).sum(1),
            # For a group of two: each reward minus the other, which is twice the distance from their mean.
            "advantages": 2 * batch["advantages"],
        },
    ).backward()
    factor = 2 * run.trainer.max_completion_length
    for name, value in rloo.model.named_parameters():
        torch.testing.assert_close(gradients[name] * factor, value.grad, atol=2e-4, rtol=1e-3)
    assert max(float(value.grad.abs().max()) for value in rloo.model.parameters()) > 0.01
