"""A trainer that pauses sampling, changes weights and resumes, while agents wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE, calls_of
from tokentape.chat._renderer import Renderer
from tokentape.client import Client
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import Keys
from tokentape.gateway._limits import Limits
from tokentape.gateway._pausing import Gate
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

QUESTION: dict[str, Any] = {"role": "user", "content": "2 + 2?"}
ROOT, TEAM = "root-secret-0123456789", "team-secret-0123456789"


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def http(renderer: Renderer, store: SqliteStore, limits: Limits) -> Iterator[httpx2.Client]:
    """A gateway over an engine that does not know the name of its weights."""
    engine = ScriptedEngine(renderer, ["four<|im_end|>"] * 5, weight_version=None)
    turns = Turns(engine, renderer, store, limits=limits)
    with running(create_app(turns, model_id="m")) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as http:
        yield http


def ask(http: httpx2.Client, session_id: str = "s", **more: Any) -> httpx2.Response:
    body = {"messages": [QUESTION], "max_tokens": 3, **more}
    return http.post(f"/sessions/{session_id}/v1/chat/completions", json=body)


def test_a_paused_call_waits_and_is_sampled_by_the_new_weights(
    http: httpx2.Client, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.post("/engine/resume", json={"weight_version": "step-1"}).json()["weight_version"] == "step-1"
    ask(http)
    paused = http.post("/engine/pause").json()
    assert (paused["paused"], paused["idle"], paused["calls_under_way"]) == (True, True, 0)
    at_the_gate = calls_of(monkeypatch, Gate, "opened")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, http)
        assert at_the_gate.acquire(timeout=PATIENCE)
        assert not waiting.done()
        http.post("/engine/resume", json={"weight_version": "step-2"})
        assert waiting.result().status_code == 200
    assert [turn.weight_version for turn in store.load_session("s").turns] == ["step-1", "step-2"]


def test_adapters_have_versions_of_their_own(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["four<|im_end|>"] * 8, weight_version=None)
    engine.info = replace(engine.info, sampling=engine.info.sampling | {"adapter"})
    with (
        running(create_app(Turns(engine, renderer, store), model_id="m")) as url,
        httpx2.Client(base_url=url, timeout=PATIENCE) as http,
        Client(url) as client,
    ):
        for name in ("a", "b"):
            http.post("/sessions", json={"session_id": name, "pin": {"adapter": name}})
        for version, adapter in (("step-1", None), ("a-7", "a"), ("a-8", "a")):
            client.resume(version, adapter=adapter)
            for name in ("a", "b"):
                ask(http, name)
        assert client.engine().weight_version == "step-1"
        assert client.engine().adapter_versions == {"a": "a-8"}
        refused = http.post("/engine/resume", json={"adapter": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "weight_version")
        versions = {name: [turn.weight_version for turn in store.load_session(name).turns] for name in ("a", "b")}
    assert versions == {"a": ["step-1", "a-7", "a-8"], "b": ["step-1"] * 3}


def test_restarted_gateway_stays_paused_until_it_is_resumed(renderer: Renderer, tmp_path: Path) -> None:
    engine = ScriptedEngine(renderer, ["four<|im_end|>"], weight_version=None)

    def gateway() -> AbstractContextManager[str]:
        turns = Turns(engine, renderer, SqliteStore.open(tmp_path), limits=Limits(pause_patience=0.1))
        return running(create_app(turns, model_id="m"))

    with gateway() as url, Client(url) as client:
        client.resume("step-1")
        assert client.pause()
    with gateway() as url, Client(url) as client, httpx2.Client(base_url=url, timeout=PATIENCE) as http:
        assert ask(http, "a").status_code == 503
        client.resume("step-2")
        ask(http, "a")
    with SqliteStore.open(tmp_path, read_only=True) as store:
        assert [turn.weight_version for turn in store.load_session("a").turns] == ["step-2"]


def test_restarted_gateway_records_the_versions_named_before(renderer: Renderer, tmp_path: Path) -> None:
    engine = ScriptedEngine(renderer, ["four<|im_end|>"] * 2, weight_version=None)
    engine.info = replace(engine.info, sampling=engine.info.sampling | {"adapter"})

    def gateway() -> AbstractContextManager[str]:
        return running(create_app(Turns(engine, renderer, SqliteStore.open(tmp_path)), model_id="m"))

    with gateway() as url, Client(url) as client:
        client.resume("step-1")
        client.resume("a-7", adapter="a")
    with gateway() as url, httpx2.Client(base_url=url, timeout=PATIENCE) as http:
        http.post("/sessions", json={"session_id": "a", "pin": {"adapter": "a"}})
        for name in ("a", "b"):
            ask(http, name)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        assert [store.load_session(name).turns[0].weight_version for name in ("a", "b")] == ["a-7", "step-1"]


@pytest.mark.parametrize("limits", [Limits(pause_patience=0.1)])
def test_call_that_waits_too_long_is_refused_with_a_retry_time(http: httpx2.Client) -> None:
    http.post("/engine/pause")
    answer = ask(http)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("5", "true")
    http.post("/engine/resume")
    assert ask(http).status_code == 200


def test_weight_changes_within_a_turn_are_recorded_by_token(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["a reply of several tokens<|im_end|>"], pause_after=3, weight_version=None)
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url, httpx2.Client(base_url=url) as http:
        http.post("/engine/resume", json={"weight_version": "old"})
        with ThreadPoolExecutor() as pool:
            future = pool.submit(ask, http, max_tokens=30)
            assert engine.stalled.wait(PATIENCE)
            assert http.post("/engine/pause", json={"timeout": 0}).json()["idle"] is False
            http.post("/engine/resume", json={"weight_version": "new"})
            engine.go_on.set()
            assert future.result().status_code == 200
        (turn,) = store.load_session("s").turns
    assert (turn.weight_version, turn.weight_changes) == ("old", ((3, "new"),))


def test_pausing_with_abort_records_running_calls_as_aborted(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["a reply of several tokens<|im_end|>"] * 2, pause_after=3)
    turns = Turns(engine, renderer, store, on_abort="resample")
    with running(create_app(turns, model_id="m")) as url, httpx2.Client(base_url=url) as http:
        with ThreadPoolExecutor() as pool:
            future = pool.submit(ask, http, max_tokens=30)
            assert engine.stalled.wait(PATIENCE)
            assert http.post("/engine/pause", json={"mode": "abort"}).json()["idle"] is True
            answer = future.result()
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
        http.post("/engine/resume")
        engine.go_on.set()
        assert ask(http, max_tokens=30).status_code == 200
        aborted, turn = store.load_session("s").turns
    assert (aborted.abort_cause, len(aborted.completion_ids)) == ("paused", 3)
    assert (turn.parent, turn.fork) == (None, None)


def test_only_an_admin_pauses(renderer: Renderer, store: SqliteStore) -> None:
    keys = Keys({"team": TEAM}, {"root": ROOT})
    app = create_app(Turns(ScriptedEngine(renderer, []), renderer, store), model_id="m", keys=keys)
    with running(app) as url, httpx2.Client(base_url=url) as http:
        for path in ("/engine/pause", "/engine/resume"):
            assert http.post(path, headers={"authorization": f"Bearer {TEAM}"}).status_code == 403
            assert http.post(path, headers={"authorization": f"Bearer {ROOT}"}).status_code == 200
        assert http.get("/engine", headers={"authorization": f"Bearer {TEAM}"}).json()["engine"].startswith("scripted")
        assert http.get("/engine").status_code == 401
