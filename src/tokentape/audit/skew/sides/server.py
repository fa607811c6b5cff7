"""A side that is a running server, asked how it tokenizes, decodes and renders through its own endpoints."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tokentape.audit.skew.sides.base import Ability, Rendering, SideFacts, SkewChat
from tokentape.audit.skew.sides.from_spec import SideOptions
from tokentape.engines.http import HttpClient
from tokentape.engines.tokenizing import server_chat_ids, server_prompt_ids, server_text, server_text_ids
from tokentape.errors import (
    EngineContractError,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    TemplateRefused,
    UnsupportedParameter,
)
from tokentape.types import Message

_AT_ONCE = 16
_KINDS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "gateway": "gateway"}
_HELLO: tuple[Message, ...] = ({"role": "user", "content": "hi"},)

_T = TypeVar("_T")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Build(msgspec.Struct):
    build_info: str = ""
    chat_template: str | None = None


class ServerSide:
    """A server of one of the kinds of `engines.tokenizing`. Use `open_server`."""

    def __init__(self, name: str, kind: str, http: HttpClient, loop: _Loop, options: SideOptions) -> None:
        self._kind, self._http, self._loop = kind, http, loop
        self._kwargs = options.kwargs
        self._texts: dict[tuple[int, ...], str] = {}
        self._model, versions, template = loop.run(_told(kind, http))
        if self._text_ids("a", special=False) is None:
            raise EngineError(f"{name} has no /tokenize; is it a server of this kind?")
        abilities: set[Ability] = {"special", "controls"}
        if loop.run(server_text(kind, http, self._model, self._text_ids("a", special=False) or [])) is not None:
            abilities.add("decode")
        if self._chat_ids(SkewChat(_HELLO)) is not None:
            abilities.add("render")
        self.echoes = kind == "vllm" and "render" in abilities
        """Whether it says what prompt it sampled from."""
        ignored = [what for what, given in (("template", options.template), ("date", options.date)) if given]
        notes = [f"a server's {' and '.join(ignored)} can't be set from here"] if ignored else []
        self.facts = SideFacts(
            name=name,
            kind=f"{_KINDS[kind]} server",
            abilities=frozenset(abilities),
            versions=versions,
            template=template,
            template_variables=dict(options.kwargs),
            notes=tuple(notes),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """See `Side`."""
        found = self._loop.run(_all(self._asked(text, special=special) for text in texts))
        return [ids if ids is not None else [] for ids in found]

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """See `Side`."""
        asked = [tuple(ids) for ids in sequences]
        new = [ids for ids in dict.fromkeys(asked) if ids not in self._texts]
        texts = self._loop.run(_all(server_text(self._kind, self._http, self._model, ids) for ids in new))
        self._texts |= {ids: text or "" for ids, text in zip(new, texts, strict=True)}
        return [self._texts[ids] for ids in asked]

    def render(self, conversation: SkewChat) -> Rendering:
        """See `Side`. Arguments in JSON text are read by servers before their template sees them: not comparable."""
        if any(_has_text_arguments(message) for message in conversation.messages):
            raise UnsupportedParameter("a server's template is never shown arguments as text", "messages")
        last = conversation.messages[-1]["role"] if conversation.messages else ""
        if self._kind == "llamacpp" and last == "assistant":
            raise UnsupportedParameter("llama.cpp goes on writing a last message of the assistant's", "messages")
        ids = self._chat_ids(conversation)
        if ids is None:
            raise TemplateRefused("the server refuses this conversation; see its log for the reason")
        return Rendering(ids, None)

    def echo(self, conversation: SkewChat) -> list[int] | None:
        """The prompt that it says it sampled from, given this conversation; None if it refuses or does not say."""
        messages = [_wire(message) for message in conversation.messages]
        return self._loop.run(server_prompt_ids(self._http, self._model, messages, conversation.tools, self._kwargs))

    def token(self, token_id: int) -> str | None:
        """What it decodes the id to."""
        return self.decode([[token_id]])[0] if "decode" in self.facts.abilities else None

    def reopen(self) -> str | None:
        """One process asks a server."""
        return None

    def close(self) -> None:
        """Close the connections."""
        self._loop.run(self._http.close())
        self._loop.close()

    def _asked(self, text: str, *, special: bool) -> Coroutine[Any, Any, list[int] | None]:
        return server_text_ids(self._kind, self._http, self._model, text, special=special, controls=True)

    def _text_ids(self, text: str, *, special: bool) -> list[int] | None:
        return self._loop.run(self._asked(text, special=special))

    def _chat_ids(self, conversation: SkewChat) -> list[int] | None:
        messages = [_wire(message) for message in conversation.messages]
        try:
            return self._loop.run(
                server_chat_ids(
                    self._kind,
                    self._http,
                    self._model,
                    messages,
                    conversation.tools,
                    generate=conversation.generate,
                    template_kwargs=self._kwargs,
                )
            )
        except EngineError as error:
            if "answered 500" in str(error):  # what servers say of templates that raise
                return None
            raise


def open_server(name: str, kind: str, url: str, options: SideOptions) -> ServerSide:
    """A side for the server at `url`; `kind` is one of vllm, sglang, llamacpp, gateway, or `server` to find out.

    Raises `EngineError` and kinds if it does not answer, `InvalidRequest` if the address can't be used.
    """
    http = HttpClient(url, api_key=options.api_key)
    loop = _Loop()
    try:
        if kind == "server":
            kind = loop.run(_detect(http))
        return ServerSide(name, kind, http, loop, options)
    except BaseException as error:
        loop.run(http.close())
        loop.close()
        if isinstance(error, EngineUnavailable):
            raise EngineUnavailable(f"{name}: {error}") from None
        raise


class _Loop:
    """An event loop in a thread of its own, so that an audit can run where another loop does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokentape-audit", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """What the coroutine returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _all(asked: Any) -> list[Any]:
    """Ask all, some at once, and return the answers in order."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(coroutine: Coroutine[Any, Any, _T]) -> _T:
        async with free:
            return await coroutine

    return await asyncio.gather(*map(one, asked))


async def _told(kind: str, http: HttpClient) -> tuple[str, Mapping[str, str], str | None]:
    """A server's model, version and template, as far as it tells them."""
    model = ""
    models = await _get(http, "/v1/models", _Models)
    if models is not None and models.data:
        model = models.data[0].id
    if kind == "llamacpp":
        build = await _get(http, "/props", _Build)
        return model, {"llama.cpp": build.build_info} if build else {}, build.chat_template if build else None
    for path in ("/version", "/server_info", "/get_server_info"):
        told = await _get(http, path, _Version)
        if told is not None:
            return model, {_KINDS[kind]: told.version}, None
    return model, {}, None


async def _detect(http: HttpClient) -> str:
    told = await _get(http, "/version", _Version)
    if told is not None:
        return "gateway" if told.version.startswith("tokentape") else "vllm"
    if await _get(http, "/props", _Build) is not None:
        return "llamacpp"
    for path in ("/server_info", "/get_server_info"):
        if await _get(http, path, _Version) is not None:
            return "sglang"
    raise InvalidRequest("can't tell what server that is; say it with vllm:, sglang:, llamacpp: or gateway:")


async def _get(http: HttpClient, path: str, shape: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(await http.get(path), type=shape)
    except (EngineError, EngineContractError, InvalidRequest, msgspec.MsgspecError) as error:
        if isinstance(error, EngineError) and error.retry:
            raise  # it is not reachable at all
        return None


def _wire(message: Message) -> dict[str, Any]:
    """The message as the wire has it: arguments as JSON text, reasoning under both names that servers read."""
    sent = dict(message)
    if "reasoning_content" in sent:
        sent["reasoning"] = sent["reasoning_content"]
    if not message.get("tool_calls"):
        return sent
    return {**sent, "tool_calls": [_wire_call(call) for call in message["tool_calls"]]}


def _has_text_arguments(message: Message) -> bool:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return any(isinstance(function.get("arguments"), str) for function in functions)


def _wire_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
        return dict(call)
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
