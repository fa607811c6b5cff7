"""A gateway, its engine, its disk and its network in virtual time, and everything that each side saw."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Engine, create_engine

from tests.simulator.loop import VirtualLoop
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams
from tokentape.errors import EngineError, EngineUnavailable, StoreFull
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, StoredSession
from tokentape.store import _commit as commit_module
from tokentape.store import _sqlite as sqlite_module
from tokentape.store._commit import CommitQueue
from tokentape.types import TokenIds

SAYINGS = ("Yes.", "No, not at all.", "It is 42.", "<think>Well.</think>Fine.", "A long answer, word by word by word.")


@dataclass(frozen=True)
class Faults:
    """How likely each fault is; of a seed, so that there are calm and wild ones."""

    request_lost: float
    reply_lost: float
    duplicate: float
    impatient: float
    """That a client waits for a short time only."""
    engine_fails: float
    engine_aborts: float
    disk_full: float
    kills: int
    """How often the process is killed."""


@dataclass
class Exchange:
    """One connection with one request, as its server side sees it."""

    session: str
    status: int = 0
    sent: list[bytes] = field(default_factory=list)
    handed: bool = False
    """The last byte was given to the network while its client was there."""
    over: bool = False
    """The server does nothing more for it."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    received: asyncio.Future[tuple[int, bytes] | None] = field(default_factory=asyncio.Future)
    """What the client got; None for a connection that broke."""


class SimulatedEngine:
    """Samples from a few sayings, with pauses, and fails as the seed wants. Notes down all that it sampled."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tokenizer = world.renderer.tokenizer
        self.info = EngineInfo(
            name="simulated",
            version="1",
            model="none",
            vocab_size=self._tokenizer.vocab_size,
            max_context=1 << 16,
            logprobs_mode="raw_logprobs",
            sampling=frozenset({"temperature", "stop_token_ids", "max_tokens"}),
        )

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        world, rng = self._world, self._world.rng
        ids = world.encode(rng.choice(SAYINGS) + "<|im_end|>")[: params.max_tokens]
        noted: list[tuple[int, float]] = []
        world.sampled.append((prompt_ids.tolist(), noted))
        fails_at = rng.randrange(len(ids)) if rng.random() < world.faults.engine_fails else None
        aborts_at = rng.randrange(len(ids)) if rng.random() < world.faults.engine_aborts else None
        await asyncio.sleep(world.loop.delay())
        for at, token_id in enumerate(ids):
            if at == fails_at:
                world.reached["engine failed"] += 1
                raise rng.choice([EngineUnavailable, EngineError])("the simulated engine failed")
            last = at == len(ids) - 1
            stop = token_id if token_id in params.stop_token_ids else None
            finish = "abort" if at == aborts_at else None if not last else "length" if stop is None else "stop"
            world.reached["engine aborted"] += finish == "abort"
            noted.append((token_id, -0.25 - len(world.sampled) % 7))
            yield SampleDelta((token_id,), (noted[-1][1],), finish, stop if last else None, (), "1")  # type: ignore[arg-type]
            if finish == "abort":
                return
            if not last:
                await asyncio.sleep(world.loop.delay())

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


class SimulatedQueue(CommitQueue):
    """The queue of the store without its thread: a batch is committed some time after its first call came."""

    world: World

    def __init__(self, *args: Any, **options: Any) -> None:
        self._due = self.dead = False
        super().__init__(*args, **options)
        self.world.queue = self

    async def run(self, work: Any, again: Any = None, claims: Any = None) -> None:
        loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(super().run(work, again, claims))
        if not self._due:
            self._due = True
            loop.call_later(self.world.loop.delay(), self._commit_some)
        await waiting

    def _commit_some(self) -> None:
        self._due, batch = False, []
        while not self._calls.empty():
            one = self._calls.get()
            if one is not None and not one.done.cancelled():
                batch.append(one)
        if self.dead or not batch:
            return
        if self.world.rng.random() < self.world.faults.disk_full:
            self.world.reached["disk full"] += 1
            commit_module._answer(batch, [StoreFull("the simulated disk is full")] * len(batch))
            return
        self._serve(batch)

    def close(self) -> None:
        self._commit_some()
        self._closed = True


class World:
    """What a seed plays in. `start` and `kill` are those of the gateway's process."""

    def __init__(self, loop: VirtualLoop, renderer: Renderer, directory: Path, faults: Faults, reached: Any) -> None:
        self.loop, self.rng, self.renderer = loop, loop.rng, renderer
        self.directory, self.faults, self.reached = directory, faults, reached
        self.sampled: list[tuple[list[int], list[tuple[int, float]]]] = []
        self.exchanges: list[Exchange] = []
        self.of_clients: set[asyncio.Task[Any]] = set()
        self.forgiven: set[tuple[str, int]] = set()
        """Turns that were recorded, and not handed over, when the process was killed."""
        self.trace: list[str] = []
        self.app: Any = None
        self.queue: SimulatedQueue | None = None
        self._alive = object()
        SimulatedQueue.world = self
        loop.set_task_factory(self._task)

    def _task(self, loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task. What a client begins is the client's; requests arrive in callbacks, which no task runs."""
        task = asyncio.Task(work, loop=loop, **options)
        if asyncio.current_task(loop) in self.of_clients:
            self.of_clients.add(task)
        return task

    def encode(self, text: str) -> list[int]:
        return self.renderer.tokenizer.encode_plain(text)

    def note(self, what: str) -> None:
        self.trace.append(f"{self.loop.now:.4f} {what}")

    async def start(self) -> None:
        self._alive = object()
        self.store = SqliteStore.open(self.directory, synchronous="NORMAL")
        limits = Limits(
            retry_grace=self.rng.choice([0.0, 0.01, 0.5]), idle_seconds=self.rng.choice([0.02, 1.0, 3600.0])
        )
        self.turns = Turns(SimulatedEngine(self), self.renderer, self.store, limits=limits)
        await self.turns.prepare()
        self.app = create_app(self.turns, model_id="m", allowed_hosts=["*"])
        self.note("started")

    def kill(self) -> None:
        """End the process at once: what it has not committed and not sent is gone, whatever its code still does."""
        if self.app is None:
            return
        self.note("killed")
        self.reached["killed"] += 1
        self.app, self._alive = None, object()
        assert self.queue is not None
        self.queue.dead = True
        for one in asyncio.all_tasks(self.loop):
            if one not in self.of_clients:
                one.cancel()
        for exchange in self.exchanges:
            if not exchange.over:
                exchange.over = True
                self._receive(exchange, None)
        handed = self.handed()
        for stored in self.store.iter_sessions():
            self.forgiven |= {(stored.info.session_id, turn.seq) for turn in stored.turns} - handed
        self.store.close()

    async def stop(self) -> dict[str, StoredSession]:
        """Stop the process in good order and return what it has recorded."""
        await self.turns.abort_all()
        recorded = {stored.info.session_id: stored for stored in self.store.iter_sessions()}
        self.app = None
        self.store.close()
        return recorded

    async def request(
        self, method: str, path: str, body: Any, headers: dict[str, str], *, session: str, patience: float
    ) -> tuple[int, bytes] | None:
        """Send a request, and return status and body; None if there was no answer in time, or the connection broke."""
        exchange = Exchange(session)
        data = json.dumps(body).encode()
        self.loop.call_later(self.loop.delay(), self._arrive, exchange, method, path, data, headers)
        if self.rng.random() < self.faults.duplicate and "idempotency-key" in headers:
            self.reached["duplicate"] += 1
            self.loop.call_later(self.loop.delay(), self._arrive, Exchange(session), method, path, data, headers)
        try:
            return await asyncio.wait_for(exchange.received, patience)
        except TimeoutError:
            self.reached["client left"] += 1
            self.loop.call_later(self.loop.delay(), exchange.left.set)
            return None

    def handed(self) -> set[tuple[str, int]]:
        """Return the turns of all replies that were handed to the network whole."""
        return {
            (one["session_id"], one["turn"])
            for exchange in self.exchanges
            if exchange.handed and exchange.status == 200
            for one, _, _ in replies_in(b"".join(exchange.sent))
        }

    def _arrive(self, exchange: Exchange, method: str, path: str, data: bytes, headers: dict[str, str]) -> None:
        if self.rng.random() < self.faults.request_lost:
            self.reached["request lost"] += 1
            return
        if self.app is None:
            self._receive(exchange, None)
            return
        self.exchanges.append(exchange)
        given = {"host": "simulated", "content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.loop.create_task(self._serve(exchange, scope, data))

    async def _serve(self, exchange: Exchange, scope: dict[str, Any], data: bytes) -> None:
        alive, bodies = self._alive, [data]

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await exchange.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if self._alive is not alive or exchange.left.is_set():
                return
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                return
            exchange.sent.append(message.get("body", b""))
            if not message.get("more_body", False):
                exchange.handed = True
                broken = self.rng.random() < self.faults.reply_lost
                self.reached["reply lost"] += broken
                answer = None if broken else (exchange.status, b"".join(exchange.sent))
                self.loop.call_later(self.loop.delay(), self._receive, exchange, answer)
            elif self.rng.random() < 0.1:
                await asyncio.sleep(self.loop.delay())

        try:
            await self.app(scope, receive, send)
        finally:
            exchange.over = True

    def _receive(self, exchange: Exchange, answer: tuple[int, bytes] | None) -> None:
        if not exchange.received.done():
            exchange.received.set_result(answer)


def replies_in(body: bytes) -> list[tuple[dict[str, Any], list[int], list[int]]]:
    """Return session and turn, the prompt and the sampled ids of each choice of a whole reply; none of a broken one."""
    if not body.startswith(b"data: "):
        reply = json.loads(body)
        return [(one["tokentape"], reply["prompt_token_ids"], one["token_ids"]) for one in reply["choices"]]
    prompt: list[int] = []
    ids: dict[int, list[int]] = {}
    found = []
    for line in body.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        prompt = chunk.get("prompt_token_ids") or prompt
        for one in chunk.get("choices", ()):
            ids.setdefault(one["index"], []).extend(one.get("token_ids") or ())
            if one["finish_reason"]:
                found.append((one["tokentape"], prompt, ids[one["index"]]))
    return found if b"data: [DONE]" in body else []


class NoThread:
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

    patch.setattr(sqlite_module, "create_engine", same)
    patch.setattr(commit_module, "threading", SimpleNamespace(Thread=NoThread, Lock=threading.Lock))
    patch.setattr(sqlite_module, "CommitQueue", SimulatedQueue)
