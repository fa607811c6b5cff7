"""One line per request, its id, and what the line never contains."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer
from tokentape.errors import EngineTimeout
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import Keys
from tokentape.gateway._logs import logging_to
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

MARK = "LEAKMARKER"
KEY = f"{MARK}-{MARK}"
ADMIN = f"{MARK}-admin-{MARK}"
KEYS = Keys({"alice": KEY}, {"ops": ADMIN})
CHAT = "/sessions/s/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def logged(engine: ScriptedEngine, renderer: Renderer, store: SqliteStore, keys: Keys = KEYS) -> Iterator[Any]:
    """A client of a gateway that logs at level DEBUG, and its log."""
    stream = StringIO()
    app = create_app(Turns(engine, renderer, store), model_id="m", keys=keys)
    with logging_to(stream, level="debug", form="json"), running(app) as url:
        headers = {"authorization": f"Bearer {KEY}"} if keys else {}
        with httpx2.Client(base_url=url, headers=headers) as http:
            yield http, stream


def access_lines(stream: StringIO) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["logger"] == "tokentape.access"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line(renderer: Renderer, store: SqliteStore, stream: bool) -> None:
    with logged(ScriptedEngine(renderer, ["hello"]), renderer, store) as (http, log):
        answer = http.post(CHAT, json={**HELLO, "stream": stream}, headers={"X-Request-Id": "rollout-7.1"})
    assert answer.headers["x-request-id"] == "rollout-7.1"
    (line,) = access_lines(log)
    assert line["bytes_out"] == len(answer.content)
    assert line["bytes_in"] == int(answer.request.headers["content-length"])
    assert line["duration_ms"] > 0
    (engine_request,) = line["engine_requests"]
    assert len(engine_request) == 24
    assert {name: line[name] for name in ("method", "route", "status", "session_id", "turns", "key", "request_id")} == {
        "method": "POST",
        "route": "/sessions/{session_id}/v1/chat/completions",
        "status": 200,
        "session_id": "s",
        "turns": [0],
        "key": "alice",
        "request_id": "rollout-7.1",
    }


@pytest.mark.parametrize("request_id", [None, "has space", "x" * 129, "a/b"])
def test_a_request_without_a_name_gets_one(renderer: Renderer, store: SqliteStore, request_id: str | None) -> None:
    with logged(ScriptedEngine(renderer, []), renderer, store) as (http, log):
        answer = http.get("/v1/models", headers={} if request_id is None else {"X-Request-Id": request_id})
    (line,) = access_lines(log)
    assert answer.headers["x-request-id"] == line["request_id"] != request_id
    assert len(line["request_id"]) == 32


def test_a_failure_has_its_code(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["hi", "hi"], fail_after=1, error=EngineTimeout("late"))
    with logged(engine, renderer, store) as (http, log):
        http.post(CHAT, json=HELLO)
        http.post(CHAT, json={**HELLO, "stream": True})
        http.get("/sessions/nobody")
        http.get(f"/{MARK}")
    found = [(line["status"], line.get("error"), line["route"]) for line in access_lines(log)]
    chat = "/sessions/{session_id}/v1/chat/completions"
    # A line is written when its response has gone, and the client may be back before.
    assert sorted(found, key=str) == [
        (200, "engine_timeout", chat),
        (404, "not_found", "/sessions/{session_id}"),
        (404, None, "unmatched"),
        (504, "engine_timeout", chat),
    ]


def test_client_disconnect_is_logged(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["one two three"], stall_after=2)
    with logged(engine, renderer, store) as (http, log):
        with http.stream("POST", CHAT, json={**HELLO, "stream": True}):
            assert engine.stalled.wait(PATIENCE)
        assert engine.aborted.wait(PATIENCE)
    (line,) = access_lines(log)
    assert (line["status"], line["client_left"]) == (200, True)
    assert "turns" not in line


def test_session_requests_are_logged_with_the_session_id(renderer: Renderer, store: SqliteStore) -> None:
    with logged(ScriptedEngine(renderer, []), renderer, store) as (http, log):
        http.post("/sessions", json={"session_id": "mine"})
        http.get("/sessions/mine")
        http.get(f"/sessions/{MARK}")
    assert [line.get("session_id") for line in access_lines(log)] == ["mine", "mine", None]


def test_probes_are_logged_at_debug_only(
    renderer: Renderer, store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO),
        running(create_app(Turns(ScriptedEngine(renderer, []), renderer, store), model_id="m")) as url,
    ):
        httpx2.get(f"{url}/healthz")
        httpx2.get(f"{url}/v1/models")
    lines = [record for record in caplog.records if record.name == "tokentape.access"]
    assert [line.__dict__["fields"]["route"] for line in lines] == ["/v1/models"]


def test_the_paths_of_one_endpoint_are_logged_as_different_routes(
    renderer: Renderer, store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG, logger="tokentape.access"),
        running(create_app(Turns(ScriptedEngine(renderer, []), renderer, store), model_id="m")) as url,
    ):
        for path in ("/readyz", "/health", "/v1/models", "/sessions/s/v1/models", "/v1/models/m"):
            httpx2.get(url + path)
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == "tokentape.access"]
    below = "/sessions/{session_id}"
    expected = ["/readyz", "/health", "/v1/models", f"{below}/v1/models", "/v1/models/{model_id:path}"]
    assert [line["route"] for line in lines] == expected


def bodies() -> Iterator[tuple[str, Any]]:
    """Requests with the marker in every field, those that work and those that don't."""
    tool = {"type": "function", "function": {"name": MARK, "description": MARK, "parameters": {MARK: MARK}}}
    call = {"id": MARK, "type": "function", "function": {"name": MARK, "arguments": json.dumps({MARK: MARK})}}
    chat = {
        "model": MARK,
        "messages": [
            {"role": "system", "content": MARK},
            {"role": "user", "content": MARK},
            {"role": "assistant", "content": MARK, "reasoning_content": MARK, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": MARK, "content": MARK},
        ],
        "tools": [tool],
        "user": MARK,
        "metadata": {MARK: MARK},
        "stop": [MARK],
        "chat_template_kwargs": {MARK: MARK},
    }
    for stream in (False, True):
        yield CHAT, {**chat, "stream": stream}
    for field in ("messages", "tools", "stop", "chat_template_kwargs", "response_format", "temperature", "n"):
        yield CHAT, {**HELLO, field: MARK}
    for message in ({"role": MARK}, {"role": "user", "content": {MARK: MARK}}, {"role": "user", MARK: MARK}):
        yield CHAT, {"messages": [message]}
    for url in (f"https://{MARK}/", f"data:{MARK}"):
        yield CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    yield CHAT, MARK
    yield "/sessions", {"metadata": {MARK: MARK}}
    yield "/sessions", {"metadata": MARK}
    yield "/sessions/s/reward", {"value": MARK}
    yield "/v1/messages", {"model": MARK, "max_tokens": 5, "system": MARK, "messages": chat["messages"][1:2]}
    yield "/v1/messages", {"model": MARK, "max_tokens": MARK, "messages": MARK}
    yield "/v1/messages/count_tokens", {"model": MARK, "messages": [{"role": "user", "content": {MARK: MARK}}]}
    yield "/v1/responses", {"model": MARK, "input": MARK, "instructions": MARK, "metadata": {MARK: MARK}}
    yield "/v1/responses", {"model": MARK, "input": [{"type": MARK, MARK: MARK}], "tools": [{"type": MARK}]}
    yield "/sessions/s/columns", {"turn": 0, "columns": {MARK: [MARK]}}
    yield "/v1/completions", {"model": MARK, "prompt": MARK}
    yield "/v1/completions", {"model": MARK, "prompt": {MARK: MARK}}


@pytest.mark.parametrize("error", [None, RuntimeError(MARK), EngineTimeout("late")], ids=["works", "bug", "fails"])
def test_logs_hold_no_text_of_callers_or_models(
    renderer: Renderer, store: SqliteStore, capfd: pytest.CaptureFixture[str], error: Exception | None
) -> None:
    engine = ScriptedEngine(renderer, [f"{MARK} {MARK}"] * 100, fail_after=None if error is None else 1, error=error)
    headers = {"User-Agent": MARK, "Idempotency-Key": "", "X-Stainless-Lang": MARK, "Cookie": MARK, "Referer": MARK}
    with logged(engine, renderer, store) as (http, log):
        answers = []
        for number, (path, body) in enumerate(bodies()):
            answers.append(http.post(path, json=body, headers={**headers, "Idempotency-Key": f"{MARK}{number}"}))
        answers.append(http.post(CHAT, content=f'{{"{MARK}": {MARK}', headers=headers))
        answers.append(http.post(f"/{MARK}?{MARK}={MARK}", json=HELLO, headers=headers))
        answers.append(http.post(CHAT, json=HELLO, headers={"Authorization": f"Bearer {MARK}{MARK}"}))
        metrics = http.get("/metrics", headers={"Authorization": f"Bearer {ADMIN}"}).text
    assert "tokentape_turns_total" in metrics
    assert {answer.status_code for answer in answers} >= {201, 400, 401, 404}
    assert any(answer.status_code == 200 for answer in answers) or error is not None
    assert len(access_lines(log)) >= len(answers)
    outputs = [log.getvalue(), metrics, *(answer.text for answer in answers if answer.status_code >= 400)]
    assert [text for text in outputs if MARK in text] == []
    assert MARK not in "".join(capfd.readouterr())
    if isinstance(error, RuntimeError):
        assert "unexpected RuntimeError" in log.getvalue()
