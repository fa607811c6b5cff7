"""Several gateways over one record, none of which knows of the others: every call may go to any of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.postgres import Server
from tests.waiting import PATIENCE, calls_of, until
from tokentape._session.tree import UNREAD, unread_turns
from tokentape.chat._renderer import Renderer
from tokentape.gateway import _pausing as pausing
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._pausing import Gate
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, Store, verify
from tokentape.store._gateways import GatewayState, tell
from tokentape.store._lock import InterprocessLock
from tokentape.store._postgres import PostgresStore
from tokentape.types import Event, SessionInfo

QUESTION = {"role": "user", "content": "What is 3 plus 4?"}
RETRY = {"x-stainless-retry-count": "1"}


class Replica:
    """A gateway on a socket, with an engine of its own that says a number of replies."""

    def __init__(self, opened: ExitStack, renderer: Renderer, store: Store, name: str) -> None:
        self.store = opened.enter_context(store)
        self.engine = ScriptedEngine(renderer, [f"{name} {number}<|im_end|>" for number in range(40)])
        limits = Limits(retry_grace=0.2)
        self.turns = Turns(self.engine, renderer, self.store, limits=limits, on_abort="resample")
        self.url = opened.enter_context(running(create_app(self.turns, model_id="m")))

    def ask(self, messages: list[Any], path: str = "/sessions/s/v1", **more: Any) -> httpx2.Response:
        headers = more.pop("headers", {})
        body = {"messages": messages, "return_token_ids": True, **more}
        return httpx2.post(f"{self.url}{path}/chat/completions", json=body, headers=headers, timeout=PATIENCE)

    def get(self, path: str) -> Any:
        return httpx2.get(self.url + path, timeout=PATIENCE).json()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | Path]:
    if request.param == "sqlite":
        yield tmp_path
        return
    server: Server = request.getfixturevalue("postgres")
    url = server.new_place()
    yield url
    server.drop(url)


@pytest.fixture
def replicas(renderer: Renderer, location: str | Path) -> Iterator[list[Replica]]:
    """Two gateways over one record."""
    with ExitStack() as opened:

        def store() -> Store:
            if isinstance(location, str):
                return PostgresStore.open(location)
            writers = InterprocessLock(location)
            opened.callback(writers.close)
            return SqliteStore.open(location, writers=writers)

        yield [Replica(opened, renderer, store(), name) for name in ("one", "two")]


def reply_of(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return {"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]}


def turn_of(response: httpx2.Response) -> int:
    assert response.status_code == 200, response.text
    turn: int = response.json()["choices"][0]["tokentape"]["turn"]
    return turn


def test_a_session_goes_on_at_whichever_gateway_is_asked(replicas: list[Replica], location: str | Path) -> None:
    messages: list[Any] = []
    context: list[int] = []
    for number in range(8):
        messages.append({"role": "user", "content": f"question {number}"})
        told = replicas[number % 2].ask(messages).json()
        assert told["prompt_token_ids"][: len(context)] == context
        context = told["prompt_token_ids"] + told["choices"][0]["token_ids"]
        messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
    (leaf,) = replicas[0].get("/sessions/s")["leaves"]
    assert (leaf["turn"], leaf["verdict"], leaf["tokens"]) == (7, "exact", len(context))
    assert verify(location).ok


def test_turns_at_once_are_all_recorded_and_say_that_they_are_siblings(
    replicas: list[Replica], location: str | Path
) -> None:
    reply = reply_of(replicas[0].ask([QUESTION]))
    go = threading.Barrier(8)

    def ask(number: int) -> httpx2.Response:
        go.wait()
        return replicas[number % 2].ask([QUESTION, reply, {"role": "user", "content": f"question {number % 3}"}])

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(ask, range(8)))
    assert sorted(map(turn_of, told)) == list(range(1, 9))
    stored = replicas[0].store.load_session("s")
    for one in told:
        turn = stored.turns[turn_of(one)]
        assert turn.completion_ids.tolist() == one.json()["choices"][0]["token_ids"]
        assert turn.parent == 0
    assert sorted(turn.fork or "" for turn in stored.turns) == ["", "", "branched", "branched", *["sibling"] * 5]
    assert verify(location).ok


def test_a_session_that_begins_at_two_gateways_at_once_is_one(replicas: list[Replica]) -> None:
    gate = threading.Event()
    for one in replicas:
        one.engine.gate = gate
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(one.ask, [QUESTION]) for one in replicas]
        for one in replicas:
            assert one.engine.called.wait(PATIENCE)
        gate.set()
        told = [one.result() for one in asked]
    assert sorted(map(turn_of, told)) == [0, 1]
    assert [len(one.store.load_session("s").turns) for one in replicas] == [2, 2]
    # Both go on.
    for one, first in zip(replicas, told, strict=True):
        again = one.ask([QUESTION, reply_of(first), {"role": "user", "content": "and?"}])
        assert replicas[0].store.load_session("s").turns[turn_of(again)].parent == turn_of(first)


@pytest.mark.parametrize("headers", [{"idempotency-key": "k"}, RETRY])
@pytest.mark.parametrize("path", ["/sessions/s/v1", "/v1"])
def test_a_retry_at_another_gateway_gets_the_recorded_reply(
    replicas: list[Replica], headers: dict[str, str], path: str
) -> None:
    first = replicas[0].ask([QUESTION], path, headers={} if headers is RETRY else headers)
    again = replicas[1].ask([QUESTION], path, headers=headers)
    assert again.json() == first.json()
    assert again.headers["x-tokentape-replayed"] == "true"
    assert (len(replicas[0].engine.asked), len(replicas[1].engine.asked)) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_of_one_call_at_two_gateways_at_once_one_is_recorded(replicas: list[Replica], stream: bool) -> None:
    gate = threading.Event()
    for one in replicas:
        one.engine.gate = gate
    key = {"idempotency-key": "k"}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(one.ask, [QUESTION], headers=key, stream=stream) for one in replicas]
        for one in replicas:
            assert one.engine.called.wait(PATIENCE)
        gate.set()
        told = [one.result() for one in asked]
    stored = replicas[0].store.load_session("s")
    assert sorted(turn.abort_cause or "" for turn in stored.turns) == ["", "answered_elsewhere"]
    assert len(stored.trajectories()) == 1
    refused = [one for one in told if "answered_elsewhere" in one.text]
    assert len(refused) == 1
    if not stream:
        assert (refused[0].status_code, refused[0].headers["x-should-retry"]) == (409, "true")
    again = [one.ask([QUESTION], headers=key, stream=stream) for one in replicas]
    assert [one.headers["x-tokentape-replayed"] for one in again] == ["true", "true"]
    if not stream:
        assert again[0].json() == again[1].json()
        assert again[0].json()["choices"][0]["token_ids"] == stored.turns[0].completion_ids.tolist()


def test_a_retry_at_another_gateway_takes_back_a_mark_made_meanwhile(replicas: list[Replica]) -> None:
    first, second = replicas
    turn = turn_of(first.ask([QUESTION], headers={"idempotency-key": "k"}))
    assert second.get("/sessions/s")["leaves"]
    asyncio.run(first.store.write(Event("s", turn, UNREAD, {"unread": True}, time.time())))
    second.ask([QUESTION], headers={"idempotency-key": "k"})
    until(lambda: not second.turns.unread._writing)
    assert unread_turns(first.store.load_session("s").events) == set()


@pytest.mark.parametrize("unread", [True, False])
def test_columns_follow_a_mark_that_another_gateway_made_or_took_back(replicas: list[Replica], unread: bool) -> None:
    """Turn 1 begins the earlier branch, which trains turn 0 too; if no client read it, the branch of turn 2 does."""
    first, second = replicas
    asked: list[Any] = [QUESTION]
    asked.append(reply_of(first.ask(asked)))
    for more in ("Go on.", "Stop."):
        first.ask([*asked, {"role": "user", "content": more}])
    marks = [Event("s", 1, UNREAD, {"unread": mark}, time.time()) for mark in (not unread, unread)]
    asyncio.run(first.store.write(marks[0]))
    assert second.get("/sessions/s/trajectories")["data"]
    asyncio.run(first.store.write(marks[1]))
    leaf = next(one for one in second.get("/sessions/s")["leaves"] if one["turn"] == 2)
    body = {"leaf": 2, "columns": {"advantages": [0.5] * leaf["tokens"]}}
    written = httpx2.post(f"{second.url}/sessions/s/columns", json=body, timeout=PATIENCE)
    assert written.json()["turns"] == ([0, 2] if unread else [2]), written.text


def test_a_session_that_is_deleted_elsewhere_is_gone_here(replicas: list[Replica]) -> None:
    one, two = replicas
    first = one.ask([QUESTION])
    assert turn_of(two.ask([QUESTION, reply_of(first), QUESTION])) == 1
    assert httpx2.delete(f"{one.url}/sessions/s").status_code == 204
    assert httpx2.get(f"{two.url}/sessions/s").status_code == 404
    # Begun anew, it has nothing of the old one, at neither.
    assert turn_of(two.ask([QUESTION])) == 0
    assert turn_of(one.ask([QUESTION, reply_of(first), QUESTION])) == 1
    assert [turn.parent for turn in one.store.load_session("s").turns] == [None, None]


@pytest.mark.parametrize("begun_again", [False, True])
def test_a_turn_of_a_session_that_is_deleted_elsewhere_meanwhile_is_refused(
    replicas: list[Replica], begun_again: bool
) -> None:
    one, two = replicas
    first = one.ask([QUESTION])
    two.engine.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(two.ask, [QUESTION, reply_of(first), QUESTION])
        assert two.engine.called.wait(PATIENCE)
        httpx2.delete(f"{one.url}/sessions/s")
        if begun_again:
            one.ask([QUESTION])
            one.ask([QUESTION])
        two.engine.gate.set()
        assert asked.result().status_code == 404
    assert len(one.get("/sessions")["data"]) == begun_again
    if begun_again:
        assert [turn.parent for turn in two.store.load_session("s").turns] == [None, None]


def test_an_aborted_turn_is_not_recorded_in_a_session_that_somebody_else_began(replicas: list[Replica]) -> None:
    one, two = replicas
    one.engine.stall_after = 2
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(one.ask, [QUESTION])
        assert one.engine.stalled.wait(PATIENCE)
        asyncio.run(two.store.write(SessionInfo("s", time.time(), {}, "somebody")))
        paused = httpx2.post(f"{two.url}/engine/pause", json={"mode": "abort", "timeout": 200}, timeout=PATIENCE)
        assert paused.status_code == 200
        assert asked.result().status_code >= 400
    stored = two.store.load_session("s")
    assert (stored.info.owner, stored.turns) == ("somebody", ())


def test_rewards_columns_and_snapshots_are_for_what_every_gateway_has_recorded(replicas: list[Replica]) -> None:
    one, two = replicas
    first = one.ask([QUESTION])
    sampled = len(first.json()["choices"][0]["token_ids"])
    assert turn_of(two.ask([QUESTION, reply_of(first), QUESTION])) == 1
    for number, replica in enumerate((one, two)):
        given = {"value": number, "leaf": 1}
        assert httpx2.post(f"{replica.url}/sessions/s/reward", json=given).status_code == 201
    columns = {"turn": 0, "columns": {"advantages": [0.5] * sampled}}
    assert httpx2.post(f"{two.url}/sessions/s/columns", json=columns).status_code == 201
    taken = httpx2.post(f"{one.url}/snapshots", json={}).json()
    (shown,) = two.get("/sessions/s/trajectories")["data"]
    assert shown["reward"] == 1
    number, digest = taken["snapshot_id"], taken["digest"]
    # What comes later at the other gateway is in no snapshot, and keeps the session from being dropped.
    assert turn_of(two.ask([QUESTION])) == 2
    lines = httpx2.get(f"{two.url}/snapshots/{number}/trajectories").text.splitlines()
    assert len(lines) == 1
    confirm = {"digest": digest, "drop_sessions": True}
    kept = httpx2.post(f"{two.url}/snapshots/{number}/confirm", json=confirm).json()
    assert kept["kept"] == [{"session_id": "s", "reason": "changed since the snapshot"}]


def test_a_session_that_was_dropped_elsewhere_is_refused_before_it_is_sampled(replicas: list[Replica]) -> None:
    one, two = replicas
    one.ask([QUESTION])
    assert turn_of(two.ask([QUESTION])) == 1
    taken = httpx2.post(f"{one.url}/snapshots", json={}).json()
    confirm = {"digest": taken["digest"], "drop_sessions": True}
    assert httpx2.post(f"{one.url}/snapshots/{taken['snapshot_id']}/confirm", json=confirm).json()["dropped"] == ["s"]
    asked = len(two.engine.asked)
    assert two.ask([QUESTION]).status_code == 409
    assert len(two.engine.asked) == asked


@pytest.mark.slow
@pytest.mark.parametrize("location", ["postgres"], indirect=True)
def test_a_snapshot_shows_the_same_while_another_gateway_writes(replicas: list[Replica]) -> None:
    one, two = replicas
    one.ask([QUESTION])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            httpx2.post(f"{two.url}/sessions/s/reward", json={"value": time.time()})

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(5):
            taken = httpx2.post(f"{one.url}/snapshots", json={}).json()
            shown = httpx2.get(f"{two.url}/snapshots/{taken['snapshot_id']}/trajectories")
            assert shown.headers["x-tokentape-digest"] == taken["digest"]
            again = httpx2.get(f"{one.url}/snapshots/{taken['snapshot_id']}/trajectories")
            assert again.text == shown.text
    finally:
        stop.set()
        writing.join()


def test_all_gateways_pause_and_resume_together(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = replicas
    two.engine.gate = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        sampling = pool.submit(two.ask, [QUESTION])
        assert two.engine.called.wait(PATIENCE)
        asked = pool.submit(httpx2.post, f"{one.url}/engine/pause", json={"timeout": 200}, timeout=PATIENCE)
        until(lambda: two.get("/engine")["paused"])
        assert not asked.done(), "the other gateway has a call under way"
        # The other gateway closes its gate before it has written down how many calls it has.
        until(lambda: httpx2.get(f"{one.url}/engine").json()["calls_under_way"] == 1)
        two.engine.gate.set()
        assert turn_of(sampling.result()) == 0
        paused = asked.result().json()
        assert (paused["paused"], paused["idle"], paused["calls_under_way"], paused["gateways"]) == (True, True, 0, 2)
        assert two.get("/engine")["paused"]
        at_the_gate = calls_of(monkeypatch, Gate, "opened")
        waiting = pool.submit(two.ask, [QUESTION])
        assert at_the_gate.acquire(timeout=PATIENCE)
        assert not waiting.done()
        assert httpx2.post(f"{one.url}/engine/resume", json={"weight_version": "step-2"}).status_code == 200
        assert turn_of(waiting.result()) == 1
    assert two.get("/engine")["weight_version"] == "step-2"
    for body in ({"weight_version": "7", "adapter": "a"}, {"weight_version": "9", "adapter": "b"}):
        assert httpx2.post(f"{one.url}/engine/resume", json=body).status_code == 200
    until(lambda: two.get("/engine")["adapter_versions"] == {"a": "7", "b": "9"})
    assert httpx2.post(f"{two.url}/engine/resume", json={"weight_version": "step-3"}).status_code == 200
    until(lambda: one.get("/engine")["weight_version"] == "step-3")
    assert one.get("/engine")["adapter_versions"] == {"a": "7", "b": "9"}


def test_pausing_with_abort_ends_the_calls_of_all_gateways(replicas: list[Replica]) -> None:
    one, two = replicas
    two.engine.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(two.ask, [QUESTION])
        assert two.engine.called.wait(PATIENCE)
        paused = httpx2.post(f"{one.url}/engine/pause", json={"mode": "abort", "timeout": 200}, timeout=PATIENCE).json()
        assert paused["idle"]
        assert sampling.result().status_code == 503
    (turn,) = one.store.load_session("s").turns
    assert turn.abort_cause == "paused"


@pytest.mark.slow
@pytest.mark.parametrize("location", ["postgres"], indirect=True)
def test_a_gateway_that_died_is_not_waited_for(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausing, "DEAD_SECONDS", 3.0)
    one, _ = replicas
    dead = GatewayState("dead", beat=7, heard=0, under_way=3)
    asyncio.run(one.store.transact(partial(tell, state=dead)))
    began = time.monotonic()
    assert httpx2.post(f"{one.url}/engine/pause", json={"timeout": 200}, timeout=PATIENCE).json()["idle"]
    assert time.monotonic() - began >= 3
    assert one.get("/engine")["gateways"] == 2
