"""What every wire API shares: callers, sessions, retries, clients that leave, replies and streams."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokentape._session.tree import LazyMessages
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import EngineInfo, SampleDelta
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.gateway import _pins as pins
from tokentape.gateway._access import request_log
from tokentape.gateway._events import Attempt, SampleEvent, TurnDelta, TurnDone, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway._http import (
    EventStream,
    cancelled_if_client_leaves,
    check_count,
    encode_event,
    encode_json,
    error_body,
    parse_json,
    read_as,
    read_json_body,
)
from tokentape.gateway._keys import Caller, Keys, check_session_id, may_be_session_id, new_session_id
from tokentape.gateway._limits import Drain
from tokentape.gateway._prefix import MessagesSpan, RequestBody
from tokentape.gateway._turns import Turns
from tokentape.store import Store
from tokentape.types import Message

_RETRIED_WITHIN = 900.0
"""Seconds; clients retry soon."""

_CLIENT_HEADERS = {
    # Claude Code; the class and `context-compacted` only with CLAUDE_CODE_GATEWAY_HINT_HEADERS=1.
    b"x-claude-code-session-id": "session",
    b"x-claude-code-agent-id": "agent",
    b"x-claude-code-parent-agent-id": "parent_agent",
    b"x-claude-code-request-class": "kind",
    b"x-claude-code-context-compacted": "compacted",
    # Codex. The window is `THREAD:NUMBER`, another number after each compaction.
    b"session-id": "session",
    b"thread-id": "agent",
    b"x-codex-parent-thread-id": "parent_agent",
    b"x-openai-subagent": "kind",
    b"x-codex-window-id": "window",
    # opencode.
    b"x-session-affinity": "session",
    b"x-parent-session-id": "parent",
    # Dynamo's agents.
    b"x-dynamo-session-id": "session",
    b"x-dynamo-parent-session-id": "parent",
    # The SDKs of OpenAI and Anthropic.
    b"x-stainless-retry-count": "retry",
}
"""Headers of harnesses and routers that say a call's place among others, for `_session.lineage`."""

_Body = TypeVar("_Body", bound=Struct)


@dataclass(frozen=True, slots=True)
class DoneChoice:
    """One finished choice: what was sampled, delta by delta, and how it was recorded."""

    done: TurnDone
    sampled: Sequence[SampleDelta]


class Encoder(Protocol):
    """Writes the replies to one request in a dialect."""

    def whole(self, choices: Sequence[DoneChoice]) -> Any:
        """Return the reply to a request without `stream`, to be written as JSON."""
        ...

    def stream(self, events: AsyncGenerator[SampleEvent]) -> AsyncGenerator[bytes]:
        """Yield the events of a stream after the `TurnStarted`. It must read `events` to their end before its last."""
        ...


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A request as a wire API reads it."""

    turn: TurnRequest
    encoder: Callable[[TurnStarted], Encoder]
    ignored: tuple[str, ...] = ()
    """Parameters that were accepted but can't be enforced; the header `X-Tokentape-Ignored-Params` names them."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What decoding a body may need to know besides it."""

    session_id: str
    engine: EngineInfo
    vocab_size: int
    """Ids at or above this are not accepted."""
    takes_images: bool
    conversation: Callable[[str], Awaitable[tuple[Message, ...]]]
    """Returns the messages up to and including an earlier reply of the session. Raises `NotFound`."""


class Dialect:
    """A wire API: how its bodies and replies are written.

    `model_id` is the model's name in replies, `tokenizer` spells and counts tokens there.
    """

    path: str
    """Below a base URL, for example `/v1/chat/completions`."""
    summary: str
    """Its name in the OpenAPI document."""
    body: type[Struct]
    """The fields of its bodies."""
    ignored: frozenset[str]
    """Other fields that are accepted and have no effect."""
    read_messages: Callable[[bytes, RequestContext], tuple[Message, ...]] | None = None
    """Reads the messages of a body that was accepted.

    None where a body has no array `messages`, or where the meaning of a message depends on those before it.
    """

    def __init__(self, model_id: str, tokenizer: Tokenizer) -> None:
        self.model_id = model_id
        self.tokenizer = tokenizer

    def session_of(self, body: Any) -> str | None:
        """Return the session that the body itself names, if this API has such a field and it is used."""
        return None

    async def decode(self, body: Any, context: RequestContext) -> DecodedRequest:
        """Read a body, already parsed as JSON. Raises `InvalidRequest` and kinds, naming the parameter."""
        raise NotImplementedError

    def error_event(self, error: TokentapeError) -> bytes:
        """Return an error as the last event of a stream."""
        return encode_event(error_body(error))


class AnonymousSessions:
    """Sessions for calls that name none, such that a retry of a call finds the session of the call."""

    def __init__(self, store: Store, most: int = 4096) -> None:
        self._store = store
        self._most = most
        self._recent: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def session_id(self, owner: str, attempt: Attempt) -> str:
        """Return the session for a call: with an Idempotency-Key always the same, else a new one unless it retries."""
        if attempt.key is not None:
            return hashlib.sha256(f"{owner}\0{attempt.key}".encode()).hexdigest()[:32]
        call = owner, attempt.body_digest
        recorded = None
        if attempt.retried and call not in self._recent:
            # The call may have been answered by another gateway, or before a restart.
            since = time.time() - _RETRIED_WITHIN
            recorded = await asyncio.to_thread(self._store.session_of_call, owner, attempt.body_digest, since)
        if not attempt.retried or call not in self._recent:
            self._recent[call] = recorded or new_session_id()
        self._recent.move_to_end(call)
        if len(self._recent) > self._most:
            self._recent.popitem(last=False)
        return self._recent[call]


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the endpoints share."""

    turns: Turns
    model_id: str
    keys: Keys
    anonymous: AnonymousSessions
    drain: Drain

    def caller(self, request: Request) -> Caller:
        """Return who sent a request. Raises `Unauthorized`."""
        caller = self.keys.caller(request.headers)
        request_log(request).key = caller.owner
        return caller

    async def read(self, request: Request, kind: type[_Body], default: _Body | None = None) -> _Body:
        """Return the request's body as a Struct, `default` if it has none. Raises `InvalidRequest` and `TooLarge`."""
        body = await read_json_body(request, self.turns.limits.body_bytes)
        return default if not body and default is not None else read_as(parse_json(body) if body else None, kind)


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """Answers at a dialect's path, with the session in the path or elsewhere.

    An ASGI application of its own: starlette wraps a function in another, which every event would pass.
    """

    gateway: Gateway
    dialect: Dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, gateway = Request(scope, receive, send), self.gateway
        response: Response
        line, complete = request_log(request), False
        try:
            gateway.drain.refuse()
            caller = gateway.caller(request)
            with ExitStack() as held:
                held.enter_context(gateway.turns.calls.track(caller.owner))
                response = await self._answer(caller, request)
                if isinstance(response, EventStream):
                    # Its call is in flight until the last event.
                    response.held = held.pop_all()
            await response(scope, receive, send)
            complete = not isinstance(response, EventStream) or response.complete
        finally:
            if line.reply_id:
                gateway.turns.unread.answered(line, complete=complete)

    async def _answer(self, caller: Caller, request: Request) -> Response:
        turns, line = self.gateway.turns, request_log(request)
        data = await read_json_body(request, turns.limits.body_bytes)
        session_id = address(request, caller)
        lazy = self.dialect.read_messages is not None and session_id is not None and not turns.takes_images
        body = RequestBody(data, turns.sessions.prefixes(session_id or "", caller.owner) if lazy else ())
        parsed = parse_json(body.unread)
        count = check_count(parsed, body.prefix.span.count if body.prefix else 0)
        # Before the digest of the whole body, so that each byte is hashed once.
        span = body.span(count) if lazy else None
        session_id = address(request, caller, self.dialect.session_of(parsed))
        attempt = _attempt(request, self.dialect.path, body, anonymous=session_id is None)
        line.session_id = session_id or await self.gateway.anonymous.session_id(caller.owner, attempt)
        context = RequestContext(
            line.session_id,
            turns.engine.info,
            turns.vocab_size,
            turns.takes_images,
            partial(turns.conversation, line.session_id, owner=caller.owner),
        )
        decoded = await self._decode(body, parsed, span, context)
        hint = request.headers.get("x-session-id")
        turn = replace(
            decoded.turn,
            owner=caller.owner,
            begins_session=caller.session_id is None,
            attempt=attempt,
            given=pins.given_in(parsed),
            client_session=None if hint is None or hint == line.session_id else hint[:128],
            client=client_headers(request.scope["headers"], line.session_id),
        )
        headers = {"X-Session-Id": line.session_id}
        if decoded.ignored:
            headers["X-Tokentape-Ignored-Params"] = ", ".join(decoded.ignored)
        async with cancelled_if_client_leaves(request.receive), AsyncExitStack() as unread:
            events = await turns.begin(turn)
            unread.push_async_callback(events.aclose)
            started = await anext(events)
            assert isinstance(started, TurnStarted)
            if started.replayed:
                # Nothing may have been awaited: a client that had left before is noticed now, and has not read it.
                await asyncio.sleep(0)
            line.engine_requests = started.engine_requests
            line.reply_id, line.replayed = started.reply_id, started.replayed
            encoder = decoded.encoder(started)
            if started.overridden:
                headers["X-Tokentape-Overridden"] = pins.header(started.overridden)
            if started.replayed:
                headers["X-Tokentape-Replayed"] = "true"
            if not turn.stream:
                choices = await _collect(events)
                line.turns += [choice.done.turn.seq for choice in choices]
                headers["X-Tokentape-Turn"] = ",".join(map(str, line.turns))
                return Response(encode_json(encoder.whole(choices)), 200, headers, "application/json")
            # The status waits for the first tokens, so that whatever fails before them has its own status.
            first = await anext(events)
            unread.pop_all()
        return EventStream(encoder.stream(line.follow(first, events)), headers, self.dialect.error_event)

    async def _decode(
        self, body: RequestBody, parsed: Any, span: MessagesSpan | None, context: RequestContext
    ) -> DecodedRequest:
        """Decode a body. Messages that an earlier body had too are read only if something looks at them."""
        prefix, read = body.prefix, self.dialect.read_messages
        if prefix is not None and read is not None:
            if span is not None:
                try:
                    decoded = await self.dialect.decode(parsed, context)
                    messages = LazyMessages(
                        lambda: read(body.data, context), decoded.turn.messages, prefix.key, prefix.setup
                    )
                    return replace(decoded, turn=replace(decoded.turn, messages=messages, span=span))
                except InvalidRequest:
                    # The error has to count all messages.
                    pass
            parsed, span = parse_json(body.data), None
        decoded = await self.dialect.decode(parsed, context)
        return replace(decoded, turn=replace(decoded.turn, span=span))


def address(request: Request, caller: Caller, named: str | None = None) -> str | None:
    """Return the session that a request names: in its path, body or key, else in the header `X-Session-Id`.

    None if it names none. The header is a hint, since some harnesses send a session id of their own in it; what can't
    be an id here is ignored. Raises `InvalidRequest` if the path, body or key name that, or different sessions.
    """
    given = [request.path_params.get("session_id"), named, caller.session_id]
    names = {name for name in given if name is not None}
    if len(names) > 1:
        raise InvalidRequest("path, body and key name different sessions; name one", "session_id")
    if names:
        name = names.pop()
        check_session_id(name)
        return name
    hint = request.headers.get("x-session-id", "")
    return hint if may_be_session_id(hint) else None


def _attempt(request: Request, path: str, body: RequestBody, *, anonymous: bool) -> Attempt:
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= 256:
        raise InvalidRequest("an Idempotency-Key has 1 to 256 characters", "Idempotency-Key")
    count = request.headers.get("x-stainless-retry-count", "0")
    # A call that names no session is not a retry of one that does.
    digest = body.digest(f"{path}?" if anonymous else path)
    return Attempt(digest, key, retried=count.isdecimal() and int(count[:9]) > 0)


async def _collect(events: AsyncGenerator[TurnEvent]) -> list[DoneChoice]:
    """Read the events to their end and return all choices, in order."""
    sampled: dict[int, list[SampleDelta]] = {}
    done: list[TurnDone] = []
    async for event in events:
        if isinstance(event, TurnDone):
            done.append(event)
        elif isinstance(event, TurnDelta):
            sampled.setdefault(event.choice, []).append(event.sampled)
    return [DoneChoice(one, sampled[one.choice]) for one in sorted(done, key=lambda one: one.choice)]


def client_headers(headers: Iterable[tuple[bytes, bytes]], session_id: str) -> dict[str, str]:
    """Return what raw headers say, by names that all harnesses share; without what says nothing beside the session.

    >>> client_headers([(b"x-parent-session-id", b"ses_1"), (b"x-stainless-retry-count", b"0")], "ses_2")
    {'parent': 'ses_1'}
    """
    found = {_CLIENT_HEADERS[name]: value for name, value in headers if name in _CLIENT_HEADERS and value.strip()}
    texts = {name: value.decode("latin-1").replace("\0", "")[:128] for name, value in found.items()}
    plain = {"session": session_id, "retry": "0"}
    return {name: text for name, text in sorted(texts.items()) if text != plain.get(name)}
