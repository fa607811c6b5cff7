"""Requests that a foreign web page makes a browser send."""

from __future__ import annotations

from itertools import product

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import Keys
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

FORGED = [
    {"Host": "evil.example:8800"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "["},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Host": "localhost", "Origin": "http://localhost.evil.example"},
]


@pytest.mark.parametrize("headers", FORGED)
def test_another_host_or_origin_is_refused(gateway_url: str, headers: dict[str, str]) -> None:
    answer = httpx2.post(f"{gateway_url}/sessions", json={}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    answer = httpx2.post(f"{gateway_url}/sessions/s/v1/messages", json={}, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (403, "error")
    assert answer.json()["error"]["type"] == "permission_error"
    assert httpx2.get(f"{gateway_url}/sessions").json()["data"] == []


@pytest.mark.parametrize(
    "headers",
    [{}, {"Host": "LOCALHOST:1"}, {"Host": "[::1]:8800"}, {"Origin": "http://127.0.0.1:3000"}],
)
def test_localhost_is_answered(gateway_url: str, headers: dict[str, str]) -> None:
    assert httpx2.get(f"{gateway_url}/healthz", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("keys", "allowed", "host", "status"),
    [
        (Keys(), ["gateway.internal"], "gateway.internal:80", 200),
        (Keys(), ["gateway.internal"], "localhost", 403),
        (Keys(), ["*"], "anything", 200),
        (Keys({"a": "k" * 16}), None, "anything", 200),
        (Keys({"a": "k" * 16}), ["gateway.internal"], "anything", 403),
    ],
)
def test_hosts_can_be_named(
    renderer: Renderer, store: SqliteStore, keys: Keys, allowed: list[str] | None, host: str, status: int
) -> None:
    turns = Turns(ScriptedEngine(renderer, []), renderer, store)
    with running(create_app(turns, model_id="m", keys=keys, allowed_hosts=allowed)) as url:
        assert httpx2.get(f"{url}/healthz", headers={"Host": host}).status_code == status


SIMPLE = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]
PATHS = ["/sessions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/sessions/s/reward"]


def test_json_needs_its_content_type(gateway_url: str) -> None:
    """A page from another port of this machine can send these types without a preflight request."""
    httpx2.post(f"{gateway_url}/sessions", json={"session_id": "s"})
    for path, kind in product(PATHS, SIMPLE):
        headers = {"Origin": "http://127.0.0.1:3000"} | ({} if kind is None else {"Content-Type": kind})
        answer = httpx2.post(gateway_url + path, content=b'{"session_id": "other"}', headers=headers)
        assert (answer.status_code, "Content-Type: application/json" in answer.text) == (415, True), (path, kind)
    assert [session["session_id"] for session in httpx2.get(f"{gateway_url}/sessions").json()["data"]] == ["s"]


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", None]
)
def test_json_with_its_content_type_is_accepted(gateway_url: str, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx2.post(f"{gateway_url}/sessions", content=b'{"session_id": "s"}', headers=headers)
    assert answer.status_code == 201
