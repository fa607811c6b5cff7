"""A server on a socket that tokenizes and renders as a side does, in the words of vLLM, SGLang, llama.cpp or ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokentape.audit._skew.backends.base import Backend, SkewChat
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.gateway._serve import running


@contextmanager
def serving(kind: str, side: Backend, *, echo_offset: int = 0) -> Iterator[str]:
    """Address of a server of a kind. It says that it samples from what it renders, without the first `echo_offset`."""
    plain, added = ("content", "add_special") if kind == "llamacpp" else ("prompt", "add_special_tokens")
    answer = {"llamacpp": "content", "sglang": "text"}.get(kind, "prompt")

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        if "messages" in body:
            return _tokens(_rendered(body))
        try:
            return _tokens(side.encode([body[plain]], special=body.get(added, True))[0])
        except InvalidRequest:
            return _tokens(None)

    async def detokenize(request: Request) -> Response:
        body = await request.json()
        # SGLang leaves control tokens out unless it is asked for them.
        kept = kind != "sglang" or body.get("skip_special_tokens") is False
        ids = [i for i in body["tokens"] if kept or i not in controls]
        return JSONResponse({answer: side.decode([ids])[0]})

    async def apply_template(request: Request) -> Response:
        body = await request.json()
        try:
            return JSONResponse({"prompt": side.render(_conversation(body)).text})
        except (TemplateRefused, InvalidRequest):
            return JSONResponse({"error": {"message": "no"}}, 500)

    async def chat(request: Request) -> Response:
        ids = _rendered(await request.json())
        return JSONResponse({"prompt_token_ids": ids and ids[echo_offset:], "choices": []})

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})

    async def version(_: Request) -> Response:
        return JSONResponse({"version": "tokentape-1.2" if kind == "gateway" else "9.9", "build_info": "b9"})

    controls = {token.id for token in side.facts.added.values() if token.special}

    def _rendered(body: Mapping[str, Any]) -> list[int] | None:
        try:
            return side.render(_conversation(body)).ids
        except (TemplateRefused, InvalidRequest):
            return None

    named = {"vllm": "/version", "gateway": "/version", "sglang": "/server_info", "llamacpp": "/props"}
    routes = [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/v1/models", models),
        Route(named[kind], version),
    ]
    if kind == "vllm":
        routes.append(Route("/v1/chat/completions", chat, methods=["POST"]))
    if kind == "llamacpp":
        routes.append(Route("/apply-template", apply_template, methods=["POST"]))
    with running(Starlette(routes=routes)) as url:
        yield url


def _tokens(ids: list[int] | None) -> Response:
    return JSONResponse({"tokens": ids}) if ids is not None else JSONResponse({"error": {"message": "no"}}, 400)


def _conversation(body: Mapping[str, Any]) -> SkewChat:
    messages = []
    for message in body["messages"]:
        kept = {key: value for key, value in message.items() if key != "reasoning"}
        if kept.get("tool_calls"):
            kept["tool_calls"] = [_parsed(call) for call in kept["tool_calls"]]
        messages.append(kept)
    return SkewChat(tuple(messages), tuple(body.get("tools", ())), body.get("add_generation_prompt", True))


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    if not isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
