"""The backend for a running server, which encodes, decodes and renders with the server's endpoints."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from tokentape import errors
from tokentape.audit._skew import backends
from tokentape.engines._http import HttpClient
from tokentape.engines._identity import Card, served_cards
from tokentape.engines._tokenizing import server_chat_ids, server_prompt_ids, server_text, server_text_ids

_AT_ONCE = 16
KINDS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "gateway": "gateway"}
_OWNERS = {**{kind: kind for kind in KINDS}, "tokentape": "gateway"}
"""Server kinds by `owned_by` in `/v1/models`."""
_PATHS = {
    "vllm": ("/version",),
    "gateway": ("/version",),
    "llamacpp": ("/props",),
    "sglang": ("/server_info", "/get_server_info"),
}
_ROLES = ("user", "system", "assistant")

_T = TypeVar("_T")


class _ServerDescription(msgspec.Struct):
    """A server's reply to one of `_PATHS`."""

    version: str = ""
    build_info: str = ""
    chat_template: str | None = None


class ServerBackend(backends.Backend):
    """A running server of one of `KINDS`. Use `open_server`."""

    is_server = True

    def __init__(self, name: str, kind: str, http: HttpClient, loop: _Loop, options: backends.BackendOptions) -> None:
        self._http, self._loop = http, loop
        self._kwargs = options.kwargs
        self._texts: dict[tuple[int, ...], str] = {}
        self._remembered: dict[str, list[int]] = {}
        self.refused: set[str] = set()
        self._kind, self._model = loop.run(introduced(http, None if kind == "server" else kind))
        info = loop.run(_server_info(self._kind, http))
        ids = loop.run(self._asked("a", special=False))
        if ids is None:
            raise errors.EngineError(f"{name} has no /tokenize endpoint; check its URL and the kind of server")
        abilities: set[backends.Ability] = {"special", "controls"}
        if loop.run(server_text(self._kind, http, self._model, ids)) is not None:
            abilities.add("decode")
        # A template may refuse a message with one role. A server without this endpoint refuses all roles.
        if any(self._chat_ids(backends.SkewChat(({"role": role, "content": "hi"},))) is not None for role in _ROLES):
            abilities.add("render")
        self.echoes = self._kind == "vllm" and "render" in abilities
        ignored = [what for what, value in (("template", options.template), ("date", options.date)) if value]
        self.facts = backends.BackendFacts(
            name=name,
            kind=f"{KINDS[self._kind]} server",
            abilities=frozenset(abilities),
            versions={KINDS[self._kind]: info.version or info.build_info} if info else {},
            template=info.chat_template if info else None,
            template_variables=dict(options.kwargs),
            notes=(f"the {' and '.join(ignored)} of a server can't be set from here",) if ignored else (),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        known = {} if special else self._remembered
        new = [text for text in texts if text not in known]
        answers = dict(zip(new, self._loop.run(_all(self._asked(text, special=special) for text in new)), strict=True))
        self.refused |= {text for text, ids in answers.items() if ids is None}
        return [known[text] if text in known else answers[text] or [] for text in texts]

    def remember(self, texts: Sequence[str], ids: Sequence[list[int]]) -> None:
        """See `Backend`."""
        self._remembered = dict(zip(texts, ids, strict=True))

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        keys = [tuple(ids) for ids in sequences]
        new = [ids for ids in dict.fromkeys(keys) if ids not in self._texts]
        texts = self._loop.run(_all(server_text(self._kind, self._http, self._model, ids) for ids in new))
        self._texts |= {ids: text or "" for ids, text in zip(new, texts, strict=True)}
        return [self._texts[ids] for ids in keys]

    def render(self, conversation: backends.SkewChat) -> backends.Rendering:
        """See `Backend`. Arguments in JSON text are not supported, because servers parse them before they render."""
        calls = [call for message in conversation.messages for call in message.get("tool_calls") or ()]
        if any(isinstance((call.get("function") or {}).get("arguments"), str) for call in calls):
            raise errors.UnsupportedParameter(
                "servers parse arguments that are JSON text before they render", "messages"
            )
        last = conversation.messages[-1]["role"] if conversation.messages else ""
        if self._kind == "llamacpp" and last == "assistant":
            raise errors.UnsupportedParameter("llama.cpp continues a last message with the role assistant", "messages")
        ids = self._chat_ids(conversation)
        if ids is None:
            raise errors.TemplateRefused("the server refuses this conversation; see its log for the reason")
        return backends.Rendering(ids, None)

    def echo(self, conversation: backends.SkewChat) -> list[int] | None:
        """See `Backend`."""
        chat = conversation.messages, conversation.tools
        return self._loop.run(server_prompt_ids(self._http, self._model, *chat, self._kwargs))

    def token(self, token_id: int) -> str | None:
        return self.decode([[token_id]])[0] if "decode" in self.facts.abilities else None

    def close(self) -> None:
        self._loop.run(self._http.close())
        self._loop.close()

    def _asked(self, text: str, *, special: bool) -> Coroutine[Any, Any, list[int] | None]:
        return server_text_ids(self._kind, self._http, self._model, text, special=special, controls=True)

    def _chat_ids(self, conversation: backends.SkewChat) -> list[int] | None:
        chat = conversation.messages, conversation.tools
        how: dict[str, Any] = {"generate": conversation.generate, "template_kwargs": self._kwargs}
        request = server_chat_ids(self._kind, self._http, self._model, *chat, **how)
        try:
            return self._loop.run(request)
        except errors.EngineError as error:
            if "answered 500" in str(error):  # how servers answer if a template raises
                return None
            raise


def open_server(name: str, kind: str, url: str, options: backends.BackendOptions) -> ServerBackend:
    """Open a server of a kind in `KINDS`, or detect the kind of a `server`. Raises `EngineError`, `InvalidRequest`."""
    http = HttpClient(url, api_key=options.api_key)
    loop = _Loop()
    try:
        return ServerBackend(name, kind, http, loop, options)
    except BaseException as error:
        loop.run(http.close())
        loop.close()
        if isinstance(error, errors.EngineUnavailable):
            raise errors.EngineUnavailable(f"{name}: {error}") from None
        raise


class _Loop:
    """An event loop in its own thread, so that an audit can run while the caller's event loop runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokentape-audit", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _all(coroutines: Any) -> list[Any]:
    """Await coroutines, at most `_AT_ONCE` at a time, and return the results in order."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def limited(coroutine: Coroutine[Any, Any, _T]) -> _T:
        async with free:
            return await coroutine

    return await asyncio.gather(*map(limited, coroutines))


async def introduced(http: HttpClient, kind: str | None = None) -> tuple[str, str]:
    """Return a server's kind, detected if `kind` is None, and the name of its first model, or '' if unknown."""
    try:
        first = (await served_cards(http))[0]
    except (errors.EngineError, errors.InvalidRequest) as error:
        if isinstance(error, errors.EngineError) and error.retry:
            raise  # it can't be reached
        first = Card("")
    if kind is None:
        kind = _OWNERS.get(first.owned_by) or await _detected(http)
    if kind is None:
        raise errors.InvalidRequest(
            f"can't tell the server's kind: owned_by in /v1/models is {first.owned_by!r}, expected one of "
            f"{', '.join(_OWNERS)}; pass the server's kind"
        )
    return kind, first.id


async def _detected(http: HttpClient) -> str | None:
    for kind in ("vllm", "llamacpp", "sglang"):
        info = await _server_info(kind, http)
        if info is not None:
            return "gateway" if info.version.startswith("tokentape") else kind
    return None


async def _server_info(kind: str, http: HttpClient) -> _ServerDescription | None:
    """Return the server's reply at the paths for a kind, or None if the server is of a different kind."""
    for path in _PATHS[kind]:
        try:
            info = msgspec.json.decode(await http.get(path), type=_ServerDescription)
        except (errors.EngineError, errors.EngineContractError, errors.InvalidRequest, msgspec.MsgspecError) as error:
            if isinstance(error, errors.EngineError) and error.retry:
                raise  # it can't be reached
            continue
        if info.version or kind == "llamacpp":
            return info
    return None
