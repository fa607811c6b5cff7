"""Clients that disconnect: replies they did not read are recorded, marked, and trained only on request."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from openai import OpenAI
from starlette.responses import Response

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE, until
from tokentape.chat._renderer import Renderer
from tokentape.client import Client
from tokentape.errors import StoreError
from tokentape.gateway._access import RequestLog
from tokentape.gateway._app import create_app
from tokentape.gateway._events import InFlightCall, TurnStarted
from tokentape.gateway._http import EventStream, send_whole
from tokentape.gateway._limits import Limits
from tokentape.gateway._serve import running
from tokentape.gateway._session_cache import SessionCache
from tokentape.gateway._turns import Turns
from tokentape.gateway._unread import UnreadMarks
from tokentape.store import Record, SqliteStore
from tokentape.store._snapshots import Selection, Snapshots
from tokentape.types import Event, Turn

HI = "hi there you<|im_end|>"
USER: Any = {"role": "user", "content": "hi"}


class SlowStore(SqliteStore):
    """Waits before it commits a turn, as long as `go_on` is not set."""

    go_on: threading.Event
    commits: threading.Event
    takes_marks = True

    async def write(self, *records: Record) -> None:
        if not self.takes_marks and any(isinstance(record, Event) for record in records):
            raise StoreError("full")
        if any(isinstance(record, Turn) for record in records):
            self.commits.set()
            while not self.go_on.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await super().write(*records)


class Served:
    """A gateway that a client can be made to leave at a known point."""

    def __init__(self, renderer: Renderer, directory: Path, opened: ExitStack) -> None:
        self.store = opened.enter_context(SlowStore.open(directory))
        self.store.go_on, self.store.commits = threading.Event(), threading.Event()
        self.store.go_on.set()
        self.engine = ScriptedEngine(renderer, [HI] * 64)
        self.turns = Turns(self.engine, renderer, self.store)
        self.url = opened.enter_context(running(create_app(self.turns, model_id="m")))
        self.client = opened.enter_context(Client(self.url))

    def stream(self, session_id: str, tokens: int | None, *messages: Any, **headers: str) -> None:
        """Read this many tokens of a reply, None: all, and disconnect. With 4 the commit waits for that."""
        with OpenAI(base_url=f"{self.url}/sessions/{session_id}/v1", api_key="none", max_retries=0) as client:
            self.engine.pause_after = None if tokens is None or tokens >= 4 else tokens + 1
            self.engine.go_on.clear()
            if tokens == 4:
                self.store.go_on.clear()
                self.store.commits.clear()
            stream = client.chat.completions.create(
                model="m",
                messages=list(messages) or [USER],
                stream=True,
                extra_body={"return_token_ids": True},
                extra_headers=headers,
            )
            read = 0
            for chunk in stream:
                read += bool(getattr(chunk.choices[0], "token_ids", None))
                if tokens is not None and read >= max(min(tokens, 3), 1):
                    break
            if tokens == 4:
                assert self.store.commits.wait(PATIENCE)
            if tokens is not None:
                stream.close()
        if tokens is not None:
            opened = self.turns.sessions.in_memory(session_id)
            assert opened is not None
            until(lambda: not any(call._readers for call in opened.calls))
            self.store.go_on.set()
            self.engine.go_on.set()
            until(lambda: not opened.calls and not self.turns.unread._writing)


@pytest.fixture
def served(renderer: Renderer, tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as opened:
        yield Served(renderer, tmp_path, opened)


def test_turns_cancelled_at_random_points_are_not_trained(served: Served) -> None:
    drawn = random.Random(7)
    points = [drawn.choice([1, 2, 4, None]) for _ in range(16)]
    assert {1, 2, 4, None} == set(points)
    for number, point in enumerate(points):
        served.stream(f"s{number}", point)
    for number, point in enumerate(points):
        session = served.client.session(f"s{number}")
        trained = [trajectory for trajectory in session.trajectories() if trajectory.loss_mask.any()]
        with_unread = session.trajectories(unread=True)
        (turn,) = served.store.load_session(f"s{number}").turns
        assert bool(trained) == (point is None), point
        # Before the reply is finished it is aborted, which nothing trains.
        assert (turn.finish_reason == "abort") == (point in (1, 2))
        assert len(with_unread) == (point in (4, None))
        if point == 4:
            assert with_unread[0].verdict.endswith(", unread")
            assert with_unread[0].loss_mask.any()


def test_a_turn_that_was_read_is_never_marked(served: Served) -> None:
    served.stream("s", None)
    whole = httpx2.post(f"{served.url}/sessions/s/v1/chat/completions", json={"messages": [USER]}, timeout=PATIENCE)
    assert whole.status_code == 200
    assert served.store.load_session("s").events == ()
    assert len(served.client.session("s").trajectories()) == 2


def test_an_unread_turn_leaves_its_parent_trained(served: Served) -> None:
    served.stream("s", None)
    reply = {"role": "assistant", "content": "hi there you"}
    served.stream("s", 4, USER, reply, USER)
    (before,) = served.client.session("s").trajectories()
    assert before.turns == (0,)
    assert [trajectory.turns for trajectory in served.client.session("s").trajectories(unread=True)] == [(0, 1)]


def test_continued_unread_turn_counts_as_read(served: Served) -> None:
    served.stream("s", 4)
    served.stream("s", None, USER, {"role": "assistant", "content": "hi there you"}, USER)
    (branch,) = served.client.session("s").trajectories()
    assert branch.turns == (0, 1)
    assert branch.loss_mask.sum() == sum(len(turn.completion_ids) for turn in served.store.load_session("s").turns)


def test_a_branch_ends_before_an_unread_turn_and_can_get_its_reward(served: Served) -> None:
    reply = {"role": "assistant", "content": "hi there you"}
    served.stream("s", 4)
    served.stream("s", 4, USER, reply, USER)
    session = served.client.session("s")
    (branch,) = session.trajectories()
    # A continued turn was read, regardless of its mark.
    assert (branch.turns, branch.verdict) == ((0,), "exact")
    session.reward(0.5, leaf=branch.leaf)
    assert session.trajectories()[0].reward == 0.5


def test_failed_mark_is_written_with_the_next_reply(served: Served) -> None:
    served.store.takes_marks = False
    served.stream("s", 4)
    assert served.store.load_session("s").events == ()
    served.store.takes_marks = True
    served.stream("t", None)
    until(lambda: bool(served.store.load_session("s").events) and not served.turns.unread._writing)
    assert served.client.session("s").trajectories() == []
    assert served.store.load_session("t").events == ()


def test_reads_are_refused_while_a_mark_is_unwritten(served: Served) -> None:
    served.store.takes_marks = False
    served.stream("s", 4)
    session = served.client.session("s")
    with httpx2.Client(base_url=served.url) as http:
        assert http.post("/snapshots", json={}).status_code == 503
        assert http.get("/sessions/s/trajectories").status_code == 503
        served.store.takes_marks = True
        taken = http.post("/snapshots", json={}).json()
    assert session.trajectories() == []
    assert taken["trajectories"] == 0


def test_retried_reply_is_not_dropped_with_a_snapshot_without_it(served: Served) -> None:
    served.stream("s", 4, **{"Idempotency-Key": "k"})
    with httpx2.Client(base_url=served.url) as http:
        taken = http.post("/snapshots", json={}).json()
        assert taken["trajectories"] == 0
        served.store.takes_marks = False
        served.stream("s", None, **{"Idempotency-Key": "k"})
        confirm = f"/snapshots/{taken['snapshot_id']}/confirm"
        wanted = {"digest": taken["digest"], "drop_sessions": True}
        assert http.post(confirm, json=wanted).status_code == 503
        served.store.takes_marks = True
        dropped = http.post(confirm, json=wanted).json()
    assert dropped["kept"] == [{"session_id": "s", "reason": "changed since the snapshot"}]
    assert len(served.client.session("s").trajectories()) == 1


def test_a_session_stays_in_memory_until_its_marks_are_written(served: Served) -> None:
    served.store.takes_marks = False
    served.stream("s", 4, **{"Idempotency-Key": "k"})
    opened = served.turns.sessions.in_memory("s")
    assert opened is not None
    opened.used_at -= served.turns.limits.idle_seconds + 1
    served.stream("t", None)
    # Loaded again it would not know the mark, which is written later, after the retry got the reply.
    served.stream("s", None, **{"Idempotency-Key": "k"})
    served.store.takes_marks = True
    served.stream("t", None)
    until(lambda: not served.turns.unread._writing and not served.turns.unread._due)
    assert len(served.client.session("s").trajectories()) == 1
    assert opened.unmarked == set()


async def stream(turns: Turns, at_the_end: Callable[[], Awaitable[None]], *, leave: bool) -> None:
    """Stream a reply of session `s`. `at_the_end` runs when its last event is sent; then the client may leave."""
    app = create_app(turns, model_id="m", allowed_hosts=["*"])
    left, bodies = asyncio.Event(), [json.dumps({"model": "m", "messages": [USER], "stream": True}).encode()]

    async def receive() -> Any:
        if not bodies:
            await left.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": bodies.pop()}

    async def send(message: Any) -> None:
        if b'"finish_reason":"stop"' not in message.get("body", b""):
            return
        opened = turns.sessions.in_memory("s")
        assert opened is not None
        for call in opened.calls:
            await call.ended()
        await at_the_end()
        if leave:
            left.set()
            await asyncio.Event().wait()

    path = "/sessions/s/v1/chat/completions"
    headers = {"host": "h", "content-type": "application/json", "idempotency-key": "k"}
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "scheme": "http"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app({**scope, "headers": raw, "client": ("127.0.0.1", 1), "http_version": "1.1"}, receive, send)
    await turns.unread.recorded()


async def nothing() -> None:
    pass


@pytest.mark.parametrize("read", [True, False])
def test_a_session_stays_in_memory_until_its_replies_are_sent(read: bool, renderer: Renderer, tmp_path: Path) -> None:
    """A client that reads slowly, or leaves, while the session is idle and another one needs room."""

    async def main(store: SqliteStore) -> None:
        turns = Turns(ScriptedEngine(renderer, [HI]), renderer, store)

        async def become_idle() -> None:
            opened = turns.sessions.in_memory("s")
            assert opened is not None
            opened.used_at -= turns.limits.idle_seconds + 1
            await turns.sessions.create("another", {}, "anonymous")

        await stream(turns, nothing if read else become_idle, leave=True)
        assert store.load_session("s").trajectories() == []
        if read:
            await stream(turns, become_idle, leave=False)
        assert len(store.load_session("s").trajectories()) == read

    with SqliteStore.open(tmp_path) as store:
        asyncio.run(main(store))


def test_a_session_is_not_dropped_while_a_retry_gets_a_reply_that_its_snapshot_lacks(
    renderer: Renderer, tmp_path: Path
) -> None:
    async def main(store: SqliteStore) -> dict[str, str]:
        turns, snapshots = Turns(ScriptedEngine(renderer, [HI]), renderer, store), Snapshots(store)
        await stream(turns, nothing, leave=True)
        taken = await snapshots.take(Selection(("s",)), "anonymous", None)
        snapshot = await snapshots.snapshot(taken.snapshot_id, None)
        assert snapshot.digest is not None
        await snapshots.confirm(snapshot.snapshot_id, None, snapshot.digest)
        kept: dict[str, str] = {}

        async def drop() -> None:
            # As if the drop had begun, and looked for sessions in use, before the retry.
            _, reasons = await snapshots.drop(snapshot.snapshot_id, None)
            kept.update(reasons)

        await stream(turns, drop, leave=False)
        assert len(store.load_session("s").trajectories()) == 1
        return kept

    with SqliteStore.open(tmp_path) as store:
        assert asyncio.run(main(store)) == {"s": "changed since the snapshot"}


def test_abandoned_retry_after_a_restart_marks_uncontinued_replies(served: Served) -> None:
    served.stream("continued", None)
    served.stream("continued", None, USER, {"role": "assistant", "content": "hi there you"}, USER)
    served.stream("last", None)
    served.stream("left", 4)

    async def restarted() -> None:
        cache = SessionCache(served.store, Limits())
        marks = UnreadMarks(served.store, cache, served.turns.telemetry.metrics)
        for name in ("continued", "last", "left"):
            await cache.get(name, None)
            line = RequestLog()
            line.session_id, line.reply_id = name, served.store.load_session(name).answers[0].reply_id
            marks.answered(line, complete=False)
        await marks.written()

    asyncio.run(restarted())
    assert served.store.load_session("continued").events == ()
    assert len(served.client.session("continued").trajectories()) == 1
    # Whether a client got it before the restart is not recorded.
    assert served.client.session("last").trajectories() == []
    assert len(served.store.load_session("left").events) == 1


def test_read_reply_stays_read_after_its_session_leaves_memory(served: Served) -> None:
    served.stream("s", None)
    cache, marks = served.turns.unread._sessions, served.turns.unread
    opened = cache.in_memory("s")
    assert opened is not None

    async def repeated_and_left() -> None:
        cache.drop(opened)
        await cache.get("s", None)
        line = RequestLog()
        line.session_id, line.reply_id = "s", served.store.load_session("s").answers[0].reply_id
        marks.answered(line, complete=False)
        await marks.written()

    asyncio.run(repeated_and_left())
    assert served.store.load_session("s").events == ()
    assert len(served.client.session("s").trajectories()) == 1


def test_completed_retry_removes_the_unread_mark(served: Served) -> None:
    served.stream("s", 4, **{"Idempotency-Key": "k"})
    assert served.client.session("s").trajectories() == []
    served.stream("s", None, **{"Idempotency-Key": "k"})
    until(lambda: not served.turns.unread._writing)
    (branch,) = served.client.session("s").trajectories()
    assert branch.verdict.count("unread") == 0
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_a_reply_is_complete_only_when_its_last_piece_was_sent(streamed: bool) -> None:
    pieces = [letter * (1 << 16) for letter in (b"a", b"b")]

    async def events() -> Any:
        for piece in pieces:
            yield piece

    async def sent(until_piece: bytes) -> bool:
        left = asyncio.Event()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body") == until_piece:
                # A client that reads no more: the server waits for room in the socket, then sees it leave.
                left.set()
                await asyncio.Event().wait()

        if not streamed:
            return await send_whole(Response(b"".join(pieces)), {"type": "http"}, receive, send)
        stream = EventStream(events(), {}, lambda error: b"")
        await stream({"type": "http"}, receive, send)
        return stream.complete

    assert not asyncio.run(sent(pieces[0]))
    assert not asyncio.run(sent(pieces[1]))
    assert asyncio.run(sent(b"never"))


@pytest.mark.parametrize("to_the_end", [True, False])
def test_reply_counts_as_read_only_if_a_client_read_all_of_it(to_the_end: bool) -> None:
    async def main() -> str | None:
        call = InFlightCall(None, 1, stream=True, grace=0.0)

        async def work() -> None:
            call.begin_commit()
            call.publish(TurnStarted("reply", 0.0, np.empty(0, np.int32)))

        call.start(work(), lambda: None)
        events = call.follow()
        await anext(events)
        if to_the_end:
            assert [event async for event in events] == []
        await events.aclose()
        await call.ended()
        return call.left_reply

    assert asyncio.run(main()) == (None if to_the_end else "reply")
