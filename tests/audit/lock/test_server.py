"""A server's own ids against a lock, over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

import tokentape
from tests.engines.fake_server import FakeServer, running
from tokentape.audit._lock import Lock, make_lock, observe_server, write_lock
from tokentape.audit._lock.comparing import compare
from tokentape.audit._lock.lockfile import golden_ids
from tokentape.chat._renderer import Renderer
from tokentape.errors import InvalidRequest, TokenizationChanged


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


@pytest.fixture(scope="module")
def lock(model_dir: Path) -> Lock:
    return make_lock(model_dir)


def models(owner: str) -> JSONResponse:
    return JSONResponse({"data": [{"id": "tiny", "owned_by": owner}]})


def as_rendered(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM passes it to a template: with parsed arguments."""
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {name: value for name, value in message.items() if name != "reasoning"}


def tokenizing(renderer: Renderer, lock: Lock, *, bos: int | None = None) -> dict[str, Any]:
    """A vLLM that tokenizes with `renderer`, with one more token before conversations if `bos` is set."""
    goldens = {(str(list(golden.messages)), bool(golden.tools)): golden for golden in lock.goldens if golden.messages}

    def tokenize(body: dict[str, Any]) -> Response:
        assert body["model"] == "tiny"
        if "prompt" in body:
            special = body["add_special_tokens"]
            return JSONResponse({"tokens": renderer.tokenizer.encode_plain(body["prompt"], add_special_tokens=special)})
        try:
            messages = [as_rendered(message) for message in body["messages"]]
        except TypeError:  # vLLM refuses arguments that are no JSON text
            return JSONResponse({"error": "arguments"}, 400)
        ids = golden_ids(renderer, {}, goldens[str(messages), "tools" in body])
        return JSONResponse({"tokens": ids if bos is None or ids is None else [bos, *ids]})

    return {"/v1/models": models("vllm"), "/tokenize": tokenize}


def test_server_with_the_same_tokenizer_matches_the_lock(server: FakeServer, renderer: Renderer, lock: Lock) -> None:
    server.reset(tokenizing(renderer, lock))
    observed = asyncio.run(observe_server(lock, server.url))
    report = compare(lock, observed, {})
    assert report.ok
    assert report.inputs == len(lock.goldens)
    assert report.not_compared == ("parts, template and certificate: a server returns only ids",)


def test_extra_bos_token_is_reported(server: FakeServer, renderer: Renderer, lock: Lock) -> None:
    first = next(golden for golden in lock.goldens if golden.messages).ids
    assert first is not None
    server.reset(tokenizing(renderer, lock, bos=first[0]))
    (change,) = compare(lock, asyncio.run(observe_server(lock, server.url)), {}).changes
    assert change.cause.startswith("two beginning-of-sequence tokens")


def test_server_without_information_is_not_called_unchanged(server: FakeServer, lock: Lock) -> None:
    server.reset({"/v1/models": models("vllm")})
    with pytest.raises(InvalidRequest, match="nothing to compare"):
        asyncio.run(observe_server(lock, server.url))


def test_a_server_of_an_unknown_kind_is_refused(server: FakeServer, lock: Lock) -> None:
    server.reset({"/v1/models": models("somebody")})
    with pytest.raises(InvalidRequest, match="is 'somebody', expected one of vllm"):
        asyncio.run(observe_server(lock, server.url))


def test_gateway_is_checked_by_its_texts(gateway_url: str, lock: Lock) -> None:
    observed = asyncio.run(observe_server(lock, gateway_url))
    report = compare(lock, observed, {})
    assert report.ok
    assert report.inputs == sum(not golden.messages for golden in lock.goldens)
    assert any("the server does not render them" in what for what in report.not_compared)


def test_missing_kwargs_differ_from_those_of_the_lock(
    server: FakeServer, renderer: Renderer, model_dir: Path, tmp_path: Path
) -> None:
    made = make_lock(model_dir, template_kwargs={"shout": True})
    write_lock(made, tmp_path / "a.lock")
    server.reset(tokenizing(renderer, made))
    tokentape.check(tmp_path / "a.lock", engine=server.url)
    with pytest.raises(TokenizationChanged, match=r'template kwargs: were {"shout": true}, are {}'):
        tokentape.check(tmp_path / "a.lock", engine=server.url, template_kwargs={})
