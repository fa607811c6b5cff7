"""Export recorded sessions to the tensors of a verl `DataProto`, without installing verl.

    pip install "tokentape[demo,parquet]"
    python examples/export_to_verl.py

The example records four sessions of one task on the tiny model, exports them to Parquet, and reads them back as a
trainer does. It prints the shape of each tensor, and the ids, mask and logprobs of the first response next to their
text. If verl is installed, the call in the last line of the output creates the `DataProto`.
"""

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import torch
from openai import AsyncOpenAI

from tokentape import Renderer, assemble, read_trajectories
from tokentape.client import ClientSession
from tokentape.demo import MODEL
from tokentape.demo.agent import solve
from tokentape.demo.tasks import is_solved, sample_tasks
from tokentape.training import group_advantages
from tokentape.training.exports import verl_data_proto
from tokentape.training.trl import serving

TASK = next(task for task in sample_tasks(seed=3, n=40) if len(task.questions) == 1 and task.questions[0].items)


async def agent(session: ClientSession, seed: int) -> None:
    """Solve the task and report the reward to its session."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
        talk = await solve(openai, TASK, temperature=1.0, seed=1000 * seed, stream=False)
    session.reward(is_solved(TASK, talk.final_text) - 0.01 * talk.model_calls)


def main() -> None:
    """Record, export and print."""
    with serving(MODEL, threads=1) as policy, tempfile.TemporaryDirectory() as folder:
        for seed in range(4):
            asyncio.run(agent(policy.client.session(metadata={"task": TASK.prompts[0]}), seed))
        rollouts = Path(folder) / "rollouts.parquet"
        policy.client.take_snapshot().save(rollouts)
        made = assemble(read_trajectories(rollouts), group="task")
    print(made.report)
    renderer = Renderer.load(MODEL)
    arguments = verl_data_proto(group_advantages(made.samples), pad_id=0, vocab_size=renderer.tokenizer.vocab_size)
    tensors = {name: torch.from_numpy(values) for name, values in arguments["tensors"].items()}
    for name, tensor in tensors.items():
        print(f"{name:18} {tensor.dtype!s:14} {tuple(tensor.shape)}")
    first = {name: np.asarray(tensors[name][0]) for name in ("responses", "response_mask", "rollout_log_probs")}
    for token, trained, logprob in list(zip(*first.values(), strict=True))[:24]:
        print(f"{token:6} {trained} {logprob:8.4f}  {renderer.tokenizer.decode([int(token)])!r}")
    print("DataProto.from_dict(tensors=tensors, non_tensors=arguments['non_tensors'])")


if __name__ == "__main__":
    main()
