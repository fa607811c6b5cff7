"""One seed: agents play in a world, and the replies that they got are compared with what is recorded."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.simulator import world as world_module
from tests.simulator.loop import running
from tests.simulator.world import Faults, World, replies_in
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.store import StoredSession, verify

LIVES = 400.0
"""Virtual seconds after which every agent is long done."""


@dataclass
class Outcome:
    """What a seed came to."""

    seed: int
    calls: int = 0
    """Requests for a turn that clients sent."""
    faults: list[str] = field(default_factory=list)
    """What was found; empty if all is right."""
    digest: str = ""
    """Of everything that happened, to tell whether a replay is one."""
    trace: list[str] = field(default_factory=list)


@dataclass
class Agent:
    """One conversation, with calls that are asked again until they are answered or given up."""

    world: World
    name: str
    outcome: Outcome
    acknowledged: list[tuple[str, int, list[int], list[int]]]
    steps: dict[str, str]
    """By idempotency key the session."""

    async def run(self) -> None:
        rng = self.world.rng
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{self.name}?"}]
        for step in range(rng.randint(1, 14)):
            if rng.random() < 0.15:
                both = [self.call(f"{step}{side}", messages) for side in "ab"]
                reply = (await asyncio.gather(*both))[0]
            else:
                reply = await self.call(str(step), messages)
            if reply is None:
                if rng.random() < 0.5:
                    return
                messages = [*messages[:-1], {"role": "user", "content": f"Once more, {step}."}]
                continue
            messages = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": f"And {step}?"}]
            if rng.random() < 0.1:
                messages = [messages[0], {"role": "user", "content": f"Anew {step}."}]
            await asyncio.sleep(self.world.loop.delay())

    async def call(self, step: str, messages: list[dict[str, Any]]) -> str | None:
        """Return the content of the reply to one call, asked up to five times."""
        rng, world = self.world.rng, self.world
        body: dict[str, Any] = {"model": "m", "messages": messages, "return_token_ids": True}
        body |= {"max_tokens": rng.choice([3, 64, 64])}
        body |= {"stream": True} if rng.random() < 0.5 else {}
        key = f"{self.name}-{step}" if rng.random() < 0.6 else None
        if key is not None:
            self.steps[key] = self.name
        for attempt in range(5):
            headers = {"x-stainless-retry-count": str(attempt)} | ({} if key is None else {"idempotency-key": key})
            patience = rng.choice([0.001, 0.01, 0.05]) if rng.random() < world.faults.impatient else 30.0
            self.outcome.calls += 1
            path = f"/sessions/{self.name}/v1/chat/completions"
            answer = await world.request("POST", path, body, headers, session=self.name, patience=patience)
            world.note(f"{self.name} {step} {attempt} {None if answer is None else answer[0]}")
            if answer is not None and answer[0] == 500:
                self.outcome.faults.append(f"status 500: {answer[1].decode()[:200]}")
            if answer is not None and answer[0] == 200 and (found := replies_in(answer[1])):
                for about, prompt, ids in found:
                    self.acknowledged.append((about["session_id"], about["turn"], prompt, ids))
                return content_of(answer[1])
            if answer is not None and 400 <= answer[0] < 500:
                self.outcome.faults.append(f"status {answer[0]}: {answer[1].decode()[:200]}")
                return None
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.5, 3.0]))
        return None


def content_of(body: bytes) -> str:
    """Return the content of a whole reply's first choice, as a client puts it together."""
    if not body.startswith(b"data: "):
        return json.loads(body)["choices"][0]["message"]["content"] or ""
    chunks = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(one["delta"].get("content") or "" for chunk in chunks for one in chunk.get("choices", ()))


def play(seed: int, renderer: Renderer, reached: Counter[str]) -> Outcome:
    """Play a seed to its end, and check it."""
    rng, outcome = Random(seed), Outcome(seed)
    wild = rng.choice([0.0, 0.1, 0.3, 0.6])
    faults = Faults(*(rng.random() * wild for _ in range(7)), kills=rng.choice([0, 0, 1, 3]) if wild else 0)
    directory = Path(tempfile.mkdtemp(prefix="simulated-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        with running(rng) as loop:
            world = World(loop, renderer, directory, faults, reached)
            try:
                loop.run_until_complete(_live(world, outcome))
            finally:
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.run_until_complete(asyncio.sleep(1))
        outcome.trace = world.trace
        outcome.digest = hashlib.sha256("\n".join(world.trace).encode()).hexdigest()[:16]
    finally:
        shutil.rmtree(directory)
    return outcome


async def _live(world: World, outcome: Outcome) -> None:
    loop, rng = world.loop, world.rng
    world.of_clients.add(asyncio.current_task())  # type: ignore[arg-type]
    await world.start()
    acknowledged: list[Any] = []
    steps: dict[str, str] = {}
    agents = [Agent(world, f"s{n}", outcome, acknowledged, steps) for n in range(rng.randint(1, 5))]
    kills = sorted(loop.steps + rng.randrange(5, 1200) for _ in range(world.faults.kills))

    def may_kill() -> None:
        if kills and loop.steps >= kills[0] and world.app is not None:
            kills.pop(0)
            world.kill()
            restarts.append(loop.create_task(_restart(world)))
            world.of_clients.add(restarts[-1])

    restarts: list[asyncio.Task[None]] = []
    loop.before_step = may_kill
    await asyncio.gather(*(one.run() for one in agents))
    loop.before_step = lambda: None
    for one in restarts:
        await one
    # Until marks are written and calls without clients have ended.
    await asyncio.sleep(LIVES)
    # The disk has room again: marks that it refused are written at the end.
    world.faults = replace(world.faults, disk_full=0.0)
    recorded = await world.stop()
    for name, stored in sorted(recorded.items()):
        world.note(f"{name} {[(turn.seq, turn.parent, turn.finish_reason, turn.digest) for turn in stored.turns]}")
    outcome.faults += check(world, recorded, acknowledged, steps)


async def _restart(world: World) -> None:
    await asyncio.sleep(world.loop.delay())
    await world.start()


def check(
    world: World, recorded: dict[str, StoredSession], acknowledged: list[Any], steps: dict[str, str]
) -> Iterator[str] | list[str]:
    """Return what is wrong with a record, given what clients got and what the engine sampled."""
    found = [f"verify: {one}" for one in verify(world.directory).findings]
    shown: set[tuple[str, int]] = set()
    for name, stored in recorded.items():
        trained = 0
        for one in stored.trajectories():
            shown |= {(name, seq) for seq in one.turns}
            trained += int(one.loss_mask.sum())
        sizes = sum(len(stored.turns[seq].completion_ids) for session, seq in shown if session == name)
        if trained != sizes:
            found.append(f"{name}: {trained} tokens are trained, and its turns have {sizes}")
        for turn in stored.turns:
            ledger = [*zip(turn.completion_ids.tolist(), turn.logprobs.tolist(), strict=True)]
            context = context_of(stored, turn.seq)
            if not any(was_sampled(context, ledger, world.sampled)):
                found.append(f"{name} turn {turn.seq}: not what the engine sampled")
    for session, seq, prompt, ids in acknowledged:
        turns = recorded[session].turns if session in recorded else ()
        if seq >= len(turns):
            found.append(f"{session} turn {seq} was acknowledged and is lost")
        elif turns[seq].completion_ids.tolist() != ids or context_of(recorded[session], seq) != prompt:
            found.append(f"{session} turn {seq} is not what was acknowledged")
        elif (session, seq) not in shown:
            found.append(f"{session} turn {seq} was acknowledged and is in no trajectory")
    # A turn that another one continues was read, whatever its mark says.
    read = world.handed() | world.forgiven
    for name, stored in recorded.items():
        for turn in reversed(stored.turns):
            if (name, turn.seq) in read and turn.parent is not None:
                read.add((name, turn.parent))
    unread = shown - read - continued(recorded)
    found += [f"{session} turn {seq} was handed to no client and is trained" for session, seq in sorted(unread)]
    for name, stored in recorded.items():
        keys = Counter(one.key for one in stored.answers if one.key is not None)
        found += [f"{name}: {count} answers to one key {key}" for key, count in keys.items() if count > 1]
    return found


def continued(recorded: dict[str, StoredSession]) -> set[tuple[str, int]]:
    """Return the turns that a turn which is no aborted one continues: their client sent what they said."""
    return {
        (name, turn.parent)
        for name, stored in recorded.items()
        for turn in stored.turns
        if turn.parent is not None and turn.finish_reason != "abort"
    }


def context_of(stored: StoredSession, seq: int) -> list[int]:
    """Return a turn's context, walked up by hand."""
    turn = stored.turns[seq]
    ids: list[int] = turn.added_ids.tolist()
    while turn.parent is not None:
        turn = stored.turns[turn.parent]
        ids = turn.added_ids.tolist() + turn.completion_ids.tolist() + ids
    return ids


def was_sampled(context: list[int], completion: list[Any], sampled: list[Any]) -> Iterator[bool]:
    """Yield whether a call of the engine, or several that went on after an abort, gave a completion."""
    for prompt, noted in sampled:
        if prompt[: len(context)] != context:
            continue
        rest = [token_id for token_id, _ in completion][: len(prompt) - len(context)]
        if prompt[len(context) :] == rest and noted[: len(completion) - len(rest)] == completion[len(rest) :]:
            yield True


@contextmanager
def simulating() -> Iterator[Renderer]:
    """Yield the renderer for `play`, with stores that commit in the loop."""
    with pytest.MonkeyPatch.context() as patch:
        world_module.without_threads(patch)
        yield Renderer.load(MODEL)
