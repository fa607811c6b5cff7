"""How a server tokenizes by itself, asked through its own endpoints: to compare with, never to sample from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tokentape.engines.http import HttpClient
from tokentape.errors import EngineContractError, EngineError, InvalidRequest
from tokentape.types import Message, Tool

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Prompt(msgspec.Struct):
    prompt: str


async def server_text_ids(kind: str, http: HttpClient, model: str, text: str) -> list[int] | None:
    """The ids that a server gives a plain text; None if it has no endpoint for that.

    vLLM and SGLang: `/tokenize` with `prompt`. llama.cpp: `/tokenize` with `content`. Raises `EngineError` and kinds.
    """
    match kind:
        case "vllm" | "sglang":
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            return await _tokens(http, body)
        case "llamacpp":
            return await _tokens(http, {"content": text, "add_special": False, "parse_special": False})
    return None


async def server_chat_ids(
    kind: str, http: HttpClient, model: str, messages: Sequence[Message], tools: Sequence[Tool]
) -> list[int] | None:
    """The ids that a server's own chat template gives a conversation with the generation prompt; None if it says none.

    vLLM and SGLang: `/tokenize` with `messages`. llama.cpp: `/apply-template`, then `/tokenize`. Raises as
    `server_text_ids`.
    """
    chat: dict[str, Any] = {"messages": [dict(message) for message in messages]}
    if tools:
        chat["tools"] = list(tools)
    match kind:
        case "vllm" | "sglang":
            return await _tokens(http, {"model": model, **chat, "add_generation_prompt": True})
        case "llamacpp":
            answer = await _post(http, "/apply-template", chat)
            if answer is None:
                return None
            content = _decoded(answer, _Prompt).prompt
            return await _tokens(http, {"content": content, "add_special": True, "parse_special": True})
    return None


async def _tokens(http: HttpClient, body: Mapping[str, Any]) -> list[int] | None:
    answer = await _post(http, "/tokenize", body)
    return None if answer is None else _decoded(answer, _Tokens).tokens


async def _post(http: HttpClient, path: str, body: Mapping[str, Any]) -> bytes | None:
    try:
        return await http.post(path, msgspec.json.encode(body), {"content-type": "application/json"})
    except (EngineError, InvalidRequest) as error:
        if isinstance(error, InvalidRequest) or any(f"answered {status}" in str(error) for status in (404, 405, 501)):
            return None  # it does not have the endpoint, or does not take this
        raise


def _decoded(answer: bytes, kind: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError:
        raise EngineContractError("the server's answer to a tokenization is not one") from None
