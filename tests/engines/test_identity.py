"""Model facts from servers of each kind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest
from starlette.responses import JSONResponse, Response
from tests.engines import fake_server

from tokentape.engines._http import HttpClient
from tokentape.engines._identity import ServedAs, offered_routes
from tokentape.engines._kinds import engine_class

_T = TypeVar("_T")

CARD = {"id": "policy", "root": "/runs/7/step_100", "parent": None, "max_model_len": 4096}
ADAPTER = {"id": "adapter", "root": "/adapters/a", "parent": "policy", "max_model_len": 4096}


@pytest.fixture(scope="module")
def running() -> Iterator[fake_server.FakeServer]:
    with fake_server.running() as fake:
        yield fake


@pytest.fixture
def server(running: fake_server.FakeServer) -> fake_server.FakeServer:
    running.reset({"/v1/models": JSONResponse({"data": [CARD, ADAPTER]})})
    return running


def asked(server: fake_server.FakeServer, ask: Callable[[HttpClient], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        http = HttpClient(server.url)
        try:
            return await ask(http)
        finally:
            await http.close()

    return asyncio.run(run())


def test_served_adapters_are_not_the_model(server: fake_server.FakeServer) -> None:
    served = asked(server, lambda http: engine_class("vllm").served_as(http))
    assert served == ServedAs(frozenset({"policy", "adapter"}), frozenset({"policy", "/runs/7/step_100"}), 4096)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_sglang_gives_more_model_facts(server: fake_server.FakeServer, path: str) -> None:
    server.answers[path] = JSONResponse({"model_path": "Qwen/Qwen3-8B", "model_type": "qwen3"})
    served = asked(server, lambda http: engine_class("sglang").served_as(http))
    assert (served.model_type, served.names) == ("qwen3", {"policy", "/runs/7/step_100", "Qwen/Qwen3-8B"})


def test_llama_cpp_reports_the_size_of_its_embedding(server: fake_server.FakeServer) -> None:
    server.answers["/v1/models"] = JSONResponse({"data": [{"id": "tiny.gguf", "meta": {"n_embd": 128}}]})
    assert asked(server, lambda http: engine_class("llamacpp").served_as(http)).hidden_size == 128


def test_routes_that_refuse_an_empty_body_exist(server: fake_server.FakeServer) -> None:
    def refuse(status: int) -> Callable[[dict[str, Any]], Response]:
        return lambda body: JSONResponse({"error": {"code": status}}, status)

    server.answers |= {"/v1/completions": refuse(400), "/inference/v1/generate": refuse(422)}
    server.answers |= {"/v1/chat/completions/render": refuse(403), "/v1/chat/completions/derender": refuse(501)}
    assert asked(server, offered_routes) == ["/v1/completions", "/inference/v1/generate"]
