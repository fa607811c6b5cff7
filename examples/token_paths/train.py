"""Run GRPO with TRL on the tiny model, with a choice of token path and source of the old logprobs.

    python examples/token_paths/train.py --path recorded --seed 0 --out runs/token-paths

Writes one JSON line per step to OUT/PATH-OLD-SEED.jsonl, and one for held-out tasks at the start and at the end. A run
with a complete file is skipped; an interrupted run starts again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from datasets import Dataset
from measures import drift, importance, kl_to
from paths import PATHS, Rollout
from rollouts import Player, draw_tasks, playing
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import tokentape.demo
from tokentape.training import Forward, forward_pass

MODEL = Path(tokentape.demo.__file__).parent / "model"
OLD_LOGPROBS = ("recomputed", "sampler")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run."""

    path: str
    """A key of `PATHS`."""
    old: str = "recomputed"
    """Source of the old logprobs in importance ratios: `recomputed` by the trainer on its own sequence, which makes
    every on-policy ratio 1 whatever was sampled, or the `sampler`."""
    seed: int = 0
    steps: int = 20
    groups: int = 4
    """Tasks per step."""
    group_size: int = 8
    """Sessions per task."""
    learning_rate: float = 4e-4
    token_cost: float = 0.02
    """A session with only correct answers gets reward 1, minus this for each sampled token."""
    heldout: int = 64
    """Number of held-out tasks, each run once before and once after training."""

    @property
    def name(self) -> str:
        """Name of the run's file."""
        return f"{self.path}-{self.old}-{self.seed}"


@dataclass(slots=True)
class Rollouts:
    """TRL's rollout function: runs the tasks and returns the sequences of one path."""

    settings: Settings
    player: Player
    reference: Forward
    tasks: Sequence[Any]
    found: dict[str, float] = field(default_factory=dict)
    """Metrics of the latest batch that are known before the trainer sees it."""

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Run the tasks; prompts are task numbers."""
        step = trainer.state.global_step
        if step:
            self.player.load(trainer.model.named_parameters(), str(step))
        seeds = [(self.settings.seed * 1000 + step) * 1000 + n for n in range(len(prompts))]
        rollouts = self.player.play([self.tasks[int(prompt)] for prompt in prompts], seeds)
        given = [PATHS[self.settings.path](self.player.renderer, one) for one in rollouts]
        self.found = {
            **_of_policy(rollouts, self.settings, self.reference),
            **drift(given),
            "spelt_otherwise": _spelt_otherwise(self.player, rollouts),
        }
        return {
            "prompt_ids": [one.token_ids[: one.prompt].tolist() for one in given],
            "completion_ids": [one.token_ids[one.prompt :].tolist() for one in given],
            "env_mask": [one.loss_mask[one.prompt :].astype(int).tolist() for one in given],
            "logprobs": [one.logprobs[one.prompt :].tolist() for one in given],
            "earned": _rewards(rollouts, self.settings),
        }


class PathTrainer(GRPOTrainer):
    """`GRPOTrainer` that can use the sampler's logprobs as old ones, and measures how far its own differ from them."""

    old = "recomputed"
    found: Mapping[str, float] = {}
    """Result of `importance` for the latest batch."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.old == "sampler":
            output["old_per_token_logps"] = self._with_its_own(output)
        return output

    def _with_its_own(self, output: dict[str, Any]) -> torch.Tensor:
        """Return the sampler's logprobs, or the trainer's where this text was not sampled (ratio 1)."""
        old: torch.Tensor = output["sampling_per_token_logps"]
        if not old.isnan().any():
            return old
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        with torch.no_grad():
            own = self._get_per_token_logps_and_entropies(self.model, ids, mask, old.shape[1])[0]
        return torch.where(old.isnan(), own, old)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._own = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        # This runs before the step, so the weights are those that sampled.
        masks = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        samplers = inputs["sampling_per_token_logps"]
        self.found = importance(
            *([row[mask].numpy() for row, mask in zip(side, masks, strict=True)] for side in (self._own, samplers))
        )
        return loss


class Log(TrainerCallback):  # type: ignore[misc]
    """Write a line per step."""

    def __init__(self, lines: Any, rollouts: Rollouts) -> None:
        self.trainer: PathTrainer | None = None
        self._lines = lines
        self._rollouts = rollouts
        self._started = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Combine TRL's metrics with those of the rollouts and of the trainer's logprobs."""
        if "grad_norm" not in logs or self.trainer is None:
            return
        self.write(
            kind="step",
            step=state.global_step,
            **self._rollouts.found,
            **self.trainer.found,
            grad_norm=logs["grad_norm"],
            entropy=logs["entropy"],
            clipped=logs.get("clip_ratio/region_mean", 0.0),
        )

    def write(self, **values: Any) -> None:
        """Write a line immediately."""
        values["seconds"] = round(time.monotonic() - self._started, 1)
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()


def run(settings: Settings, file: Path) -> None:
    """Train once and write `file`."""
    torch.set_num_threads(1)
    tasks = draw_tasks(1_000 + settings.seed, settings.steps * settings.groups, "train")
    heldout = draw_tasks(2_000 + settings.seed, settings.heldout, "heldout")
    size = settings.groups * settings.group_size
    part = file.with_suffix(".part")
    with playing(MODEL) as player, open(part, "w", encoding="utf-8") as lines:
        rollouts = Rollouts(settings, player, forward_pass(MODEL, device="cpu"), tasks)
        log = Log(lines, rollouts)
        trainer = PathTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            reward_funcs=_earned,
            args=GRPOConfig(
                output_dir=str(file.parent / "trl"),
                per_device_train_batch_size=size,
                num_generations=settings.group_size,
                max_steps=settings.steps,
                learning_rate=settings.learning_rate,
                lr_scheduler_type="constant",
                beta=0.0,
                seed=settings.seed,
                shuffle_dataset=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(len(tasks))]}),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            rollout_func=rollouts,
            callbacks=[log],
        )
        trainer.old = settings.old
        log.trainer = trainer
        if settings.path == "recorded":
            # All arms start with the same policy, so one evaluation is enough.
            _examine(log, player, rollouts.reference, heldout, settings, "before")
        trainer.train()
        player.load(trainer.model.named_parameters(), "end")
        _examine(log, player, rollouts.reference, heldout, settings, "after")
    part.rename(file)


def _examine(log: Log, player: Player, reference: Forward, tasks: Sequence[Any], settings: Settings, kind: str) -> None:
    rollouts = player.play(tasks, [settings.seed * 10**8 + n for n in range(len(tasks))])
    log.write(
        kind=kind, **_of_policy(rollouts, settings, reference), spelt_otherwise=_spelt_otherwise(player, rollouts)
    )


def _spelt_otherwise(player: Player, rollouts: Sequence[Rollout]) -> float:
    """Return the share of sampled tokens that retokenizing would change, independent of the path."""
    return drift([PATHS["retokenized"](player.renderer, one) for one in rollouts])["other_ids"]


def _rewards(rollouts: Sequence[Rollout], settings: Settings) -> list[float]:
    return [one.right - settings.token_cost * one.sampled for one in rollouts]


def _of_policy(rollouts: Sequence[Rollout], settings: Settings, reference: Forward) -> dict[str, float]:
    return {
        "reward": float(np.mean(_rewards(rollouts, settings))),
        "right": float(np.mean([one.right for one in rollouts])),
        "kl": kl_to(reference, [one.trajectory for one in rollouts[::4]]),
        "sampled": float(np.mean([one.sampled for one in rollouts])),
        "calls": float(np.mean([len(one.path) for one in rollouts])),
    }


def _earned(earned: list[float], **_: Any) -> list[float]:
    return earned


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", choices=sorted(PATHS), required=True)
    parser.add_argument("--old", choices=OLD_LOGPROBS, default="recomputed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/token-paths"))
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    arguments.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(arguments.path, arguments.old, arguments.seed)
    file = arguments.out / f"{settings.name}.jsonl"
    if not file.exists():
        run(settings, file)


if __name__ == "__main__":
    main()
