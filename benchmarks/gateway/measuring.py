"""Measurements. Each covers all targets in turns, so that other work on the machine affects them equally."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gateway.conversations import Conversation, Text
from benchmarks.gateway.http import Connection, message_of, message_of_events
from benchmarks.gateway.processes import Process, disk_bytes
from benchmarks.gateway.targets import Session, Site, Target

GROUPS = 10
"""Number of groups of sessions; memory is read after each group."""

SETTLE = 0.05
"""Seconds for work that a target does after its replies, such as writing."""


class Failed(Exception):
    """A target returned an unexpected reply."""


@dataclass
class Running:
    """A started target."""

    target: Target
    site: Site
    url: str
    process: Process | None
    started: float = 0.0
    """Seconds until the first reply."""
    begun: int = 0
    """Number of sessions."""

    def cpu_seconds(self) -> float:
        """Return user and system time so far; 0 if the target has no process."""
        return 0.0 if self.process is None else self.process.cpu_seconds()


@dataclass
class Calls:
    """Results of consecutive calls."""

    seconds: list[float] = field(default_factory=list)
    """Seconds per call, from the first byte sent to the last one received."""
    first_seconds: list[float] = field(default_factory=list)
    """Seconds to the first event, for streams only."""
    chunks: int = 0
    cpu_ms: list[float] = field(default_factory=list)
    """CPU milliseconds per call, one value per session."""
    opening_seconds: list[float] = field(default_factory=list)
    """Seconds of each session's first call, which renders and tokenizes everything."""


async def one(connection: Connection, session: Session, conversation: Conversation, *, stream: bool) -> Calls:
    """Run one call and build the next request from its reply."""
    body, calls = conversation.body(stream=stream), Calls()
    began = time.perf_counter()
    if stream:
        chunks = []
        async for at, chunk in connection.events(session.path, body, session.headers):
            if not chunks:
                calls.first_seconds.append(at - began)
            chunks.append(chunk)
        calls.seconds.append(time.perf_counter() - began)
        calls.chunks = sum(chunk.count(b"data: ") for chunk in chunks)
        conversation.answered(message_of_events(chunks))
        return calls
    status, answer = await connection.request(session.path, body, session.headers)
    calls.seconds.append(time.perf_counter() - began)
    if status != 200:
        raise Failed(f"{status}: {answer[:300]!r}")
    conversation.answered(message_of(answer))
    return calls


@asynccontextmanager
async def session_of(running: Running) -> AsyncGenerator[tuple[Connection, Session]]:
    """Create a session of a target, on its own connection."""
    running.begun += 1
    urls = running.url.split()
    async with Connection(urls[running.begun % len(urls)]) as connection:
        yield connection, await running.target.session(connection, f"bench-{running.begun}")


async def one_session(
    running: Running, text: Text, history: int, turns: int, into: Calls, *, seed: int, stream: bool = False
) -> None:
    """Run one session: its first call separately, then `turns` more."""
    async with session_of(running) as (connection, session):
        conversation = Conversation(text, history, seed=seed)
        into.opening_seconds += (await one(connection, session, conversation, stream=False)).seconds
        await asyncio.sleep(SETTLE)
        before = running.cpu_seconds()
        for _ in range(turns):
            calls = await one(connection, session, conversation, stream=stream)
            into.seconds += calls.seconds
            into.first_seconds += calls.first_seconds
            into.chunks += calls.chunks
        await asyncio.sleep(SETTLE)
        into.cpu_ms.append(1000 * (running.cpu_seconds() - before) / turns)


async def opening(running: Running, text: Text, history: int, *, seed: int, question: str = "") -> tuple[float, float]:
    """Return milliseconds and CPU milliseconds of a session's first call; `question` is put in its last message."""
    async with session_of(running) as (connection, session):
        conversation = Conversation(text, history, seed=seed)
        if question:
            conversation.messages[-1] = json.dumps({"role": "user", "content": question}).encode()
        await asyncio.sleep(SETTLE)
        before = running.cpu_seconds()
        seconds = (await one(connection, session, conversation, stream=False)).seconds
        await asyncio.sleep(SETTLE)
        return 1000 * seconds[0], 1000 * (running.cpu_seconds() - before)


async def in_turn(
    targets: Sequence[Running],
    settings: Sequence[Any],
    measure: Callable[[Running, Any, int], Any],
    *,
    seconds: float,
    least: int,
    failures: dict[str, str],
) -> int:
    """Run `measure` for all targets and settings, in a new order each round, for `seconds`; return the rounds."""
    order, ends, rounds = random.Random(0), time.monotonic() + seconds, 0
    while rounds < least or time.monotonic() < ends:
        for setting in settings:
            for running in order.sample(list(targets), len(targets)):
                if running.target.name in failures:
                    continue
                try:
                    await asyncio.wait_for(measure(running, setting, rounds), 300)
                except (Failed, RuntimeError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                    failures[running.target.name] = f"{type(error).__name__}: {error}"
        rounds += 1
    return rounds


async def at_once(running: Running, text: Text, clients: int, history: int, turns: int) -> tuple[float, float]:
    """Return calls per second with this many clients, one session each, and CPU ms per call."""
    room, begun, go = asyncio.Semaphore(8), asyncio.Semaphore(0), asyncio.Event()

    async def client(number: int) -> None:
        async with session_of(running) as (connection, session):
            conversation = Conversation(text, history, seed=number)
            async with room:
                await one(connection, session, conversation, stream=False)
            begun.release()
            await go.wait()
            for _ in range(turns):
                await one(connection, session, conversation, stream=False)

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        for _ in tasks:
            waiting = asyncio.create_task(begun.acquire())
            # `gather` raises if a client fails before it starts.
            await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        before, began = running.cpu_seconds(), time.perf_counter()
        go.set()
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
        await asyncio.sleep(SETTLE)
        return clients * turns / seconds, 1000 * (running.cpu_seconds() - before) / (clients * turns)
    finally:
        for task in tasks:
            task.cancel()


async def rollout(running: Running, text: Text, turns: int, per_turn: int) -> list[dict[str, float]]:
    """Run one long session and return history length, CPU ms and seconds per call for every ten turns."""
    measured = []
    async with session_of(running) as (connection, session):
        conversation = Conversation(text, per_turn, result=per_turn - 64 - 10)
        await one(connection, session, conversation, stream=False)
        for at in range(0, turns, 10):
            before, seconds = running.cpu_seconds(), []
            for _ in range(10):
                seconds += (await one(connection, session, conversation, stream=False)).seconds
            cpu = 1000 * (running.cpu_seconds() - before) / 10
            row = {"turn": at + 10, "tokens": conversation.tokens, "cpu_ms": cpu, "ms": 100 * sum(seconds)}
            measured.append(row)
    return measured


async def footprint(running: Running, text: Text, sessions: int, turns: int) -> dict[str, float]:
    """Return bytes of memory and disk per unique token of open sessions; needs a fresh process."""

    async def take(number: int) -> int:
        async with room, session_of(running) as (connection, session):
            conversation = Conversation(text, 1000, result=300, seed=number)
            for _ in range(turns):
                await one(connection, session, conversation, stream=False)
            return conversation.tokens - 300

    room = asyncio.Semaphore(8)
    # The first calls load code, so they are not measured.
    await asyncio.gather(*(take(10_000 + number) for number in range(8)))
    await asyncio.sleep(1)
    assert running.process is not None
    disk, tokens = disk_bytes(running.site.folder), [0]
    memory = [running.process.resident_bytes()]
    size = max(sessions // GROUPS, 1)
    for start in range(0, sessions, size):
        numbers = range(start, min(start + size, sessions))
        tokens.append(tokens[-1] + sum(await asyncio.gather(*map(take, numbers))))
        await asyncio.sleep(0.5)
        memory.append(running.process.resident_bytes())
    await asyncio.sleep(2)
    return {
        "sessions": sessions,
        "unique_tokens": tokens[-1],
        # Use the slope, because the allocator's reserve varies by tens of megabytes.
        "memory_bytes_per_token": statistics.linear_regression(tokens, memory).slope,
        "disk_bytes_per_token": (disk_bytes(running.site.folder) - disk) / tokens[-1],
    }
