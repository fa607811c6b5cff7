"""Fine-tune with TRL on loss masks derived from the template, without {% generation %} marks in it.

    pip install "tokentape[demo,trl]"
    python examples/sft_masks.py

The example prints a conversation with the trained tokens in green (or in brackets without colors): everything that the
model has to sample, including the token that ends a turn, and nothing that template, user or tools write. Then it
prints the loss over those tokens, which goes down: the tiny model learns another ending for its answers.
"""

import argparse
import json
import tempfile
from itertools import groupby
from typing import Any

import numpy as np
from datasets import Dataset
from rich.console import Console
from rich.text import Text
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from tokentape.chat import Renderer
from tokentape.demo import MODEL
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Task, calculate, sample_tasks
from tokentape.training import Sample, sft_sample


def conversation(task: Task) -> list[dict[str, Any]]:
    """Return a conversation that computes a sum with the calculator."""
    question = task.questions[0]
    sum_ = question.operator.join(map(str, question.numbers))
    function = {"name": "calculator", "arguments": json.dumps({"expression": sum_})}
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question.prompt},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call0", "content": str(calculate(sum_))},
        {"role": "assistant", "content": f"It is {task.answer}, my friend."},
    ]


def print_mask(sample: Sample, renderer: Renderer) -> None:
    """Print the conversation with its trained parts in green, or in brackets without colors."""
    console = Console(highlight=False)
    shown = Text()
    for trained, group in groupby(zip(sample.loss_mask, sample.token_ids, strict=True), key=lambda pair: pair[0]):
        text = renderer.tokenizer.decode([int(token) for _, token in group])
        shown.append(text if console.color_system or not trained else f"[[{text}]]", "green" if trained else "")
    console.print(shown)


class Losses(TrainerCallback):
    """Print the loss of each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Print TRL's metrics."""
        if logs and "loss" in logs:
            print(f"step {state.global_step:2}   loss {logs['loss']:.4f}")


def main() -> None:
    """Train the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    renderer = Renderer.load(MODEL)
    setup = renderer.setup(TOOLS, date="2026-01-01")
    tasks = [task for task in sample_tasks(seed=1, n=800) if [len(one.numbers) for one in task.questions] == [2]]
    samples = [sft_sample(renderer, conversation(task), setup, name=str(n)) for n, task in enumerate(tasks)]
    print_mask(samples[0], renderer)
    rows = [
        # TRL uses the label -100 for tokens without loss.
        {"input_ids": one.token_ids.tolist(), "labels": np.where(one.loss_mask, one.token_ids, -100).tolist()}
        for one in samples
    ]
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            str(MODEL),
            args=SFTConfig(
                output,
                max_steps=steps,
                per_device_train_batch_size=8,
                learning_rate=5e-4,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Losses()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
