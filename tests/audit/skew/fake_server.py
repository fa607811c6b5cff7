"""A server that tokenizes and renders as a side does, in the words of vLLM, SGLang, llama.cpp or ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokentape.audit._skew.backends import Backend, SkewChat
from tokentape.engines._http import HttpClient
from tokentape.engines._server_errors import status_error
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.gateway._serve import running

Answer: TypeAlias = tuple[int, Any]
"""Status and JSON body of a reply."""

_answered: dict[str, Callable[[str, Any], Answer]] = {}
"""What answers in this process, by address."""
_over_sockets = HttpClient._whole


async def _whole(self: HttpClient, path: str, body: bytes | None, headers: Mapping[str, str], limit: Any) -> bytes:
    if (answer := _answered.get(self._base)) is None:
        return await _over_sockets(self, path, body, headers, limit)
    status, reply = answer(path, json.loads(body or b"null"))
    received = json.dumps(reply).encode()
    if status != 200:
        raise status_error(status, path, received)
    return received


HttpClient._whole = _whole  # type: ignore[method-assign]


@contextmanager
def serving(kind: str, side: Backend, *, echo_offset: int = 0, on_socket: bool = False) -> Iterator[str]:
    """Address of a server of a kind. It says that it samples from what it renders, without the first `echo_offset`.

    Without a socket it is called in place of aiohttp, with the same bytes: an audit has 1,600 requests, and sockets
    take more than half of its CPU time.
    """
    answer = _answers(kind, side, echo_offset)
    if not on_socket:
        url = f"http://127.0.0.1:1/{id(answer)}"
        _answered[url] = answer
        try:
            yield url
        finally:
            del _answered[url]
        return

    async def respond(request: Request) -> Response:
        status, reply = answer(request.url.path, json.loads(await request.body() or b"null"))
        return JSONResponse(reply, status)

    with running(Starlette(routes=[Route("/{path:path}", respond, methods=["GET", "POST"])])) as url:
        yield url


def _answers(kind: str, side: Backend, echo_offset: int) -> Callable[[str, Any], Answer]:
    plain, added = ("content", "add_special") if kind == "llamacpp" else ("prompt", "add_special_tokens")
    text_field = {"llamacpp": "content", "sglang": "text"}.get(kind, "prompt")
    controls = {token.id for token in side.facts.added.values() if token.special}

    def tokenize(body: Any) -> Answer:
        if "messages" in body:
            return _tokens(rendered(body))
        try:
            return _tokens(side.encode([body[plain]], special=body.get(added, True))[0])
        except InvalidRequest:
            return _tokens(None)

    def detokenize(body: Any) -> Answer:
        # SGLang omits control tokens unless the request wants them.
        kept = kind != "sglang" or body.get("skip_special_tokens") is False
        ids = [i for i in body["tokens"] if kept or i not in controls]
        return 200, {text_field: side.decode([ids])[0]}

    def apply_template(body: Any) -> Answer:
        try:
            return 200, {"prompt": side.render(_conversation(body)).text}
        except (TemplateRefused, InvalidRequest):
            return 500, {"error": {"message": "no"}}

    def chat(body: Any) -> Answer:
        ids = rendered(body)
        return 200, {"prompt_token_ids": ids and ids[echo_offset:], "choices": []}

    def rendered(body: Mapping[str, Any]) -> list[int] | None:
        try:
            return side.render(_conversation(body)).ids
        except (TemplateRefused, InvalidRequest):
            return None

    version = {"version": "tokentape-1.2" if kind == "gateway" else "9.9", "build_info": "b9"}
    named = {"vllm": "/version", "gateway": "/version", "sglang": "/server_info", "llamacpp": "/props"}
    endpoints: dict[str, Callable[[Any], Answer]] = {
        "/tokenize": tokenize,
        "/detokenize": detokenize,
        "/v1/models": lambda _: (200, {"data": [{"id": "m"}]}),
        named[kind]: lambda _: (200, version),
    }
    if kind == "vllm":
        endpoints["/v1/chat/completions"] = chat
    if kind == "llamacpp":
        endpoints["/apply-template"] = apply_template
    return lambda path, body: endpoints.get(path, lambda _: (404, {"detail": "Not Found"}))(body)


def _tokens(ids: list[int] | None) -> Answer:
    return (200, {"tokens": ids}) if ids is not None else (400, {"error": {"message": "no"}})


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
