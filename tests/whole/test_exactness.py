"""The promise, checked from outside: agents on a socket, a real model, and its own log of what it sampled."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI

from tests.conftest import SharedEngine
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.client import Client
from tokentape.demo.agent import solve
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Task, sample_tasks
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Provenance, Trajectory

AT_ONCE = 32


async def talk(base_url: str, number: int, task: Task) -> None:
    """One session: greedy or at temperature 1, streamed or not; every fourth is cut short at each turn."""
    with Client(base_url) as client:
        session = client.session(f"session-{number}")
    async with AsyncOpenAI(base_url=session.base_url, api_key="none") as openai:
        if number % 4 == 3:
            await talk_cut_short(openai, task, number)
        else:
            temperature = float(number % 2)
            await solve(openai, task, temperature=temperature, seed=number, stream=number % 3 == 0)


async def talk_cut_short(openai: AsyncOpenAI, task: Task, number: int) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for turn, prompt in enumerate([*task.prompts, "go on", "and?"][:4]):
        messages.append({"role": "user", "content": prompt})
        reply = await openai.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=TOOLS,
            max_tokens=3 + (number + turn) % 9,
            seed=number,
            temperature=1.0,
        )
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))


def run_sessions(base_url: str, count: int) -> None:
    async def run() -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def run_task(number: int, task: Task) -> None:
            async with slots:
                await talk(base_url, number, task)

        async with asyncio.TaskGroup() as group:
            for number, task in enumerate(sample_tasks(7, count, "heldout")):
                group.create_task(run_task(number, task))

    asyncio.run(run())


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_every_context_is_its_parent_plus_completion_plus_bridge(
    gateway_url: str, turns: Turns, engine: SharedEngine, store: SqliteStore, count: int
) -> None:
    run_sessions(gateway_url, count)

    sampled = Counter(key(call.prompt_ids, call.token_ids, call.logprobs) for call in engine.finished)
    finish_reasons: Counter[str] = Counter()
    recorded: Counter[bytes] = Counter()
    for stored in store.iter_sessions():
        contexts: dict[int, list[int]] = {}
        for turn in stored.turns:
            before = [] if turn.parent is None else contexts[turn.parent]
            prompt = before + turn.added_ids.tolist()
            contexts[turn.seq] = prompt + turn.completion_ids.tolist()
            recorded[key(prompt, turn.completion_ids, turn.logprobs)] += 1
            finish_reasons[turn.finish_reason] += 1
            assert Provenance.SAMPLED not in turn.added_provenance
    assert len(list(store.sessions(limit=1000))) == count
    assert recorded == sampled
    assert finish_reasons["length"] > 0
    assert finish_reasons["stop"] > 0


def key(prompt: Any, ids: Any, logprobs: Any) -> bytes:
    return b"|".join([ints(prompt), ints(ids), np.asarray(logprobs, np.float32).tobytes()])


def ints(values: Any) -> bytes:
    return np.asarray(values, np.int32).tobytes()


@pytest.mark.slow
def test_recorded_logprobs_are_those_of_a_forward_pass(
    gateway_url: str, model_dir: Any, renderer: Renderer, store: SqliteStore
) -> None:
    """What a trainer checks first: its own logprobs on the recorded ids against the recorded ones."""
    run_sessions(gateway_url, 6)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    compared = 0
    for stored in store.iter_sessions():
        for trajectory in trajectories(Session(stored.info, stored.turns)):
            difference = np.abs(trainer_logprobs(model, trajectory) - trajectory.logprobs[trajectory.loss_mask])
            assert difference.max() < 1e-4
            compared += len(difference)
    assert compared > 200


def trainer_logprobs(model: Any, trajectory: Trajectory) -> Any:
    with torch.no_grad():
        logits = model(torch.from_numpy(trajectory.token_ids[None].astype(np.int64))).logits[0]
    logprobs = logits.float().log_softmax(-1)
    at = np.flatnonzero(trajectory.loss_mask)
    return logprobs[torch.from_numpy(at - 1), torch.from_numpy(trajectory.token_ids[at].astype(np.int64))].numpy()
