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


class _Text(msgspec.Struct):
    text: str


class _Content(msgspec.Struct):
    content: str


class _Echo(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


async def server_text_ids(
    kind: str, http: HttpClient, model: str, text: str, *, special: bool = False, controls: bool = False
) -> list[int] | None:
    """The ids that a server gives a plain text; None if it has no endpoint for that.

    vLLM, SGLang and our own gateway: `/tokenize` with `prompt`. llama.cpp: `/tokenize` with `content`. With `special`
    the server puts BOS and EOS around the text as it does by default. With `controls` llama.cpp reads control tokens
    that the text spells; the others always do.

    Raises `EngineError` and kinds.
    """
    match kind:
        case "vllm" | "sglang" | "gateway":
            body = {"model": model, "prompt": text, "add_special_tokens": special}
            return await _tokens(http, body)
        case "llamacpp":
            return await _tokens(http, {"content": text, "add_special": special, "parse_special": controls})
    return None


async def server_text(kind: str, http: HttpClient, model: str, ids: Sequence[int]) -> str | None:
    """The text that a server decodes ids to, control tokens spelled out; None if it has no endpoint for that.

    Raises as `server_text_ids`.
    """
    body: dict[str, Any] = {"model": model, "tokens": list(ids)}
    shape: type[_Prompt] | type[_Text] | type[_Content]
    match kind:
        case "vllm" | "gateway":
            shape = _Prompt
        case "sglang":
            body["skip_special_tokens"] = False
            shape = _Text
        case "llamacpp":
            body, shape = {"tokens": list(ids)}, _Content
        case _:
            return None
    answer = await _post(http, "/detokenize", body)
    if answer is None:
        return None
    match _decoded(answer, shape):
        case _Prompt(text) | _Text(text) | _Content(text):
            return text


async def server_chat_ids(
    kind: str,
    http: HttpClient,
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    *,
    generate: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int] | None:
    """The ids that a server's own chat template gives a conversation; None if it says none, or refuses it.

    vLLM and SGLang: `/tokenize` with `messages`. llama.cpp: `/apply-template`, then `/tokenize`. `generate` asks for
    the generation prompt. Raises as `server_text_ids`.
    """
    chat: dict[str, Any] = {"messages": [dict(message) for message in messages]}
    if tools:
        chat["tools"] = list(tools)
    if template_kwargs:
        chat["chat_template_kwargs"] = dict(template_kwargs)
    match kind:
        case "vllm" | "sglang":
            return await _tokens(http, {"model": model, **chat, "add_generation_prompt": generate})
        case "llamacpp":
            if not generate:
                chat["add_generation_prompt"] = False
            answer = await _post(http, "/apply-template", chat)
            if answer is None:
                return None
            content = _decoded(answer, _Prompt).prompt
            return await _tokens(http, {"content": content, "add_special": True, "parse_special": True})
    return None


async def server_prompt_ids(
    http: HttpClient,
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int] | None:
    """The prompt that vLLM says it sampled one token from, given messages; None if it does not say.

    Raises as `server_text_ids`.
    """
    chat: dict[str, Any] = {"model": model, "messages": [dict(message) for message in messages]}
    if tools:
        chat |= {"tools": list(tools), "tool_choice": "none"}
    if template_kwargs:
        chat["chat_template_kwargs"] = dict(template_kwargs)
    answer = await _post(http, "/v1/chat/completions", {**chat, "max_tokens": 1, "return_token_ids": True})
    return None if answer is None else _decoded(answer, _Echo).prompt_token_ids


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
