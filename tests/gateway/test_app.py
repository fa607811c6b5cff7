"""Paths, health, limits and shutdown of the application."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.errors import EngineUnavailable, StoreError, TemplateRefused
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("path", ["/v1", "/v1/nothing", "/sessions/s/v1/nothing", "/sessions/a/b/v1/models"])
def test_unknown_path_is_a_404_in_json(gateway_url: str, path: str) -> None:
    answer = httpx2.get(gateway_url + path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_wrong_method_is_a_405_in_json(gateway_url: str) -> None:
    answer = httpx2.put(f"{gateway_url}/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    answer = httpx2.get(f"{gateway_url}/sessions/s/v1/messages")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["details"]["error_code"] == "method_not_allowed"


@pytest.mark.parametrize(("path", "anthropic"), [("chat/completions", False), ("messages", True)])
def test_error_shape_follows_the_path_for_any_session_id(gateway_url: str, path: str, anthropic: bool) -> None:
    reply = httpx2.post(f"{gateway_url}/sessions/messages/v1/{path}", json={"stream": 7})
    assert reply.status_code == 400
    assert ("type" in reply.json()) == anthropic


@pytest.mark.parametrize("prefix", ["", "/sessions/s"])
def test_models_endpoint_lists_the_served_model(gateway_url: str, turns: Turns, prefix: str) -> None:
    (model,) = httpx2.get(f"{gateway_url}{prefix}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", turns.engine.info.max_context)


def test_healthy_gateway_reports_ok(gateway_url: str) -> None:
    assert httpx2.get(f"{gateway_url}/healthz").status_code == 200
    assert httpx2.get(f"{gateway_url}/readyz").status_code == 200


def test_not_ready_without_its_engine(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, [], error=EngineUnavailable("connection refused"))
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        answer = httpx2.get(f"{url}/readyz")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert httpx2.get(f"{url}/healthz").status_code == 200


def test_not_ready_without_its_store(gateway_url: str, store: SqliteStore) -> None:
    store.close()
    answer = httpx2.get(f"{gateway_url}/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_error")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sessions", "/sessions/s/reward"])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_is_a_413(renderer: Renderer, store: SqliteStore, path: str, chunked: bool) -> None:
    engine = ScriptedEngine(renderer, [])
    with running(create_app(Turns(engine, renderer, store, limits=Limits(body_bytes=1000)), model_id="m")) as url:
        httpx2.post(f"{url}/sessions", json={"session_id": "s"})
        body = b" " * 1001
        answer = httpx2.post(url + path, content=iter([body]) if chunked else body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_bug_is_a_500_and_leaks_nothing(
    renderer: Renderer, store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(renderer, ["hi"], fail_after=0, error=RuntimeError("LEAKMARKER"))
    with caplog.at_level(logging.DEBUG), running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        answer = httpx2.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "LEAKMARKER"}]}
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "LEAKMARKER" not in answer.text
    assert "unexpected RuntimeError" in caplog.text
    assert "LEAKMARKER" not in caplog.text


def test_disconnect_during_the_request_body_is_not_a_server_error(
    gateway_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = httpx2.URL(gateway_url)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    # The server sees the other connection's end before it answers this one: both are its one thread's.
    assert httpx2.get(f"{gateway_url}/healthz").status_code == 200
    assert "unexpected" not in caplog.text


@pytest.mark.usefixtures("quick_models")
def test_certificate_exists_before_the_first_request(
    renderer: Renderer, store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path / "cache"))
    with running(create_app(Turns(ScriptedEngine(renderer, []), renderer, store), model_id="m")):
        assert len(list((tmp_path / "cache" / "certificates").iterdir())) == 1


def test_a_template_without_a_certificate_is_not_served(renderer: Renderer, store: SqliteStore) -> None:
    refusing = Renderer(renderer.tokenizer, ChatTemplate("{{ raise_exception('never') }}"))
    engine = ScriptedEngine(refusing, [])
    with (
        pytest.raises(TemplateRefused, match="never"),
        running(create_app(Turns(engine, refusing, store), model_id="m")),
    ):
        pass
    assert engine.closed


def test_shutdown_closes_engine_and_store(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["hi"])
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        assert httpx2.post(f"{url}/sessions/s/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    assert engine.closed
    with pytest.raises(StoreError):
        store.load_session("s")


def test_unknown_role_error_lists_the_known_roles(gateway_url: str) -> None:
    body = {"messages": [{"role": "robot", "content": "hi"}]}
    message = httpx2.post(f"{gateway_url}/v1/chat/completions", json=body).json()["error"]["message"]
    assert message.endswith("not allowed; expected one of assistant, developer, system, tool, user")
    assert "robot" not in message


def test_conversation_without_a_session_warns_once(gateway_url: str, caplog: pytest.LogCaptureFixture) -> None:
    reply = {"role": "assistant", "content": "yes"}
    httpx2.post(f"{gateway_url}/sessions/s/v1/chat/completions", json={"messages": [USER, reply, USER]})
    for messages, expected in (([USER], 0), ([USER, reply, USER], 1), ([USER, reply, USER], 1)):
        httpx2.post(f"{gateway_url}/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert sum("without a session id" in line for line in caplog.messages) == expected


def test_reward_for_a_session_without_turns_is_logged(gateway_url: str, caplog: pytest.LogCaptureFixture) -> None:
    httpx2.post(f"{gateway_url}/sessions/s/v1/chat/completions", json={"messages": [USER], "max_tokens": 1})
    httpx2.post(f"{gateway_url}/sessions", json={"session_id": "typo"})
    for name in ("s", "typo"):
        assert httpx2.post(f"{gateway_url}/sessions/{name}/reward", json={"value": 1}).status_code == 201
    warned = [line for line in caplog.messages if "has no turns yet" in line]
    assert warned == ["session 'typo' got a reward but has no turns yet: is its id right?"]
