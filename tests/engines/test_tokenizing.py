"""Tokenization by servers, with a server on a socket with set answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokentape.engines._http import HttpClient
from tokentape.engines._tokenizing import server_chat_ids, server_text_ids
from tokentape.errors import EngineContractError, EngineError
from tokentape.gateway._serve import running

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as opened:

        def start(asked: list[Any], answers: Mapping[str, Any], status: int = 200) -> str:
            async def answer(request: Request) -> Response:
                asked.append(json.loads(await request.body()))
                return JSONResponse(answers[request.url.path], status)

            routes = [Route(path, answer, methods=["POST"]) for path in answers]
            return opened.enter_context(running(Starlette(routes=routes)))

        yield start


def ask(url: str, kind: str, *, chat: bool, tools: tuple[Any, ...] = ()) -> list[int] | None:
    async def run() -> list[int] | None:
        http = HttpClient(url)
        try:
            if chat:
                return await server_chat_ids(kind, http, "m", [USER], tools)
            return await server_text_ids(kind, http, "m", "text")
        finally:
            await http.close()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_vllm_and_sglang_tokenize_text_without_special_tokens(serve: Serve, kind: str) -> None:
    asked: list[Any] = []
    assert ask(serve(asked, {"/tokenize": {"tokens": [1, 2], "count": 2}}), kind, chat=False) == [1, 2]
    assert asked == [{"model": "m", "prompt": "text", "add_special_tokens": False}]


def test_llama_cpp_tokenizes_plain_text(serve: Serve) -> None:
    asked: list[Any] = []
    assert ask(serve(asked, {"/tokenize": {"tokens": [1]}}), "llamacpp", chat=False) == [1]
    assert asked == [{"content": "text", "add_special": False, "parse_special": False}]


@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_conversations_are_tokenized_with_the_generation_prompt(serve: Serve, tools: tuple[Any, ...]) -> None:
    asked: list[Any] = []
    assert ask(serve(asked, {"/tokenize": {"tokens": [3]}}), "vllm", chat=True, tools=tools) == [3]
    extra = {"tools": [TOOL]} if tools else {}
    assert asked == [{"model": "m", "messages": [USER], **extra, "add_generation_prompt": True}]


def test_llama_cpp_renders_first_and_tokenizes_then(serve: Serve) -> None:
    asked: list[Any] = []
    url = serve(asked, {"/apply-template": {"prompt": "<s>hi"}, "/tokenize": {"tokens": [4, 5]}})
    assert ask(url, "llamacpp", chat=True) == [4, 5]
    assert asked == [{"messages": [USER]}, {"content": "<s>hi", "add_special": True, "parse_special": True}]


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "openai"])
@pytest.mark.parametrize("chat", [False, True])
def test_server_without_a_tokenize_route_gives_none(serve: Serve, kind: str, chat: bool) -> None:
    assert ask(serve([], {"/elsewhere": {}}), kind, chat=chat) is None


def test_server_that_refuses_the_conversation_gives_none(serve: Serve) -> None:
    assert ask(serve([], {"/tokenize": {"error": {}}}, 400), "vllm", chat=True) is None


def test_a_server_that_fails_is_an_error(serve: Serve) -> None:
    with pytest.raises(EngineError):
        ask(serve([], {"/tokenize": {}}, 500), "vllm", chat=False)


def test_malformed_response_is_an_error(serve: Serve) -> None:
    with pytest.raises(EngineContractError):
        ask(serve([], {"/tokenize": {"tokens": "many"}}), "vllm", chat=False)
