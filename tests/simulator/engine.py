"""An engine and a disk in virtual time, which fail by a seed, and a log of what the engine sampled."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import OperationalError

from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams
from tokentape.errors import EngineError, EngineUnavailable
from tokentape.store import _commit as commit_module
from tokentape.store import _sqlite as sqlite_module
from tokentape.store._commit import CommitQueue
from tokentape.types import TokenIds

if TYPE_CHECKING:
    from tests.simulator.world import World

REPLIES = (
    "Yes.",
    "Nay.",
    "No, not at all.",
    "It is 42.",
    "<think>Well.</think>Fine.",
    "<think>Hmm.</think>Fine.",
    "A long answer, word by word by word.",
)


@dataclass
class Sampled:
    """One call of the engine, as the engine saw it."""

    session: str
    began: float
    prompt: list[int]
    tokens: list[tuple[int, float]] = field(default_factory=list)
    """Ids and log-probabilities."""
    weights: list[tuple[str, bool]] = field(default_factory=list)
    """Per token the version that sampled it, and whether the gateway could know it."""


class SimulatedEngine:
    """Samples from a few sayings, with pauses, and fails as the seed wants. Notes down all that it sampled."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._process = world.process
        self._interrupted: set[str] = set()
        self.running: dict[object, str] = {}
        """The calls under way, by session."""
        tokenizer = world.renderer.tokenizer
        self.info = EngineInfo(
            name="simulated",
            version="1",
            model="none",
            vocab_size=tokenizer.vocab_size,
            max_context=1 << 16,
            logprobs_mode="raw_logprobs",
            sampling=frozenset({"temperature", "stop_token_ids", "max_tokens", "session_id"}),
        )

    def interrupt(self, request_id: str) -> bool:
        if self._world.interruptible:
            self._interrupted.add(request_id)
        return self._world.interruptible

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        world, rng, call = self._world, self._world.rng, object()
        ids = world.encode(rng.choice(REPLIES) + "<|im_end|>")[: params.max_tokens]
        sampled = Sampled(str(params.session_id), world.loop.now, prompt_ids.tolist())
        world.sampled.append(sampled)
        logprob = -0.25 - len(world.sampled) % 7
        fails_at = rng.randrange(len(ids)) if rng.random() < world.faults.engine_fails else None
        aborts_at = rng.randrange(len(ids)) if rng.random() < world.faults.engine_aborts else None
        self.running[call] = sampled.session
        try:
            await asyncio.sleep(world.loop.delay())
            for at, token_id in enumerate(ids):
                if request_id in self._interrupted:
                    world.reached["interrupted"] += 1
                    yield SampleDelta((), (), "abort", None)
                    return
                if at == fails_at:
                    world.reached["engine failed"] += 1
                    raise rng.choice([EngineUnavailable, EngineError])("the simulated engine failed")
                if world.idle is self._process:
                    world.faulty.append(f"{sampled.session}: a token was sampled while the gateway was idle")
                last = at == len(ids) - 1
                stop = token_id if token_id in params.stop_token_ids else None
                finish: Any = "abort" if at == aborts_at else None if not last else "length" if stop is None else "stop"
                world.reached["engine aborted"] += finish == "abort"
                sampled.tokens.append((token_id, logprob))
                sampled.weights.append((world.weights, world.reports_weights or world.named is self._process))
                version = world.weights if world.reports_weights else None
                yield SampleDelta((token_id,), (logprob,), finish, stop if last else None, (), version)
                if finish == "abort":
                    return
                if not last:
                    await asyncio.sleep(world.loop.delay())
        finally:
            del self.running[call]

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


class SimulatedQueue(CommitQueue):
    """The queue of the store without its thread: a batch is committed some time after its first call came."""

    world: World

    def __init__(self, *args: Any, **options: Any) -> None:
        self._due = self.dead = False
        self.broken_at: float | None = None
        super().__init__(*args, **options)
        self.world.queue = self

    async def run(self, work: Any, again: Any = None, claims: Any = None) -> None:
        loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(super().run(work, again, claims))
        if self.world.faults.leaves and self.world.rng.random() < self.world.faults.leaves:
            loop.call_later(self.world.loop.delay(), self.world.leave)
        if not self._due:
            self._due = True
            loop.call_later(self.world.loop.delay(), self._commit_some)
        await waiting

    def _commit_some(self) -> None:
        self._due, batch = False, []
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None and not call.done.cancelled():
                batch.append(call)
        if batch and not self.dead:
            self._serve(batch)
            if self.broken and self.broken_at is None:
                self.broken_at = self.world.loop.now

    @contextmanager
    def _transaction(self, batch: Sequence[Any]) -> Iterator[None]:
        """Fail like a full disk, where nothing is written, or like one that may have written the data."""
        world, faults = self.world, self.world.faults
        with super()._transaction(batch):
            yield
            if world.rng.random() < faults.disk_full:
                world.reached["disk full"] += 1
                world.reached["disk full for several"] += len(batch) > 1
                raise _refusal(sqlite3.SQLITE_FULL, "SQLITE_FULL")
            lost = world.rng.random() < faults.disk_fails
            if lost and world.rng.random() < 0.5:
                world.reached["disk failed"] += 1
                raise _refusal(sqlite3.SQLITE_IOERR_FSYNC, "SQLITE_IOERR_FSYNC")
        if lost:
            world.reached["disk failed after a commit"] += 1
            raise _refusal(sqlite3.SQLITE_IOERR_FSYNC, "SQLITE_IOERR_FSYNC")

    def close(self) -> None:
        self._commit_some()
        self._closed = True


def _refusal(code: int, name: str) -> OperationalError:
    error = sqlite3.OperationalError("simulated")
    error.sqlite_errorcode, error.sqlite_errorname = code, name
    return OperationalError("COMMIT", None, error)


class _NoThread:
    """Stands in for the commit thread."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


def without_threads(patch: Any) -> None:
    """Let the store commit in the loop, and compile statements once for all stores; `patch` is a `MonkeyPatch`."""
    first = create_engine("sqlite://")
    first.connect().close()

    def same(*address: Any, **options: Any) -> Engine:
        engine = create_engine(*address, **options)
        engine.dialect, engine._compiled_cache = first.dialect, first._compiled_cache
        return engine

    async def in_loop(work: Any, *arguments: Any, **_: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, partial(work, *arguments))

    patch.setattr(sqlite_module, "create_engine", same)
    patch.setattr(commit_module, "threading", SimpleNamespace(Thread=_NoThread, Lock=threading.Lock))
    patch.setattr(sqlite_module, "CommitQueue", SimulatedQueue)
    patch.setattr(anyio.to_thread, "run_sync", in_loop)
