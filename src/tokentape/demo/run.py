"""The whole loop on one machine: gateway, embedded engine, agents, record, file, and what is found in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI

from tokentape.chat._renderer import Renderer
from tokentape.client import Client
from tokentape.demo import MODEL
from tokentape.demo.agent import Conversation, solve
from tokentape.demo.findings import DemoReport, call_digest, examine, refuse_used
from tokentape.demo.tasks import Task, is_solved, sample_tasks
from tokentape.engines._transformers import FinishedSample, TransformersEngine
from tokentape.gateway._serving import serving


def run_demo(directory: Path, sessions: int, seed: int, progress: Callable[[str], None] = lambda _: None) -> DemoReport:
    """Run `sessions` agents at once on the shipped model, record them in `directory`, and look at the record.

    Half sample greedily, half at temperature 1; every second one streams. `progress` gets a line about each step.
    Raises `Conflict` if the directory holds anything.
    """
    refuse_used(directory)
    progress("loading the model")
    renderer = Renderer.load(MODEL)
    log: list[FinishedSample] = []
    engine = TransformersEngine.open(MODEL, threads=1, on_finish=log.append)
    runs = _plan(sessions, seed)
    with serving(engine, MODEL, directory=directory, renderer=renderer, model_id="demo") as base_url:
        started = time.monotonic()
        asyncio.run(_run_all(base_url, runs, progress))
        seconds = time.monotonic() - started
    progress("looking at the record")
    calls = [call_digest(call.prompt_ids, call.token_ids, call.logprobs) for call in log]
    return examine(directory, renderer, calls, seconds)


@dataclass(frozen=True, slots=True)
class _PlannedSession:
    session_id: str
    task: Task
    temperature: float
    seed: int
    stream: bool


def _plan(sessions: int, seed: int) -> list[_PlannedSession]:
    return [
        _PlannedSession(
            session_id=f"demo-{number:02}",
            task=task,
            temperature=0.0 if 2 * number < sessions else 1.0,
            seed=(seed * sessions + number) * 1000,
            stream=number % 2 == 1,
        )
        for number, task in enumerate(_tasks(sessions, seed))
    ]


def _tasks(count: int, seed: int) -> list[Task]:
    """Tasks that the model has not seen, of more than one question each."""
    drawn = count
    while True:
        tasks = [task for task in sample_tasks(seed, drawn, "heldout") if len(task.questions) > 1]
        if len(tasks) >= count:
            return tasks[:count]
        drawn *= 2


async def _run_all(base_url: str, runs: list[_PlannedSession], progress: Callable[[str], None]) -> None:
    """Run all sessions at once, and reward each."""
    done = 0
    with Client(base_url) as client:

        async def run(one: _PlannedSession) -> None:
            nonlocal done
            metadata = {"prompts": one.task.prompts, "temperature": one.temperature, "stream": one.stream}
            session = await asyncio.to_thread(client.session, one.session_id, metadata)
            async with AsyncOpenAI(base_url=session.base_url, api_key="none") as openai:
                talk: Conversation = await solve(
                    openai, one.task, temperature=one.temperature, seed=one.seed, stream=one.stream
                )
            await asyncio.to_thread(session.reward, float(is_solved(one.task, talk.final_text)))
            done += 1
            progress(f"{done} of {len(runs)} sessions done")

        progress(f"running {len(runs)} sessions")
        async with asyncio.TaskGroup() as group:
            for one in runs:
                group.create_task(run(one))
