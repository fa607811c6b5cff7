"""What the tests of TRL share: an agent with tasks, and a trainer that keeps the batches of its loss."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI

from tokentape.client import ClientSession
from tokentape.demo.agent import solve
from tokentape.demo.tasks import sample_tasks
from tokentape.training._logprob_check import TrainerRow
from tokentape.training.trl import Row, carry_rows, correct_by_recorded_logprobs, recorded_reward

TASKS = [task for task in sample_tasks(3, 40) if [len(question.numbers) for question in task.questions] == [2]][:4]


class ShopAgent:
    """Solves the task of its row. Rewards are 0 and 1 in turn, so that there is something to learn."""

    def __init__(self) -> None:
        self._runs: dict[int, itertools.count[int]] = defaultdict(itertools.count)
        self.rows: list[Row] = []

    async def __call__(self, session: ClientSession, row: Row) -> float:
        self.rows.append(row)
        number = row["task"]
        run = next(self._runs[number])
        seed = 1000 * number + 100 * run
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
            await solve(openai, TASKS[number], temperature=1.0, seed=seed, stream=False)
        return float(run % 2)


class Run:
    """A trainer that trained, and per step the batch as it had it."""

    def __init__(self, model_dir: Path, output: Path, rollouts: Callable[..., Any], steps: int, **config: Any) -> None:
        # Not at the top: the import takes seconds in every test run.
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.batches: list[dict[str, torch.Tensor]] = []
        self.fields: list[dict[str, Any]] = []
        settings: dict[str, Any] = {
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_steps": steps,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": [],
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "shuffle_dataset": False,
        }
        self.trainer = GRPOTrainer(
            str(model_dir),
            recorded_reward,
            args=GRPOConfig(str(output), **{**settings, **config}),
            train_dataset=carry_rows(Dataset.from_dict({"task": [0, 1]})),
            rollout_func=lambda prompts, trainer: self._kept(rollouts(prompts, trainer)),
        )
        correct_by_recorded_logprobs(self.trainer)
        loss = self.trainer.compute_loss

        def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self.batches.append(inputs)
            return loss(model, inputs, *args, **kwargs)

        self.trainer.compute_loss = compute_loss

    def _kept(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.fields.append(fields)
        return fields

    def logged(self, name: str) -> list[float]:
        return [float(line[name]) for line in self.trainer.state.log_history if name in line]

    def rows(self, step: int) -> dict[tuple[str, int], TrainerRow]:
        """Return the trainer's ids and logprobs of each trajectory of a step."""
        batch, fields = self.batches[step], self.fields[step]
        rows = {}
        # The batch is shuffled, the fields are not. The ids match rows with fields.
        pairs = zip(fields["prompt_ids"], fields["completion_ids"], strict=True)
        keys = {(*prompt, *completion): number for number, (prompt, completion) in enumerate(pairs)}
        for row in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            kept = batch["completion_mask"][row].bool()
            completion = batch["completion_ids"][row][kept].tolist()
            logprobs = batch["old_per_token_logps"][row][kept].numpy()
            number = keys[(*prompt, *completion)]
            rows[fields["session_id"][number], fields["leaf"][number]] = TrainerRow(
                np.array(prompt + completion, np.int32),
                np.concatenate([np.full(len(prompt), np.nan, np.float32), logprobs]),
            )
        return rows
