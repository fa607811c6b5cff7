"""Measure what a model does after a turn that ended with a stop token that its template does not write.

    python benchmarks/stop_mismatch.py [--tasks 60] [--model MODEL]

Every reply's `<|im_end|>` is replaced by `<|endoftext|>`, as if the model had sampled it. Then the conversation
continues in one of the following ways, and the benchmark counts solved held-out tasks, with greedy sampling:

- `as sampled`: nothing is replaced; the model's normal result.
- `keep`: the sampled stop stands for the turn's end (`stop_mismatch="keep"`).
- `fork`: each turn is sampled on a new branch, where the template's own token ends the earlier turns
  (`stop_mismatch="fork"`).
- `closed`: the template's own token is appended after the sampled one.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Task, call_tool, is_solved, sample_tasks
from tokentape.engines._base import SamplingParams
from tokentape.engines._transformers import TransformersEngine
from tokentape.types import Message, Setup, TokenIds

WAYS = ("as sampled", "keep", "fork", "closed")
MAX_CALLS = 8


async def solve(engine: TransformersEngine, renderer: Renderer, setup: Setup, task: Task, way: str) -> bool:
    """Return whether the model solves the task when its turns end the given way."""
    end, other = (renderer.tokenizer.control(name) for name in ("<|im_end|>", "<|endoftext|>"))
    assert end is not None
    assert other is not None
    context: TokenIds | None = None
    completion = np.empty(0, np.int32)
    reply: Message = {}
    said: list[Message] = []
    sampled: dict[int, TokenIds] = {}
    new: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}]
    text = ""
    for prompt in task.prompts:
        new.append({"role": "user", "content": prompt})
        for _ in range(MAX_CALLS):
            said += new
            if context is None or way == "fork":
                context = renderer.render(said, setup, sampled=sampled, stop_mismatch="fork").ids
            else:
                added = renderer.bridge(completion, reply, new, setup).ids
                closing = [end.id] if way == "closed" else []
                context = np.concatenate([context, completion, np.array(closing, np.int32), added])
            ids = await sample(engine, context, sorted(renderer.stop_ids(setup)))
            parser = renderer.parser(setup)
            parser.feed(ids)
            reply, text = parser.finish()[1].message(), ""
            calls = reply.get("tool_calls", [])
            for n, call in enumerate(calls):
                call["id"] = f"call0000{n}"
            if way != "as sampled" and ids[-1] == end.id:
                ids[-1] = other.id
            completion = np.array(ids, np.int32)
            sampled[len(said)] = completion
            said.append(reply)
            new = [tool_message(task, call) for call in calls]
            if not calls:
                text = reply["content"] or ""
                break
    return is_solved(task, text)


def tool_message(task: Task, call: Any) -> Message:
    """Return the result of a tool."""
    function = call["function"]
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": call_tool(task, function["name"], function["arguments"]),
    }


async def sample(engine: TransformersEngine, context: TokenIds, stop_ids: Sequence[int]) -> list[int]:
    """Sample one greedy completion."""
    params = SamplingParams(max_tokens=160, temperature=0.0, stop_token_ids=tuple(stop_ids))
    deltas = engine.sample(context, params, stream=False, request_id="stop-mismatch")
    return [token_id async for delta in deltas for token_id in delta.token_ids]


async def main(model: Path, tasks: int) -> None:
    """Run all variants on the same tasks and print how many are solved."""
    renderer = Renderer.load(model)
    tools = tuple(TOOLS)
    setup = renderer.setup(tools, date="2026-01-01")
    engine = TransformersEngine.open(model, threads=1)
    drawn = [task for task in sample_tasks(11, 3 * tasks, "heldout") if len(task.questions) > 1][:tasks]
    for way in WAYS:
        solved = await asyncio.gather(*(solve(engine, renderer, setup, task, way) for task in drawn))
        print(f"{way:12} {sum(solved):4} of {len(drawn)} solved")
    await engine.close()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, default=MODEL)
    arguments.add_argument("--tasks", type=int, default=60)
    given = arguments.parse_args()
    asyncio.run(main(given.model, given.tasks))
