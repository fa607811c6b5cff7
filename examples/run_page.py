"""Watch a GRPO run of TRL on the viewer's run page.

    pip install "tokentape[demo,trl]"
    python examples/run_page.py --data runs/grpo

Trains as grpo_trl.py does and keeps the sessions in `--data`. Besides the reward, each session gets the trainer's own
logprobs of its sampled tokens, so that the page shows the importance ratio. It prints the address of the page, which
follows the run; afterwards `tokentape view` shows the same. Needs minutes of CPU.

`--picture FILE` saves what the page shows after the last step; that needs playwright and Chromium.
"""

import argparse
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from datasets import Dataset
from grpo_trl import TASKS, Table, agent
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tokentape.client import Client
from tokentape.demo import MODEL
from tokentape.training.trl import (
    GatewayRollouts,
    carry_rows,
    correct_by_recorded_logprobs,
    recorded_reward,
    serving,
)


class RecordedTrainer(GRPOTrainer):
    """A trainer that gives its own logprobs to the sessions."""

    client: Client

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        rows = zip(self.sessions, scored["old_per_token_logps"], scored["prompt_mask"], strict=True)
        for session_id, logprobs, prompt_mask in rows:
            session = self.client.session(session_id)
            (one,) = session.trajectories()
            turns = zip(one.turns, one.completion_starts, one.completion_ends, strict=True)
            for turn, start, end in turns:
                begun = int(prompt_mask.sum())
                values = logprobs[start - begun : end - begun].float().cpu().numpy()
                session.annotate("trainer_logprobs", values, turn=int(turn))
        return scored


class Picture(TrainerCallback):
    """Save a picture of the page after the last step, while the gateway still serves it."""

    def __init__(self, url: str, path: Path) -> None:
        self.url, self.path = url, path

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take it in another thread: playwright has the event loop of its own."""
        with ThreadPoolExecutor(1) as apart:
            apart.submit(save_picture, self.url, self.path).result()


def save_picture(url: str, path: Path) -> None:
    """Save what the page shows once all sessions are measured."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900}, locale="en-US", timezone_id="UTC")
        page.goto(url)
        page.locator(".chart").first.wait_for(timeout=60_000)
        page.locator(".listhead", has_text="still missing").wait_for(state="detached", timeout=600_000)
        page.screenshot(path=path)
        browser.close()


def main() -> None:
    """Train the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=4, help="prompts per step")
    parser.add_argument("--picture", type=Path)
    chosen = parser.parse_args()
    with (
        serving(MODEL, directory=chosen.data, threads=1) as policy,
        tempfile.TemporaryDirectory() as output,
    ):
        rollouts = GatewayRollouts(policy.client, agent, sync=policy.sync)

        def kept(prompts: Any, trainer: Any) -> dict[str, Any]:
            given = rollouts(prompts, trainer)
            trainer.sessions = given["session_id"]
            return given

        trainer = RecordedTrainer(
            str(MODEL),
            recorded_reward,
            args=GRPOConfig(
                output,
                max_steps=chosen.steps,
                per_device_train_batch_size=8 * chosen.groups,
                num_generations=8,
                learning_rate=3e-4,
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
            rollout_func=kept,
            callbacks=[Table()],
        )
        trainer.client = policy.client
        page = f"{policy.client.base_url}/view#/run"
        print(f"The run: {page}", flush=True)
        if chosen.picture:
            trainer.add_callback(Picture(page, chosen.picture))
        trainer.remove_callback(PrinterCallback)
        correct_by_recorded_logprobs(trainer)
        trainer.train()


if __name__ == "__main__":
    main()
