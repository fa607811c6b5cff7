"""The experiment's loss is the one of TRL's `GRPOTrainer`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.append(str(Path(__file__).parents[2] / "examples" / "token_paths"))

import torch
from paths import Given
from run import CORRECTIONS, Batch, loss_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokentape.demo import MODEL

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

REWARDS = [1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
GROUP = 3


@pytest.fixture(scope="module")
def samples() -> list[Given]:
    """Sequences of different lengths with several completions, and logprobs that make ratios from 0.1 to 20."""
    rng = np.random.default_rng(0)
    found = []
    for n in range(len(REWARDS)):
        ids = rng.integers(10, 3000, 14 + n).astype(np.int32)
        mask = np.zeros(len(ids), bool)
        mask[5:8] = mask[10:] = True
        found.append(Given(5, ids, mask, np.where(mask, rng.uniform(-16, -7, len(ids)), 0).astype(np.float32), 9))
    found[0].logprobs[6] = np.nan
    return found


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_loss_and_gradient_are_those_of_trl(samples: list[Given], correction: str, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class Corrected(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        """`GRPOTrainer` that corrects for the sampler's logprobs without vLLM."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self.use_vllm = False
            return super()._generate_and_score_completions(inputs)

    def rollouts(prompts: list[str], trainer: Corrected) -> dict[str, Any]:
        trainer.use_vllm = correction != "none"
        return {
            "prompt_ids": [sample.token_ids[: sample.prompt].tolist() for sample in samples],
            "completion_ids": [sample.token_ids[sample.prompt :].tolist() for sample in samples],
            "env_mask": [sample.loss_mask[sample.prompt :].astype(int).tolist() for sample in samples],
            "logprobs": [sample.logprobs[sample.prompt :].tolist() for sample in samples],
            "earned": REWARDS,
        }

    mode = {} if correction == "none" else {"vllm_importance_sampling_mode": correction}
    trainer = Corrected(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=lambda earned, **_: earned,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(samples),
            num_generations=GROUP,
            max_steps=1,
            beta=0.0,
            report_to=[],
            use_cpu=True,
            bf16=False,
            **mode,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["0", "1"]}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        rollout_func=rollouts,
    )
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([{"prompt": str(n // GROUP)} for n in range(len(samples))])
    if correction != "none":
        # Some ratios reach the limit, and some do not.
        ratios = inputs["importance_sampling_ratio"]
        limited = ratios == (0 if correction == "sequence_mask" else 3)
        assert limited.any()
        assert ((ratios > 0) & (ratios < 3)).any()
    expected = trainer._compute_loss(model, inputs)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    loss, _ = loss_of(model, Batch.of(samples, REWARDS, GROUP), correction)
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
