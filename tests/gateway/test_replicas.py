"""Several gateways over one record, none of which knows of the others: every call may go to any of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.postgres import Server
from tests.vocabularies import changed_tokenizer
from tests.waiting import PATIENCE, calls_of, until
from tokentape._session.tree import UNREAD, unread_turns
from tokentape.chat._renderer import Renderer
from tokentape.errors import InvalidRequest, StoreError
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
    """A gateway on a socket, with its own engine and a number of scripted replies."""

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


def opener(opened: ExitStack, location: str | Path) -> Callable[[], Store]:
    """Opens the record for one of several gateways."""

    def store() -> Store:
        if isinstance(location, str):
            return PostgresStore.open(location)
        writers = InterprocessLock(location)
        opened.callback(writers.close)
        return SqliteStore.open(location, writers=writers)

    return store


@pytest.fixture
def replicas(renderer: Renderer, location: str | Path) -> Iterator[list[Replica]]:
    """Two gateways over one record."""
    with ExitStack() as opened:
        store = opener(opened, location)
        yield [Replica(opened, renderer, store(), name) for name in ("one", "two")]


def reply_of(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return {"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]}


def turn_of(response: httpx2.Response) -> int:
    assert response.status_code == 200, response.text
    turn: int = response.json()["choices"][0]["tokentape"]["turn"]
    return turn


def test_session_continues_at_any_gateway(replicas: list[Replica], location: str | Path) -> None:
    messages: list[Any] = []
    context: list[int] = []
    for number in range(8):
        messages.append({"role": "user", "content": f"question {number}"})
        reply = replicas[number % 2].ask(messages).json()
        assert reply["prompt_token_ids"][: len(context)] == context
        context = reply["prompt_token_ids"] + reply["choices"][0]["token_ids"]
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    (leaf,) = replicas[0].get("/sessions/s")["leaves"]
    assert (leaf["turn"], leaf["verdict"], leaf["tokens"]) == (7, "exact", len(context))
    assert verify(location).ok


def test_a_replica_with_another_vocabulary_does_not_start(
    location: str | Path, renderer: Renderer, model_dir: Path
) -> None:
    other = Renderer(changed_tokenizer(model_dir), renderer.template)
    with ExitStack() as opened:
        store = opener(opened, location)
        first = store()
        # A gateway that recorded nothing has left another vocabulary.
        asyncio.run(first.bind(other.tokenizer))
        Replica(opened, renderer, first, "one")
        # The first one serves, and has recorded nothing yet.
        with pytest.raises(InvalidRequest, match="belongs to another tokenizer"):
            Replica(opened, other, store(), "two")
        Replica(opened, renderer, store(), "three")


def test_concurrent_turns_are_recorded_as_siblings(replicas: list[Replica], location: str | Path) -> None:
    reply = reply_of(replicas[0].ask([QUESTION]))
    go = threading.Barrier(8)

    def ask(number: int) -> httpx2.Response:
        go.wait()
        return replicas[number % 2].ask([QUESTION, reply, {"role": "user", "content": f"question {number % 3}"}])

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(ask, range(8)))
    assert sorted(map(turn_of, responses)) == list(range(1, 9))
    stored = replicas[0].store.load_session("s")
    for response in responses:
        turn = stored.turns[turn_of(response)]
        assert turn.completion_ids.tolist() == response.json()["choices"][0]["token_ids"]
        assert turn.parent == 0
    assert sorted(turn.fork or "" for turn in stored.turns) == ["", "", "branched", "branched", *["sibling"] * 5]
    assert verify(location).ok


def test_session_started_at_two_gateways_at_once_is_one_session(replicas: list[Replica]) -> None:
    gate = threading.Event()
    for replica in replicas:
        replica.engine.gate = gate
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(replica.ask, [QUESTION]) for replica in replicas]
        for replica in replicas:
            assert replica.engine.called.wait(PATIENCE)
        gate.set()
        responses = [future.result() for future in futures]
    assert sorted(map(turn_of, responses)) == [0, 1]
    assert [len(replica.store.load_session("s").turns) for replica in replicas] == [2, 2]
    # Both go on.
    for gateway, first in zip(replicas, responses, strict=True):
        again = gateway.ask([QUESTION, reply_of(first), {"role": "user", "content": "and?"}])
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
    assert (len(replicas[0].engine.requests), len(replicas[1].engine.requests)) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_same_call_at_two_gateways_at_once_is_recorded_once(replicas: list[Replica], stream: bool) -> None:
    gate = threading.Event()
    for replica in replicas:
        replica.engine.gate = gate
    key = {"idempotency-key": "k"}
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(replica.ask, [QUESTION], headers=key, stream=stream) for replica in replicas]
        for gateway in replicas:
            assert gateway.engine.called.wait(PATIENCE)
        gate.set()
        responses = [future.result() for future in futures]
    stored = replicas[0].store.load_session("s")
    assert sorted(turn.abort_cause or "" for turn in stored.turns) == ["", "answered_elsewhere"]
    assert len(stored.trajectories()) == 1
    refused = [response for response in responses if "answered_elsewhere" in response.text]
    assert len(refused) == 1
    if not stream:
        assert (refused[0].status_code, refused[0].headers["x-should-retry"]) == (409, "true")
    again = [replica.ask([QUESTION], headers=key, stream=stream) for replica in replicas]
    assert [response.headers["x-tokentape-replayed"] for response in again] == ["true", "true"]
    if not stream:
        assert again[0].json() == again[1].json()
        assert again[0].json()["choices"][0]["token_ids"] == stored.turns[0].completion_ids.tolist()


def test_retry_at_another_gateway_removes_the_unread_mark(replicas: list[Replica]) -> None:
    first, second = replicas
    turn = turn_of(first.ask([QUESTION], headers={"idempotency-key": "k"}))
    assert second.get("/sessions/s")["leaves"]
    asyncio.run(first.store.write(Event("s", turn, UNREAD, {"unread": True}, time.time())))
    second.ask([QUESTION], headers={"idempotency-key": "k"})
    until(lambda: not second.turns.unread._writing)
    assert unread_turns(first.store.load_session("s").events) == set()


@pytest.mark.parametrize("unread", [True, False])
def test_columns_follow_unread_marks_of_another_gateway(replicas: list[Replica], unread: bool) -> None:
    """Turn 1 begins the earlier branch, which trains turn 0 too; if no client read it, the branch of turn 2 does."""
    first, second = replicas
    messages: list[Any] = [QUESTION]
    messages.append(reply_of(first.ask(messages)))
    for more in ("Go on.", "Stop."):
        first.ask([*messages, {"role": "user", "content": more}])
    marks = [Event("s", 1, UNREAD, {"unread": mark}, time.time()) for mark in (not unread, unread)]
    asyncio.run(first.store.write(marks[0]))
    assert second.get("/sessions/s/trajectories")["data"]
    asyncio.run(first.store.write(marks[1]))
    leaf = next(item for item in second.get("/sessions/s")["leaves"] if item["turn"] == 2)
    body = {"leaf": 2, "columns": {"advantages": [0.5] * leaf["tokens"]}}
    written = httpx2.post(f"{second.url}/sessions/s/columns", json=body, timeout=PATIENCE)
    assert written.json()["turns"] == ([0, 2] if unread else [2]), written.text


def test_session_deleted_at_another_gateway_is_gone(replicas: list[Replica]) -> None:
    here, there = replicas
    first = here.ask([QUESTION])
    assert turn_of(there.ask([QUESTION, reply_of(first), QUESTION])) == 1
    assert httpx2.delete(f"{here.url}/sessions/s").status_code == 204
    assert httpx2.get(f"{there.url}/sessions/s").status_code == 404
    # A new session of that id has none of the old data, at either gateway.
    assert turn_of(there.ask([QUESTION])) == 0
    assert turn_of(here.ask([QUESTION, reply_of(first), QUESTION])) == 1
    assert [turn.parent for turn in here.store.load_session("s").turns] == [None, None]


@pytest.mark.parametrize("begun_again", [False, True])
def test_turn_is_refused_if_another_gateway_deletes_its_session(replicas: list[Replica], begun_again: bool) -> None:
    here, there = replicas
    first = here.ask([QUESTION])
    there.engine.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(there.ask, [QUESTION, reply_of(first), QUESTION])
        assert there.engine.called.wait(PATIENCE)
        httpx2.delete(f"{here.url}/sessions/s")
        if begun_again:
            here.ask([QUESTION])
            here.ask([QUESTION])
        there.engine.gate.set()
        assert future.result().status_code == 404
    assert len(here.get("/sessions")["data"]) == begun_again
    if begun_again:
        assert [turn.parent for turn in there.store.load_session("s").turns] == [None, None]


def test_aborted_turn_is_not_recorded_in_a_session_of_another_owner(replicas: list[Replica]) -> None:
    here, there = replicas
    here.engine.stall_after = 2
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(here.ask, [QUESTION])
        assert here.engine.stalled.wait(PATIENCE)
        asyncio.run(there.store.write(SessionInfo("s", time.time(), {}, "somebody")))
        paused = httpx2.post(f"{there.url}/engine/pause", json={"mode": "abort", "timeout": 200}, timeout=PATIENCE)
        assert paused.status_code == 200
        assert future.result().status_code >= 400
    stored = there.store.load_session("s")
    assert (stored.info.owner, stored.turns) == ("somebody", ())


def test_rewards_columns_and_snapshots_cover_turns_of_all_gateways(replicas: list[Replica]) -> None:
    here, there = replicas
    first = here.ask([QUESTION])
    sampled = len(first.json()["choices"][0]["token_ids"])
    assert turn_of(there.ask([QUESTION, reply_of(first), QUESTION])) == 1
    for number, replica in enumerate((here, there)):
        reward = {"value": number, "leaf": 1}
        assert httpx2.post(f"{replica.url}/sessions/s/reward", json=reward).status_code == 201
    columns = {"turn": 0, "columns": {"advantages": [0.5] * sampled}}
    assert httpx2.post(f"{there.url}/sessions/s/columns", json=columns).status_code == 201
    taken = httpx2.post(f"{here.url}/snapshots", json={}).json()
    (shown,) = there.get("/sessions/s/trajectories")["data"]
    assert shown["reward"] == 1
    number, digest = taken["snapshot_id"], taken["digest"]
    # What comes later at the other gateway is in no snapshot, and keeps the session from being dropped.
    assert turn_of(there.ask([QUESTION])) == 2
    lines = httpx2.get(f"{there.url}/snapshots/{number}/trajectories").text.splitlines()
    assert len(lines) == 1
    confirm = {"digest": digest, "drop_sessions": True}
    kept = httpx2.post(f"{there.url}/snapshots/{number}/confirm", json=confirm).json()
    assert kept["kept"] == [{"session_id": "s", "reason": "changed since the snapshot"}]


def test_session_dropped_at_another_gateway_is_refused_before_sampling(replicas: list[Replica]) -> None:
    here, there = replicas
    here.ask([QUESTION])
    assert turn_of(there.ask([QUESTION])) == 1
    taken = httpx2.post(f"{here.url}/snapshots", json={}).json()
    confirm = {"digest": taken["digest"], "drop_sessions": True}
    assert httpx2.post(f"{here.url}/snapshots/{taken['snapshot_id']}/confirm", json=confirm).json()["dropped"] == ["s"]
    requests = len(there.engine.requests)
    assert there.ask([QUESTION]).status_code == 409
    assert len(there.engine.requests) == requests


@pytest.mark.slow
@pytest.mark.parametrize("location", ["postgres"], indirect=True)
def test_snapshot_is_unchanged_while_another_gateway_writes(replicas: list[Replica]) -> None:
    here, there = replicas
    here.ask([QUESTION])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            httpx2.post(f"{there.url}/sessions/s/reward", json={"value": time.time()})

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(5):
            taken = httpx2.post(f"{here.url}/snapshots", json={}).json()
            shown = httpx2.get(f"{there.url}/snapshots/{taken['snapshot_id']}/trajectories")
            assert shown.headers["x-tokentape-digest"] == taken["digest"]
            again = httpx2.get(f"{here.url}/snapshots/{taken['snapshot_id']}/trajectories")
            assert again.text == shown.text
    finally:
        stop.set()
        writing.join()


def test_all_gateways_pause_and_resume_together(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = replicas
    there.engine.gate = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        sampling = pool.submit(there.ask, [QUESTION])
        assert there.engine.called.wait(PATIENCE)
        pause = pool.submit(httpx2.post, f"{here.url}/engine/pause", json={"timeout": 200}, timeout=PATIENCE)
        until(lambda: there.get("/engine")["paused"])
        assert not pause.done(), "the other gateway has a call under way"
        # The other gateway closes its gate before it has written down how many calls it has.
        until(lambda: httpx2.get(f"{here.url}/engine").json()["calls_under_way"] == 1)
        there.engine.gate.set()
        assert turn_of(sampling.result()) == 0
        paused = pause.result().json()
        assert (paused["paused"], paused["idle"], paused["calls_under_way"], paused["gateways"]) == (True, True, 0, 2)
        assert there.get("/engine")["paused"]
        at_the_gate = calls_of(monkeypatch, Gate, "opened")
        waiting = pool.submit(there.ask, [QUESTION])
        assert at_the_gate.acquire(timeout=PATIENCE)
        assert not waiting.done()
        assert httpx2.post(f"{here.url}/engine/resume", json={"weight_version": "step-2"}).status_code == 200
        assert turn_of(waiting.result()) == 1
    assert there.get("/engine")["weight_version"] == "step-2"
    for body in ({"weight_version": "7", "adapter": "a"}, {"weight_version": "9", "adapter": "b"}):
        assert httpx2.post(f"{here.url}/engine/resume", json=body).status_code == 200
    until(lambda: there.get("/engine")["adapter_versions"] == {"a": "7", "b": "9"})
    assert httpx2.post(f"{there.url}/engine/resume", json={"weight_version": "step-3"}).status_code == 200
    until(lambda: here.get("/engine")["weight_version"] == "step-3")
    assert here.get("/engine")["adapter_versions"] == {"a": "7", "b": "9"}


def test_pausing_with_abort_ends_the_calls_of_all_gateways(replicas: list[Replica]) -> None:
    here, there = replicas
    there.engine.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(there.ask, [QUESTION])
        assert there.engine.called.wait(PATIENCE)
        paused = httpx2.post(
            f"{here.url}/engine/pause", json={"mode": "abort", "timeout": 200}, timeout=PATIENCE
        ).json()
        assert paused["idle"]
        assert sampling.result().status_code == 503
    (turn,) = here.store.load_session("s").turns
    assert turn.abort_cause == "paused"


@pytest.mark.slow
@pytest.mark.parametrize("location", ["postgres"], indirect=True)
def test_pause_does_not_wait_for_a_dead_gateway(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausing, "DEAD_SECONDS", 3.0)
    here, _ = replicas
    dead = GatewayState("dead", beat=7, heard=0, under_way=3)
    asyncio.run(here.store.transact(partial(tell, state=dead)))
    began = time.monotonic()
    assert httpx2.post(f"{here.url}/engine/pause", json={"timeout": 200}, timeout=PATIENCE).json()["idle"]
    assert time.monotonic() - began >= 3
    assert here.get("/engine")["gateways"] == 2


async def fail(*args: Any, **options: Any) -> None:
    raise StoreError("read-only")


def test_gateway_whose_heartbeat_fails_is_not_ready(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    def status(replica: Replica) -> int:
        return httpx2.get(f"{replica.url}/readyz", timeout=PATIENCE).status_code

    monkeypatch.setattr(pausing, "BEAT_SECONDS", 0.0)
    here, there = replicas
    with monkeypatch.context() as patch:
        patch.setattr(there.store, "transact", fail)
        until(lambda: status(there) == 503)
        assert status(here) == 200
    until(lambda: status(there) == 200)


def test_gateway_stops_sampling_while_the_record_does_not_answer(
    replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, gate_state = threading.Event(), pausing.shared.gate_state
    _, there = replicas
    there.engine.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        sampling = pool.submit(there.ask, [QUESTION])
        assert there.engine.called.wait(PATIENCE)
        patch.setattr(pausing.shared, "gate_state", lambda record: (answers.wait(PATIENCE), gate_state(record))[1])
        patch.setattr(pausing, "ALONE_SECONDS", 0.5)
        try:
            assert sampling.result(PATIENCE).status_code == 503
            assert there.get("/engine")["paused"]
        finally:
            answers.set()
    until(lambda: not there.get("/engine")["paused"])


def test_gate_stays_closed_while_only_reading_works(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = calls_of(monkeypatch, Gate, "open")
    with monkeypatch.context() as patch:
        patch.setattr(pausing, "BEAT_SECONDS", 0.0)
        patch.setattr(pausing, "ALONE_SECONDS", 0.5)
        for replica in replicas:
            patch.setattr(replica.store, "transact", fail)
        until(lambda: all(replica.get("/engine")["paused"] for replica in replicas))
        assert not opened.acquire(timeout=1.0)
    until(lambda: not any(replica.get("/engine")["paused"] for replica in replicas))
