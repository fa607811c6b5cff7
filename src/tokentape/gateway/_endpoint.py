"""Endpoint code that all wire APIs share: callers, sessions, retries, disconnects, replies and streams."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokentape._session.messages import LazyMessages
from tokentape.engines._base import SampleDelta
from tokentape.errors import InvalidRequest
from tokentape.gateway import _pins as pins
from tokentape.gateway._access import request_log
from tokentape.gateway._dialect import DecodedRequest, Dialect, DoneChoice, RequestContext
from tokentape.gateway._events import Attempt, TurnDelta, TurnDone, TurnEvent, TurnStarted
from tokentape.gateway._http import (
    CancelledIfClientLeaves,
    EventStream,
    check_count,
    encode_json,
    parse_json,
    read_as,
    read_json_body,
    send_whole,
)
from tokentape.gateway._keys import (
    IDEMPOTENCY_HEADER,
    SESSION_HEADER,
    Caller,
    Keys,
    check_session_id,
    client_headers,
    may_be_session_id,
    new_session_id,
)
from tokentape.gateway._limits import Drain
from tokentape.gateway._prefix import MessagesSpan, RequestBody
from tokentape.gateway._turns import Turns
from tokentape.store import Store
from tokentape.types import Message

_log = logging.getLogger("tokentape.gateway")

_MOST_RECENT = 4096
_RETRIED_WITHIN = 900.0
"""For this many seconds after a call, a retry without an Idempotency-Key is recognized in the record."""

_Body = TypeVar("_Body", bound=Struct)


class AnonymousSessions:
    """Assigns sessions to calls without a session id. A retry gets the same session as the call that it repeats."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recent: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._warned = False

    def note(self, messages: Sequence[Message]) -> None:
        """Warn, once, if a call without a session continues a conversation, because its turns can't be joined."""
        if not self._warned and any(message["role"] in ("assistant", "tool") for message in messages):
            self._warned = True
            _log.warning(
                "a call without a session id contains earlier replies. Each such call becomes its own session, so the "
                "turns are not joined to one trajectory: set the agent's base URL to .../sessions/NAME/v1, or send the "
                "header X-Session-Id. (Logged once)"
            )

    async def session_id(self, owner: str, attempt: Attempt) -> str:
        """Return the id of a call's session.

        An Idempotency-Key determines the id. Without one, a retry gets the first attempt's id, other calls a new id.
        """
        if attempt.key is not None:
            return hashlib.sha256(f"{owner}\0{attempt.key}".encode()).hexdigest()[:32]
        call = owner, attempt.body_digest
        recorded = None
        if attempt.retried and call not in self._recent:
            # Another gateway, or this gateway before a restart, may have answered the call.
            since = time.time() - _RETRIED_WITHIN
            recorded = await asyncio.to_thread(self._store.session_of_call, owner, attempt.body_digest, since)
        if not attempt.retried or call not in self._recent:
            self._recent[call] = recorded or new_session_id()
        self._recent.move_to_end(call)
        if len(self._recent) > _MOST_RECENT:
            self._recent.popitem(last=False)
        return self._recent[call]


@dataclass(frozen=True, slots=True)
class Gateway:
    """State shared by all endpoints."""

    turns: Turns
    model_id: str
    keys: Keys
    anonymous: AnonymousSessions
    drain: Drain

    def caller(self, request: Request) -> Caller:
        """Return the caller identified by the request's key. Raises `Unauthorized`."""
        caller = self.keys.caller(request.headers)
        request_log(request).key = caller.owner
        return caller

    async def json(self, request: Request) -> Any:
        """Return the request body, parsed. Raises `InvalidRequest` and `TooLarge`."""
        return parse_json(await read_json_body(request, self.turns.limits.body_bytes))

    async def read(self, request: Request, kind: type[_Body], default: _Body | None = None) -> _Body:
        """Return the request body as a Struct; `default` if it is empty. Raises `InvalidRequest` and `TooLarge`."""
        body = await read_json_body(request, self.turns.limits.body_bytes)
        return default if not body and default is not None else read_as(parse_json(body) if body else None, kind)


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """Answers the calls of one wire API, at its path and below /sessions/{session_id}.

    It is an ASGI application because starlette would wrap a function, which slows every stream event.
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
            with gateway.turns.calls.track(caller.owner):
                response = await self._answer(caller, request)
                if isinstance(response, EventStream):
                    # The call counts as in flight until its last event is sent.
                    await response(scope, receive, send)
                    complete = response.complete
                    return
            complete = await send_whole(response, scope, receive, send)
        except InvalidRequest as error:
            error.param = self.dialect.names.get(error.param or "", error.param)
            raise
        finally:
            if line.reply_id:
                gateway.turns.unread.answered(line, complete=complete)

    async def _answer(self, caller: Caller, request: Request) -> Response:
        turns, line = self.gateway.turns, request_log(request)
        data = await read_json_body(request, turns.limits.body_bytes)
        session_id = address(request, caller)
        lazy = self.dialect.read_messages is not None and session_id is not None and not turns.takes_images
        body = RequestBody(data, turns.prefixes(session_id or "", caller.owner) if lazy else ())
        try:
            parsed = parse_json(body.unread)
        except InvalidRequest:
            parse_json(data)  # names the position in the whole body
            raise
        before = body.prefix.span.count if body.prefix else 0
        count = check_count(parsed, self.dialect.lists, self.dialect.parts, before)
        # Take the span before the digest of the whole body, so that each byte is hashed only once.
        span = body.span(count, partial(check_count, lists=(), parts=self.dialect.parts)) if lazy else None
        if (id_in_body := self.dialect.session_of(parsed)) is not None:
            session_id = address(request, caller, id_in_body)
        attempt = _attempt(request.headers, self.dialect.path, body, anonymous=session_id is None)
        line.session_id = session_id or await self.gateway.anonymous.session_id(caller.owner, attempt)
        context = RequestContext(
            line.session_id,
            turns.engine.info,
            turns.vocab_size,
            turns.takes_images,
            partial(turns.conversation, line.session_id, owner=caller.owner),
            turns.reads_kwarg,
            turns.enforce_tools,
        )
        decoded, fields = await self._decode(body, parsed, span, context)
        if fields.get("span") and any(name.startswith("messages.") for name in decoded.ignored):
            # Other sessions must decode these messages too, because the first reply of each names their ignored fields.
            fields["span"] = replace(fields["span"], before=None)
        if session_id is None:
            self.gateway.anonymous.note(decoded.turn.messages)
        hint = request.headers.get(SESSION_HEADER)
        turn = replace(
            decoded.turn,
            **fields,
            owner=caller.owner,
            begins_session=caller.session_id is None,
            attempt=attempt,
            set_parameters=pins.parameters_set_in(parsed),
            client_session=None if hint is None or hint == line.session_id else hint[:128],
            client=client_headers(request.scope["headers"], line.session_id),
        )
        headers = {SESSION_HEADER: line.session_id}
        if decoded.ignored:
            headers["X-Tokentape-Ignored-Params"] = ", ".join(decoded.ignored)
        with CancelledIfClientLeaves(request.receive):
            events = await turns.begin(turn)
            try:
                started = await anext(events)
                assert isinstance(started, TurnStarted)
                line.engine_requests = started.engine_requests
                line.reply_id, line.replayed = started.reply_id, started.replayed
                turns.unread.sending(line)
                if started.replayed:
                    # A replay may not have awaited anything yet. Yield once, so that a disconnected client is noticed.
                    await asyncio.sleep(0)
                    await turns.unread.claim(line)
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
                # Send the status with the first tokens, so that earlier failures get their own status.
                first = await anext(events)
            except BaseException:
                await events.aclose()
                raise
        return EventStream(encoder.stream(first, events, line), headers, encoder.failed)

    async def _decode(
        self, body: RequestBody, parsed: Any, span: MessagesSpan | None, context: RequestContext
    ) -> tuple[DecodedRequest, dict[str, Any]]:
        """Decode a body. Return the request, and the fields to replace in its `TurnRequest`.

        Messages known from an earlier body are decoded only when they are accessed.
        """
        prefix, read = body.prefix, self.dialect.read_messages
        if prefix is None or read is None:
            return await self.dialect.decode(parsed, context), {"span": span}
        if span is not None:
            # If this fails, decode everything, so that the error names the right message index.
            with suppress(InvalidRequest):
                decoded = await self.dialect.decode(parsed, context)
                tail = decoded.turn.messages
                messages = LazyMessages(lambda: read(body.data, context), tail, prefix.key, prefix.setup, prefix.known)
                return decoded, {"messages": messages, "span": span}
        return await self.dialect.decode(parse_json(body.data), context), {}


def address(request: Request, caller: Caller, id_in_body: str | None = None) -> str | None:
    """Return the session id from a request's path, body or key, else from the header `X-Session-Id`, else None.

    An invalid id in the header is ignored, because some harnesses send their own ids there. Raises `InvalidRequest` if
    path, body and key contain an invalid id or different ids.
    """
    named = {
        "the path": request.path_params.get("session_id"),
        "previous_response_id": id_in_body,
        "the session key": caller.session_id,
    }
    names = {name for name in named.values() if name is not None}
    if len(names) > 1:
        found = ", ".join(f"{name[:64]!r} in {where}" for where, name in named.items() if name is not None)
        raise InvalidRequest(f"the request has different session ids: {found}; send only one", "session_id")
    if names:
        name = names.pop()
        check_session_id(name)
        return name
    hint = request.headers.get(SESSION_HEADER, "")
    return hint if may_be_session_id(hint) else None


def _attempt(headers: Mapping[str, str], path: str, body: RequestBody, *, anonymous: bool) -> Attempt:
    key = headers.get(IDEMPOTENCY_HEADER)
    if key is not None and not 0 < len(key) <= 256:
        raise InvalidRequest(f"{IDEMPOTENCY_HEADER} must have 1 to 256 characters", IDEMPOTENCY_HEADER)
    count = headers.get("x-stainless-retry-count", "0")
    # The `?` keeps a call without a session id from matching a call with one.
    digest = body.digest(f"{path}?" if anonymous else path)
    return Attempt(digest, key, retried=count.isdecimal() and int(count[:9]) > 0)


async def _collect(events: AsyncGenerator[TurnEvent]) -> list[DoneChoice]:
    """Read all events. Return the finished choices, ordered by index."""
    sampled: dict[int, list[SampleDelta]] = {}
    done: list[TurnDone] = []
    async for event in events:
        if isinstance(event, TurnDone):
            done.append(event)
        elif isinstance(event, TurnDelta):
            sampled.setdefault(event.choice, []).append(event.sampled)
    return [DoneChoice(choice, sampled[choice.choice]) for choice in sorted(done, key=lambda choice: choice.choice)]
