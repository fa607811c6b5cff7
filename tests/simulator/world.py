"""A gateway's process and its network in virtual time, and everything that each side saw."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulator.engine import Sampled, SimulatedEngine, SimulatedQueue
from tests.simulator.loop import VirtualLoop
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, StoredSession


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
    disk_fails: float
    """That a flush fails: the gateway records nothing more until it is started again."""
    leaves: float
    """That a client leaves while something is written, often its own turn."""
    kills: int
    """How often the process is killed."""


@dataclass
class Exchange:
    """One connection with one request, as its server side sees it."""

    path: str
    key: str | None = None
    """Its idempotency key."""
    status: int = 0
    sent: list[bytes] = field(default_factory=list)
    process: object = None
    """The process that it came to."""
    handed: bool = False
    """The last byte was given to the network while its client was there."""
    over: bool = False
    """The server does nothing more for it."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False
    """The network takes nothing more for its client."""
    received: asyncio.Future[tuple[int, bytes] | None] = field(default_factory=asyncio.Future)
    """What the client got; None for a connection that broke."""

    @property
    def replies(self) -> list[Found]:
        """The choices of the reply that was handed over whole."""
        whole = self.handed and self.status == 200 and self.path.endswith("/chat/completions")
        return replies_in(b"".join(self.sent)) if whole else []


class World:
    """What a seed plays in. `start` and `kill` are those of the gateway's process."""

    def __init__(self, loop: VirtualLoop, renderer: Renderer, directory: Path, faults: Faults, reached: Any) -> None:
        self.loop, self.rng, self.renderer = loop, loop.rng, renderer
        self.directory, self.faults, self.reached = directory, faults, reached
        self.sampled: list[Sampled] = []
        self.exchanges: list[Exchange] = []
        self.of_clients: set[asyncio.Task[Any]] = set()
        self.forgiven: set[tuple[str, int]] = set()
        """Turns that were recorded, and not handed over, when the process was killed."""
        self.faulty: list[str] = []
        """What was found to be wrong on the way."""
        self.trace: list[str] = []
        self.app: Any = None
        self.queue: SimulatedQueue | None = None
        self.process = object()
        """Another one after each start."""
        self.weights = "w0"
        self.reports_weights = self.rng.random() < 0.5
        self.interruptible = self.rng.random() < 0.5
        self.named: object = None
        """The process that last got the version of the weights."""
        self.idle: object = None
        """The process that has reported its engine as idle, until it gets a resume."""
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
        self.process = object()
        self.store = SqliteStore.open(self.directory, synchronous="NORMAL")
        limits = Limits(
            retry_grace=self.rng.choice([0.0, 0.01, 0.5]), idle_seconds=self.rng.choice([0.02, 1.0, 3600.0])
        )
        self.engine = SimulatedEngine(self)
        self.turns = Turns(self.engine, self.renderer, self.store, limits=limits)
        await self.turns.prepare()
        self.app = create_app(self.turns, model_id="m", allowed_hosts=["*"])
        self.note("started")

    def kill(self) -> None:
        """End the process at once: uncommitted and unsent data is lost, regardless of what its code still does."""
        if self.app is None:
            return
        self.note("killed")
        self.reached["killed"] += 1
        self.app, self.process = None, object()
        assert self.queue is not None
        self.queue.dead = True
        for task in asyncio.all_tasks(self.loop):
            if task not in self.of_clients:
                task.cancel()
        for exchange in self.exchanges:
            if not exchange.over:
                exchange.over = True
                self._receive(exchange, None)
        handed = self.handed()
        for stored in self.store.iter_sessions():
            self.forgiven |= {(stored.info.session_id, turn.seq) for turn in stored.turns} - handed
        self.store.close()

    @property
    def broken(self) -> bool:
        """Whether the disk failed some time ago, so that the gateway is started again."""
        at = None if self.queue is None or self.app is None else self.queue.broken_at
        return at is not None and self.loop.now > at + 0.2

    async def stop(self) -> dict[str, StoredSession]:
        """Shut the process down and return its record."""
        await self.turns.abort_all()
        recorded = {session.info.session_id: session for session in self.store.iter_sessions(per_token=True)}
        self.app = None
        self.store.close()
        return recorded

    async def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, patience: float = 30.0
    ) -> tuple[int, bytes] | None:
        """Send a request, and return status and body; None if there was no answer in time, or the connection broke."""
        headers = headers or {}
        key = headers.get("idempotency-key")
        exchange = Exchange(path, key)
        data = b"" if body is None else json.dumps(body).encode()
        self.loop.call_later(self.loop.delay(), self._arrive, exchange, method, data, headers)
        if self.rng.random() < self.faults.duplicate and key is not None:
            self.reached["duplicate"] += 1
            self.loop.call_later(self.loop.delay(), self._arrive, Exchange(path, key), method, data, headers)
        try:
            return await asyncio.wait_for(exchange.received, patience)
        except TimeoutError:
            self.reached["client left"] += 1
            self.loop.call_later(self.loop.delay(), self._go, exchange)
            return None

    def leave(self) -> None:
        """Let a client that waits for a reply leave."""
        calls = (exchange for exchange in self.exchanges if exchange.path.endswith("/chat/completions"))
        waiting = [call for call in calls if not call.over and not call.left.is_set()]
        if waiting:
            self.reached["client left at a write"] += 1
            chosen = self.rng.choice(waiting)
            chosen.left.set()
            # What is sent before the gateway can notice is taken by the network.
            self.loop.call_later(0.0005, self._go, chosen)
            self._receive(chosen, None)

    def _go(self, exchange: Exchange) -> None:
        exchange.gone = True
        exchange.left.set()

    def handed(self) -> set[tuple[str, int]]:
        """Return the turns of all replies that were handed to the network whole."""
        return {(reply["session_id"], reply["turn"]) for exchange in self.exchanges for reply, _, _ in exchange.replies}

    def left(self) -> set[str]:
        """Return the ids of replies that the last process started to stream and whose clients disconnected early."""
        streams = (
            b"".join(exchange.sent)
            for exchange in self.exchanges
            if exchange.process is self.process and not exchange.handed
        )
        return {
            json.loads(stream[6:].partition(b"\n\n")[0])["id"] for stream in streams if stream.startswith(b"data: {")
        }

    def _arrive(self, exchange: Exchange, method: str, data: bytes, headers: dict[str, str]) -> None:
        if self.rng.random() < self.faults.request_lost:
            self.reached["request lost"] += 1
            return
        if self.app is None:
            self._receive(exchange, None)
            return
        self.exchanges.append(exchange)
        path, _, query = exchange.path.partition("?")
        if path == "/engine/resume":
            self.idle = None
        sent_headers = {"host": "simulated", "content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in sent_headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.loop.create_task(self._serve(exchange, scope, data))

    async def _serve(self, exchange: Exchange, scope: dict[str, Any], data: bytes) -> None:
        process, bodies, running = self.process, [data], dict(self.engine.running)
        exchange.process = process

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await exchange.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if self.process is not process or exchange.gone:
                return
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                return
            exchange.sent.append(message.get("body", b""))
            if not message.get("more_body", False):
                exchange.handed = True
                self._note_promises(exchange, running)
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

    def _note_promises(self, exchange: Exchange, running: dict[object, str]) -> None:
        """Note what the gateway promises with an answer; `running` are the engine's calls when its request arrived."""
        if exchange.status != 200:
            return
        if exchange.path == "/engine/pause" and json.loads(exchange.sent[0])["idle"]:
            self.reached["paused"] += 1
            self.idle = self.process
        elif exchange.path == "/engine/resume" and json.loads(exchange.sent[0])["weight_version"] is not None:
            self.named = self.process
        elif exchange.path.endswith("/confirm"):
            still = {session for call, session in running.items() if call in self.engine.running}
            dropped = still.intersection(json.loads(exchange.sent[0]).get("dropped", ()))
            self.faulty += [f"{session} was dropped with a call in flight" for session in sorted(dropped)]

    def _receive(self, exchange: Exchange, answer: tuple[int, bytes] | None) -> None:
        if not exchange.received.done():
            exchange.received.set_result(answer)


Found = tuple[dict[str, Any], list[int], list[int]]


def replies_in(body: bytes) -> list[Found]:
    """Return session and turn, the prompt and the sampled ids of each choice of a whole reply; none of a broken one."""
    if not body.startswith(b"data: "):
        reply = json.loads(body)
        return [(choice["tokentape"], reply["prompt_token_ids"], choice["token_ids"]) for choice in reply["choices"]]
    prompt: list[int] = []
    ids: dict[int, list[int]] = {}
    found = {}
    for line in body.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        prompt = chunk.get("prompt_token_ids") or prompt
        for part in chunk.get("choices", ()):
            ids.setdefault(part["index"], []).extend(part.get("token_ids") or ())
            if part["finish_reason"]:
                found[part["index"]] = part["tokentape"], prompt, ids[part["index"]]
    return [found[index] for index in sorted(found)] if b"data: [DONE]" in body else []


def messages_in(body: bytes) -> list[dict[str, str]]:
    """Return content and reasoning of each choice of a whole reply, as a client puts them together."""
    if not body.startswith(b"data: "):
        messages = [choice["message"] for choice in json.loads(body)["choices"]]
    else:
        messages = []
        chunks = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
        for part in (choice for chunk in chunks for choice in chunk.get("choices", ())):
            messages += [{} for _ in range(part["index"] + 1 - len(messages))]
            for name, text in part["delta"].items():
                if name in ("content", "reasoning_content"):
                    messages[part["index"]][name] = messages[part["index"]].get(name, "") + (text or "")
    return [{name: message.get(name) or "" for name in ("content", "reasoning_content")} for message in messages]
