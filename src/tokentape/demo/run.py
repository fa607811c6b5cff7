"""Run the demo: a gateway with the embedded engine, agents, and a report on what was recorded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tokentape.chat._renderer import Renderer
from tokentape.client import AsyncClient
from tokentape.demo import MODEL
from tokentape.demo.agent import solve
from tokentape.demo.findings import DemoReport, call_digest, examine, refuse_used
from tokentape.demo.tasks import Task, is_solved, sample_tasks
from tokentape.engines._base import Dtype
from tokentape.engines._transformers import FinishedSample, TransformersEngine
from tokentape.gateway._serving import serving


def run_demo(
    directory: Path,
    sessions: int,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
    *,
    device: str = "cpu",
    dtype: Dtype = "float32",
) -> DemoReport:
    """Run `sessions` agents at once on the shipped model, record them in `directory`, and return a report.

    Half of the agents sample greedily, the others at temperature 1. Every second agent streams. `progress` gets a line
    of text about each step. For `device` and `dtype` see `TransformersEngine.open`. Raises `Conflict` if the directory
    is not empty.
    """
    refuse_used(directory)
    progress("loading the model")
    renderer = Renderer.load(MODEL)
    log: list[FinishedSample] = []
    engine = TransformersEngine.open(MODEL, device=device, dtype=dtype, threads=1, on_finish=log.append)
    tasks = _tasks(sessions, seed)
    with serving(engine, MODEL, directory=directory, renderer=renderer, model_id="demo") as base_url:
        started = time.monotonic()
        asyncio.run(_run_all(base_url, tasks, seed, progress))
        seconds = time.monotonic() - started
    progress("examining the record")
    calls = [call_digest(call.prompt_ids, call.token_ids, call.logprobs) for call in log]
    return examine(directory, renderer, calls, seconds)


def _tasks(count: int, seed: int) -> list[Task]:
    drawn = count
    while True:
        tasks = [task for task in sample_tasks(seed, drawn, "heldout") if len(task.questions) > 1]
        if len(tasks) >= count:
            return tasks[:count]
        drawn *= 2


async def _run_all(base_url: str, tasks: list[Task], seed: int, progress: Callable[[str], None]) -> None:
    done = 0
    async with AsyncClient(base_url) as client:

        async def run(number: int, task: Task) -> None:
            nonlocal done
            mode: dict[str, Any] = {"temperature": 0.0 if 2 * number < len(tasks) else 1.0, "stream": number % 2 == 1}
            session = await client.session(f"demo-{number:02}", {"prompts": task.prompts, **mode})
            async with AsyncOpenAI(base_url=session.base_url, api_key="none") as openai:
                conversation = await solve(openai, task, seed=(seed * len(tasks) + number) * 1000, **mode)
            await session.reward(float(is_solved(task, conversation.final_text)))
            done += 1
            progress(f"{done} of {len(tasks)} sessions done")

        progress(f"running {len(tasks)} sessions")
        async with asyncio.TaskGroup() as group:
            for number, task in enumerate(tasks):
                group.create_task(run(number, task))
