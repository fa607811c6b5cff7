"""Run GRPO with TRL on exact ids: tool-calling agents talk to the model in training, on this machine's CPU.

    pip install "tokentape[demo,trl]"
    python examples/grpo_trl.py

The tiny model that ships with Tokentape computes sums with a calculator. It answers "That makes 20." or "The answer is
20."; this example rewards only the second form. Per step it prints the reward, which goes up; `kl` to the initial
model, which grows with it; and `ratio`, the trainer's probability of the sampled tokens divided by the recorded one.
The ratio stays at 1, because the trainer has exactly the sampled ids and the gateway samples with the current weights.
"""

import argparse
import os
import tempfile
import zlib
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from openai import AsyncOpenAI
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tokentape.client import ClientSession
from tokentape.demo import MODEL
from tokentape.demo.agent import solve
from tokentape.demo.tasks import is_solved, sample_tasks
from tokentape.training.trl import (
    GatewayRollouts,
    Row,
    carry_rows,
    correct_by_recorded_logprobs,
    recorded_reward,
    serving,
)

TASKS = [task for task in sample_tasks(seed=0, n=400) if len(task.questions) == 1 and task.questions[0].numbers]


async def agent(session: ClientSession, row: Row) -> float:
    """Run an agent, which needs only the session's base URL, and return the reward."""
    task = TASKS[row["task"]]
    seed = zlib.crc32(session.session_id.encode())
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
        talk = await solve(openai, task, temperature=1.0, seed=seed, stream=False)
    return float(is_solved(task, talk.final_text) and talk.final_text.startswith("The answer is"))


class Table(TrainerCallback):
    """Print a line per step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Print TRL's metrics."""
        if logs and "reward" in logs:
            shown = {
                "reward": logs["reward"],
                "kl": logs["kl"],
                "ratio": logs["sampling/importance_sampling_ratio/mean"],
                "logprobs apart by": logs["sampling/sampling_logp_difference/max"],
            }
            print(f"step {state.global_step:2}", *(f"{name} {value:9.6f}" for name, value in shown.items()), sep="   ")


def main() -> None:
    """Train the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    with serving(MODEL, threads=1) as policy, tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            str(MODEL),
            recorded_reward,
            args=GRPOConfig(
                output,
                max_steps=steps,
                per_device_train_batch_size=16,
                num_generations=8,
                learning_rate=5e-4,
                beta=0.001,
                temperature=1.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=carry_rows(Dataset.from_dict({"task": list(range(len(TASKS)))})),
            rollout_func=GatewayRollouts(policy.client, agent, sync=policy.sync),
            callbacks=[Table()],
        )
        trainer.remove_callback(PrinterCallback)
        correct_by_recorded_logprobs(trainer)
        trainer.train()


if __name__ == "__main__":
    main()
