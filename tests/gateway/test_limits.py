"""Limits, owners and idle sessions, through the whole gateway."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE, until
from tokentape.chat._renderer import Renderer
from tokentape.errors import TooLarge
from tokentape.gateway import _http as http_module
from tokentape.gateway import _limits as limits_module
from tokentape.gateway import _session_cache as session_cache
from tokentape.gateway._app import create_app
from tokentape.gateway._http import check_count
from tokentape.gateway._keys import Keys
from tokentape.gateway._limits import InFlightCounter, Limits
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.store._lock import LOCK_NAME

A, B, ROOT = "team-a-secret-0123456789", "team-b-secret-0123456789", "root-secret-0123456789"
KEYS = Keys({"a": A, "b": B}, {"root": ROOT})
ANSWER = "4<|im_end|>"
QUESTION: dict[str, Any] = {"role": "user", "content": "2 + 2?"}

Serve = Callable[..., httpx2.Client]


def test_a_wait_for_idle_ends_with_the_last_call_even_if_it_has_just_begun() -> None:
    async def main() -> bool:
        counter = InFlightCounter()
        with counter:
            waiting = asyncio.create_task(counter.idle(3600))
            await asyncio.sleep(0)
        return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(main())


@pytest.fixture
def engine(renderer: Renderer) -> ScriptedEngine:
    return ScriptedEngine(renderer, [ANSWER] * 20)


@pytest.fixture
def serve(renderer: Renderer, store: SqliteStore, engine: ScriptedEngine) -> Iterator[Serve]:
    with ExitStack() as opened:

        def start(limits: Limits | None = None, keys: Keys | None = None) -> httpx2.Client:
            turns = Turns(engine, renderer, store, limits=limits)
            url = opened.enter_context(running(create_app(turns, model_id="m", keys=keys)))
            return opened.enter_context(httpx2.Client(base_url=url, timeout=PATIENCE))

        yield start


def ask(http: httpx2.Client, session_id: str, key: str | None = None, **more: Any) -> httpx2.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"messages": [QUESTION], **more}
    return http.post(f"/sessions/{session_id}/v1/chat/completions", json=body, headers=headers)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def stopped_clock(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    monkeypatch.setattr(limits_module, "time", SimpleNamespace(time=lambda: now[-1]))


@pytest.mark.parametrize(
    ("path", "shape"), [("/v1/chat/completions", {"error"}), ("/v1/messages", {"type", "error", "request_id"})]
)
def test_calls_per_window_are_limited_for_each_key(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, shape: set[str]
) -> None:
    now = [1_000_000_010.0]
    stopped_clock(monkeypatch, now)
    http = serve(Limits(calls_per_window=2, window_seconds=100.0), KEYS)

    def called(key: str) -> httpx2.Response:
        body = {"model": "m", "messages": [QUESTION], "max_tokens": 9}
        return http.post(path, json=body, headers=bearer(key))

    assert [called(A).status_code for _ in range(2)] == [200, 200]
    refused = called(A)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "90")
    assert refused.json().keys() <= shape
    assert "2 calls per 100 s" in refused.json()["error"]["message"]
    assert called(B).status_code == 200
    # A clock that is set back gives nothing; the next window does.
    now.append(999_999_000.0)
    assert called(A).status_code == 429
    now.append(1_000_000_101.0)
    assert called(A).status_code == 200


def test_tokens_per_window_exclude_replayed_replies(
    serve: Serve, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_clock(monkeypatch, [1_000_000_000.0])
    http = serve()
    usage = ask(http, "s").json()["usage"]
    cost = usage["prompt_tokens"] + usage["completion_tokens"]
    http = serve(Limits(tokens_per_window=cost + 1), KEYS)
    body = {"messages": [QUESTION]}

    def keyed(session_id: str, stream: bool = False) -> httpx2.Response:
        headers = {**bearer(A), "idempotency-key": session_id}
        return http.post(f"/sessions/{session_id}/v1/chat/completions", json=body | {"stream": stream}, headers=headers)

    assert [keyed(name).status_code for name in ("t", "t", "t")] == [200] * 3
    assert keyed("u", stream=True).status_code == 200
    assert keyed("v").status_code == 429
    assert "tokens per 3600 s" in keyed("v").json()["error"]["message"]


def test_tokens_per_window_include_those_of_disconnected_clients(
    serve: Serve, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_clock(monkeypatch, [1_000_000_000.0])
    prompt = ask(serve(), "s").json()["usage"]["prompt_tokens"]
    engine.replies, engine.stall_after = ["4 " * 30 + ANSWER] * 2, 10
    http = serve(Limits(tokens_per_window=prompt + 10), KEYS)
    path, body = "/sessions/t/v1/chat/completions", {"messages": [QUESTION], "stream": True}
    with http.stream("POST", path, json=body, headers=bearer(A)) as reply:
        assert next(reply.iter_lines())
        assert engine.stalled.wait(PATIENCE)
    assert engine.aborted.wait(PATIENCE)
    until(lambda: http.get("/sessions/t", headers=bearer(A)).status_code == 200)
    engine.stall_after = None
    assert ask(http, "u", A).status_code == 429


PARTS = [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", lambda count: {"messages": [QUESTION] * count}),
        ("/v1/chat/completions", lambda count: {"messages": [{"role": "user", "content": PARTS * (count - 1)}]}),
        ("/v1/messages", lambda count: {"messages": [QUESTION] * count, "max_tokens": 9}),
        ("/v1/messages", lambda count: {"messages": [QUESTION], "system": PARTS * count, "max_tokens": 9}),
        ("/v1/responses", lambda count: {"input": [QUESTION] * count}),
    ],
)
def test_too_many_messages_are_refused_before_they_are_read(
    serve: Serve, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: Callable[[int], Any]
) -> None:
    monkeypatch.setattr(http_module, "MAX_ENTRIES", 30)
    gateway = serve()
    refused = gateway.post(path, json={"model": "m", **body(31)})
    assert (refused.status_code, refused.headers["x-should-retry"]) == (413, "false")
    assert "more than 30 entries and parts" in refused.text
    assert gateway.post(path, json={"model": "m", **body(30)}).status_code == 200


def test_lists_inside_data_do_not_count_as_entries(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_ENTRIES", 30)
    numbers = list(range(100))
    schema = {"type": "object", "properties": {"a": {"enum": numbers}}}
    function = {"name": "f", "arguments": json.dumps({"a": numbers})}
    call = {"id": "call_1", "type": "function", "function": function}
    body = {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
    }
    assert serve().post("/v1/chat/completions", json=body).status_code == 200
    uses = [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": numbers}}]
    assert check_count({"messages": [{"role": "assistant", "content": uses}]}, ("messages",), ("content",)) == 2
    results = [{"type": "tool_result", "tool_use_id": "t", "content": PARTS * 30}]
    with pytest.raises(TooLarge, match="more than 30"):
        check_count({"messages": [{"role": "user", "content": results}]}, ("messages",), ("content",))


def test_known_messages_count_like_new_ones(
    serve: Serve, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "MAX_ENTRIES", 30)
    gateway = serve()
    codes = [
        gateway.post("/sessions/s/v1/chat/completions", json={"messages": [QUESTION] * count}).status_code
        for count in (10, 20, 31, 30)
    ]
    assert codes == [200, 200, 413, 200]


PATHS = [
    ("GET", "/v1/models", None),
    ("POST", "/v1/chat/completions", {"messages": [QUESTION]}),
    ("GET", "/sessions", None),
    ("POST", "/sessions", {}),
    ("GET", "/sessions/s", None),
    ("DELETE", "/sessions/s", None),
    ("GET", "/sessions/s/trajectories", None),
    ("POST", "/sessions/s/reward", {"value": 1}),
]


@pytest.mark.parametrize(("method", "path", "body"), PATHS)
def test_every_endpoint_requires_a_key(serve: Serve, method: str, path: str, body: Any) -> None:
    http = serve(keys=KEYS)
    for headers in ({}, bearer("wrong-secret-0123456789")):
        answer = http.request(method, path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key(serve: Serve) -> None:
    http = serve(keys=KEYS)
    assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [entry for entry in PATHS if entry[1].startswith("/sessions/s")]
    + [("POST", "/sessions/s/v1/chat/completions", {"messages": [QUESTION]})],
)
def test_session_of_another_owner_is_a_404(serve: Serve, method: str, path: str, body: Any) -> None:
    http = serve(keys=KEYS)
    assert ask(http, "s", A).status_code == 200
    foreign = http.request(method, path, json=body, headers=bearer(B))
    assert foreign.status_code == 404
    assert foreign.json()["error"]["code"] == "not_found"
    if not path.endswith("completions"):
        unknown = http.request(method, path.replace("/sessions/s", "/sessions/u"), json=body, headers=bearer(B))
        assert unknown.status_code == 404
        assert unknown.text.replace("'u'", "'s'") == foreign.text
    assert len(http.get("/sessions/s", headers=bearer(A)).json()["turns"]) == 1


def test_a_key_lists_its_own_sessions_and_an_admin_key_all(serve: Serve) -> None:
    http = serve(keys=KEYS)
    ask(http, "s", A)
    ask(http, "t", B)
    listed = {
        key: [session["session_id"] for session in http.get("/sessions", headers=bearer(key)).json()["data"]]
        for key in (A, B, ROOT)
    }
    assert listed == {A: ["s"], B: ["t"], ROOT: ["s", "t"]}


def test_a_session_key_is_all_that_an_agent_needs(serve: Serve) -> None:
    http = serve(keys=KEYS)
    made = http.post("/sessions", json={"session_id": "s"}, headers=bearer(A)).json()
    with OpenAI(base_url=f"{http.base_url}/v1", api_key=made["api_key"], max_retries=0) as client:
        client.chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
        assert len(http.get("/sessions/s", headers=bearer(A)).json()["turns"]) == 1
        with pytest.raises(openai.PermissionDeniedError):
            client.get("../sessions", cast_to=object)
    assert ask(http, "t", made["api_key"]).status_code == 400
    assert http.get("/sessions/t", headers=bearer(made["api_key"])).status_code == 404


def test_calls_over_the_limit_of_a_key_are_429_with_a_time_to_wait(serve: Serve, engine: ScriptedEngine) -> None:
    http = serve(Limits(calls_per_key=1), KEYS)
    gate = engine.gate = threading.Event()

    async def both() -> tuple[httpx2.Response, httpx2.Response, httpx2.Response]:
        first = asyncio.create_task(asyncio.to_thread(ask, http, "s", A))
        assert await asyncio.to_thread(engine.called.wait, PATIENCE)
        refused = await asyncio.to_thread(ask, http, "t", A)
        other = asyncio.create_task(asyncio.to_thread(ask, http, "u", B))
        gate.set()
        return await first, refused, await other

    first, refused, other = asyncio.run(both())
    assert (first.status_code, refused.status_code, other.status_code) == (200, 429, 200)
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-should-retry"] == "true"
    assert ask(http, "t", A).status_code == 200


def test_stream_counts_as_running_until_its_end(serve: Serve, engine: ScriptedEngine) -> None:
    http = serve(Limits(calls_per_key=1), KEYS)
    engine.stall_after = 1
    body = {"messages": [QUESTION], "stream": True}
    with http.stream("POST", "/sessions/s/v1/chat/completions", json=body, headers=bearer(A)) as begun:
        assert begun.status_code == 200
        assert engine.stalled.wait(PATIENCE)
        assert ask(http, "t", A).status_code == 429
        engine.stall_after = None
    # The server sees that the client has left a moment later.
    until(lambda: ask(http, "t", A).status_code != 429)
    assert ask(http, "t", A).status_code == 200


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock for idle sessions. It only moves when a test advances it."""
    hands = SimpleNamespace(now=1000.0, time=time.time)
    hands.monotonic = lambda: hands.now
    monkeypatch.setattr(session_cache, "time", hands)
    return hands


def test_sessions_over_the_limit_wait_for_an_idle_one(serve: Serve, clock: SimpleNamespace) -> None:
    http = serve(Limits(open_sessions=2, idle_seconds=1.0))
    assert [ask(http, name).status_code for name in "abc"] == [200, 200, 429]
    refused = ask(http, "c")
    assert int(refused.headers["retry-after"]) == 1
    clock.now += 1.1
    assert ask(http, "c").status_code == 200


def test_idle_session_continues_where_it_was(serve: Serve, store: SqliteStore, clock: SimpleNamespace) -> None:
    http = serve(Limits(idle_seconds=0.05))
    reply = ask(http, "s").json()["choices"][0]["message"]
    clock.now += 0.1
    ask(http, "other")
    ask(http, "s", messages=[QUESTION, reply, QUESTION])
    assert [turn.parent for turn in store.load_session("s").turns] == [None, 0]


def test_turns_over_the_session_limit_are_refused_permanently(serve: Serve) -> None:
    http = serve(Limits(turns_per_session=2))
    assert ask(http, "s", n=3).status_code == 429
    assert [ask(http, "s").status_code for _ in range(3)] == [200, 200, 429]
    assert ask(http, "s").headers["x-should-retry"] == "false"


def test_a_call_over_the_limit_begins_no_session(serve: Serve) -> None:
    http = serve(Limits(turns_per_session=2, open_sessions=1))
    assert ask(http, "s", n=3).status_code == 429
    assert http.get("/sessions/s").status_code == 404
    assert ask(http, "t").status_code == 200


def test_running_turns_count_toward_the_session_limit(serve: Serve, engine: ScriptedEngine) -> None:
    http = serve(Limits(turns_per_session=2))
    gate = engine.gate = threading.Event()
    with ThreadPoolExecutor(1) as other:
        first = other.submit(ask, http, "s", n=2)
        try:
            assert engine.called.wait(PATIENCE)
            refused = ask(http, "s", seed=1)
        finally:
            gate.set()
        assert (first.result().status_code, refused.status_code) == (200, 429)
    # What is under way may fail and make room.
    assert (refused.headers["x-should-retry"], refused.headers["retry-after"]) == ("true", "1")
    assert ask(http, "s").headers["x-should-retry"] == "false"


def test_broken_store_is_detected_before_the_engine_is_called(
    serve: Serve, engine: ScriptedEngine, tmp_path: Path
) -> None:
    http = serve()
    assert ask(http, "s").status_code == 200
    (tmp_path / "data" / LOCK_NAME).unlink()
    assert [ask(http, "s").status_code for _ in range(3)] == [503, 503, 503]
    # The first of them noticed it when it was to be recorded.
    assert len(engine.requests) == 2


def test_conflicting_session_names_are_refused(serve: Serve) -> None:
    http = serve()
    body = {"messages": [QUESTION]}
    key = http.post("/sessions", json={"session_id": "t"}).json()["api_key"]
    answer = http.post("/sessions/s/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")
