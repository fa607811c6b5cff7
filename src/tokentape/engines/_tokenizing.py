"""Tokenize and render with the endpoints of a server. The results are only compared, never sampled from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tokentape.engines._http import HttpClient
from tokentape.engines._kinds import engine_class
from tokentape.engines._server_errors import UNREADABLE
from tokentape.errors import EngineContractError, EngineError, InvalidRequest
from tokentape.types import Message, Tool

_Value = TypeVar("_Value")


class _TokenizeReply(msgspec.Struct):
    """A reply from any of the endpoints, each of which has some of these fields."""

    tokens: list[int] | None = None
    prompt: str | None = None
    text: str | None = None
    content: str | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class TokenizeApi:
    """A server's format of /tokenize and /detokenize. The defaults are vLLM's."""

    text: str = "prompt"
    """Request field with the text."""
    special: str = "add_special_tokens"
    controls: str | None = None
    """Request field that sets whether text that spells a control token is encoded as that token; None if always."""
    takes_model: bool = True
    """Whether requests name the model."""
    decoded: str = "prompt"
    """Reply field with the text."""
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of /detokenize requests."""
    template: str | None = None
    """Path that renders messages to text; None if /tokenize accepts messages."""


def _api(kind: str) -> TokenizeApi | None:
    return TokenizeApi() if kind == "gateway" else engine_class(kind).tokenize_api


async def server_text_ids(
    kind: str, http: HttpClient, model: str, text: str, *, special: bool = False, controls: bool = False
) -> list[int] | None:
    """Return the ids that a server encodes plain text to. Return None if the server has no endpoint for that.

    With `special` the server adds its default special tokens, such as BOS, around the text. With `controls` llama.cpp
    encodes text that spells a control token as that token, which the other servers always do.

    Raises `EngineError` or a subclass.
    """
    api = _api(kind)
    if api is None:
        return None
    body = {api.text: text, api.special: special, **({} if api.controls is None else {api.controls: controls})}
    reply = await _post(http, "/tokenize", {"model": model, **body} if api.takes_model else body)
    return None if reply is None else _required(reply.tokens)


async def server_text(kind: str, http: HttpClient, model: str, ids: Sequence[int]) -> str | None:
    """Return the text, with control tokens, that a server decodes ids to. Return None if it has no endpoint for that.

    Raises `EngineError` or a subclass.
    """
    api = _api(kind)
    if api is None:
        return None
    body = {"tokens": list(ids), **api.decoding}
    reply = await _post(http, "/detokenize", {"model": model, **body} if api.takes_model else body)
    decoded: str | None = None if reply is None else _required(getattr(reply, api.decoded))
    return decoded


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
    """Return the ids that a server renders a conversation to. Return None if it can't render or refuses it.

    `generate` adds the generation prompt. Raises `EngineError` or a subclass.
    """
    api, chat = _api(kind), _chat(messages, tools, template_kwargs)
    if api is None or kind == "gateway":
        return None
    if api.template is None:
        body = {"model": model, **chat, "add_generation_prompt": generate}
        reply = await _post(http, "/tokenize", body)
        return None if reply is None else _required(reply.tokens)
    if not generate:
        chat["add_generation_prompt"] = False
    reply = await _post(http, api.template, chat)
    if reply is None:
        return None
    return await server_text_ids(kind, http, model, _required(reply.prompt), special=True, controls=True)


async def server_prompt_ids(
    http: HttpClient,
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int] | None:
    """Let vLLM render messages and sample one token. Return its prompt ids, or None if it does not report them.

    Raises `EngineError` or a subclass.
    """
    body = {"model": model, **_chat(messages, tools, template_kwargs), "max_tokens": 1, "return_token_ids": True}
    if tools:
        body["tool_choice"] = "none"
    reply = await _post(http, "/v1/chat/completions", body)
    return None if reply is None else reply.prompt_token_ids


def _chat(
    messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    chat: dict[str, Any] = {"messages": list(map(_sent, messages))}
    if tools:
        chat["tools"] = list(tools)
    if template_kwargs:
        chat["chat_template_kwargs"] = dict(template_kwargs)
    return chat


def with_text_arguments(message: Message) -> Message:
    """Return the message with its call arguments as JSON text."""

    def written(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(written, calls))} if calls else message


def _sent(message: Message) -> dict[str, Any]:
    """Return a message as servers accept it: arguments as JSON text, reasoning under both names that they read."""
    fields = dict(with_text_arguments(message))
    return {**fields, "reasoning": fields["reasoning_content"]} if "reasoning_content" in fields else fields


def _required(value: _Value | None) -> _Value:
    """Return a field of a reply, which must have it."""
    if value is None:
        raise EngineContractError(_OTHER_FORMAT)
    return value


async def _post(http: HttpClient, path: str, body: Mapping[str, Any]) -> _TokenizeReply | None:
    try:
        return msgspec.json.decode(await http.post(path, msgspec.json.encode(body), {}), type=_TokenizeReply)
    except UNREADABLE:
        raise EngineContractError(_OTHER_FORMAT) from None
    except InvalidRequest:
        return None
    except EngineError as error:
        if any(f"answered {status}" in str(error) for status in (404, 405, 501)):
            return None
        raise


_OTHER_FORMAT = "the server's reply to a tokenization request has an unknown format"
