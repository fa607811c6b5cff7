"""What every wire API shares: who asks, which session, retries, clients that leave, replies and streams."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokentape.engines.base import EngineInfo, SampleDelta
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.gateway import pins
from tokentape.gateway.access import note
from tokentape.gateway.draining import Drain
from tokentape.gateway.events import Attempt, TurnDelta, TurnDone, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway.http import (
    EventStream,
    UnlessClientLeaves,
    encode_json,
    error_headers,
    json_response,
    parse_json,
    read_body,
)
from tokentape.gateway.keys import Caller, Keys
from tokentape.gateway.known_prefix import Body, Known
from tokentape.gateway.limits import Calls, Limits
from tokentape.gateway.session_ids import check_session_id, new_session_id
from tokentape.gateway.turns import Turns
from tokentape.store import Store
from tokentape.types import Message

_RETRIED_WITHIN = 900.0
"""Seconds; clients retry what they have just asked."""


@dataclass(frozen=True, slots=True)
class DoneChoice:
    """One finished choice: what was sampled, delta by delta, and how it was recorded."""

    done: TurnDone
    sampled: Sequence[SampleDelta]


class Encoder(Protocol):
    """Writes the replies to one request in a dialect."""

    def whole(self, choices: Sequence[DoneChoice]) -> Any:
        """The reply to a request without `stream`, to be written as JSON."""
        ...

    def stream(self, events: AsyncGenerator[TurnEvent]) -> AsyncGenerator[bytes]:
        """The events of a stream, behind the `TurnStarted`. It must read `events` to their end before its last one."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A decoded request."""

    turn: TurnRequest
    encoder: Callable[[TurnStarted], Encoder]
    unhonoured: tuple[str, ...] = ()
    """Parameters that were accepted and can't be enforced; the reply's header `X-Tokentape-Unhonoured` names them."""


class Asking(Protocol):
    """What decoding a body may need to know besides it."""

    @property
    def session_id(self) -> str:
        """Where the turn is to be taken."""
        ...

    @property
    def engine(self) -> EngineInfo:
        """What samples."""
        ...

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold images."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids at or above this are not accepted."""
        ...

    async def conversation(self, reply_id: str) -> tuple[Message, ...]:
        """The messages up to and including an earlier reply of the session. Raises `NotFound`."""
        ...


class Dialect(Protocol):
    """A wire API: how its bodies, replies and errors are written."""

    path: str
    """Below a base URL, for example `/v1/chat/completions`."""

    @property
    def read_messages(self) -> Callable[[bytes, Asking], tuple[Message, ...]] | None:
        """Reads the messages of a body that was accepted.

        None where a body has no array `messages`, or where what one of them means depends on those before it.
        """
        ...

    def session_of(self, body: Any) -> str | None:
        """The session that the body itself names, if this API has such a field and it is used."""
        ...

    async def decode(self, body: Any, asking: Asking) -> Asked:
        """Read a body, already parsed as JSON. Raises `InvalidRequest` and kinds, naming the parameter."""
        ...

    def error(self, error: TokentapeError) -> Any:
        """An error's body, to be written as JSON."""
        ...

    def error_event(self, error: TokentapeError) -> bytes:
        """An error as the last event of a stream."""
        ...


class Nameless:
    """Sessions for calls that name none, such that a retry of a call finds the session of the call."""

    def __init__(self, store: Store, most: int = 4096) -> None:
        self._store = store
        self._most = most
        self._recent: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def session_id(self, owner: str, attempt: Attempt) -> str:
        """The session for a call: with an Idempotency-Key always the same one, else a new one unless it is a retry."""
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
    calls: Calls
    nameless: Nameless
    drain: Drain

    def caller(self, request: Request) -> Caller:
        """Who sent a request. Raises `Unauthorized`."""
        caller = self.keys.caller(request.headers)
        note(request).key = caller.owner
        return caller

    @property
    def limits(self) -> Limits:
        """The limits of this gateway."""
        return self.turns.limits


@dataclass(frozen=True, slots=True)
class _Asking:
    turns: Turns
    session_id: str
    owner: str

    @property
    def engine(self) -> EngineInfo:
        return self.turns.engine.info

    @property
    def takes_images(self) -> bool:
        return self.turns.takes_images

    @property
    def vocab_size(self) -> int:
        return self.turns.vocab_size

    async def conversation(self, reply_id: str) -> tuple[Message, ...]:
        return await self.turns.conversation(self.session_id, reply_id, self.owner)


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """What answers at a dialect's path, with the session in the path or elsewhere.

    An ASGI application of its own: around a function starlette puts a wrapper that every event would pass.
    """

    gateway: Gateway
    dialect: Dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        gateway, dialect = self.gateway, self.dialect
        try:
            gateway.drain.refuse()
            caller = gateway.caller(request)
            with ExitStack() as held:
                held.enter_context(gateway.calls.one_more(caller.owner))
                response = await _answer(gateway, dialect, caller, request)
                if isinstance(response, EventStream):
                    # Its call is under way until the last event.
                    response.held = held.pop_all()
                return response
        except TokentapeError as error:
            note(request).error = error.code
            return json_response(dialect.error(error), error.status, error_headers(error))


async def _answer(gateway: Gateway, dialect: Dialect, caller: Caller, request: Request) -> Response:
    turns = gateway.turns
    body = await _body(gateway, dialect, caller, request)
    parsed = parse_json(body.unread)
    named = address(request, caller, dialect.session_of(parsed))
    session_id = named
    if session_id is None:
        unnamed = _attempt(request, dialect, body, nameless=True)
        session_id = await gateway.nameless.session_id(caller.owner, unnamed)
    noted = note(request)
    noted.session_id = session_id
    asking = _Asking(turns, session_id, caller.owner)
    place, read = None, None
    try:
        asked = await dialect.decode(parsed, asking)
        if dialect.read_messages is not None and named is not None:
            place = body.place()
    except InvalidRequest:
        if body.known is None:
            raise
    if body.known is not None:
        if place is None or dialect.read_messages is None:
            # For an error that counts all messages, and for a body that has its messages in two places.
            body.forget()
            asked = await dialect.decode(parse_json(body.unread), asking)
        else:
            read = partial(dialect.read_messages, body.data, asking)
    turn = replace(
        asked.turn,
        owner=caller.owner,
        # After the place of the messages, so that the body is hashed once.
        attempt=_attempt(request, dialect, body, nameless=named is None),
        given=pins.given_in(parsed),
        place=place,
        known=body.known,
        read=read,
    )
    headers = {"X-Session-Id": session_id}
    if asked.unhonoured:
        headers["X-Tokentape-Unhonoured"] = ", ".join(asked.unhonoured)
    async with UnlessClientLeaves(request), AsyncExitStack() as unread:
        events = await turns.begin(turn)
        unread.push_async_callback(events.aclose)
        started = await anext(events)
        assert isinstance(started, TurnStarted)
        noted.engine_requests = started.engine_requests
        encoder = asked.encoder(started)
        if started.overridden:
            headers["X-Tokentape-Overridden"] = pins.header(started.overridden)
        if started.replayed:
            headers["X-Tokentape-Replayed"] = "true"
        if not turn.stream:
            choices = await _collect(events)
            noted.turns = [choice.done.turn.seq for choice in choices]
            headers["X-Tokentape-Turn"] = ",".join(map(str, noted.turns))
            return Response(encode_json(encoder.whole(choices)), 200, headers, "application/json")
        # The status line waits for the first tokens, so that whatever fails before them has its own status.
        first = await anext(events)
        unread.pop_all()
    return EventStream(encoder.stream(noted.follow(first, events)), headers, dialect.error_event)


async def _body(gateway: Gateway, dialect: Dialect, caller: Caller, request: Request) -> Body:
    """The body, and what is known of it if it is a call in a session in memory."""
    data = await read_body(request, gateway.limits.body_bytes)
    known: Sequence[Known] = ()
    if dialect.read_messages is not None and not gateway.turns.takes_images:
        session_id = address(request, caller)
        if session_id is not None:
            known = gateway.turns.known(session_id, caller.owner)
    return Body(data, known)


def address(request: Request, caller: Caller, named: str | None = None) -> str | None:
    """The session that a request names: in its path, its body, its header `X-Session-Id` or its key; None if nowhere.

    Raises `InvalidRequest` for what can't be a session's id, and if two of them name different ones.
    """
    given = [
        request.path_params.get("session_id"),
        named,
        request.headers.get("x-session-id"),
        caller.session_id,
    ]
    names = {name for name in given if name is not None}
    if len(names) > 1:
        raise InvalidRequest("path, body, header and key name different sessions; name one", "session_id")
    for name in names:
        check_session_id(name)
        return name
    return None


def _attempt(request: Request, dialect: Dialect, body: Body, *, nameless: bool) -> Attempt:
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= 256:
        raise InvalidRequest("an Idempotency-Key has 1 to 256 characters", "Idempotency-Key")
    count = request.headers.get("x-stainless-retry-count", "0")
    # A call that names no session is not found in one that has a name.
    path = f"{dialect.path}?" if nameless else dialect.path
    return Attempt(body.digest(path), key, retried=count.isdecimal() and int(count[:9]) > 0)


async def _collect(events: AsyncGenerator[TurnEvent]) -> list[DoneChoice]:
    """Read the events to their end and return all choices, in order."""
    sampled: dict[int, list[SampleDelta]] = {}
    done: list[TurnDone] = []
    async for event in events:
        if isinstance(event, TurnDone):
            done.append(event)
        elif isinstance(event, TurnDelta):
            sampled.setdefault(event.choice, []).append(event.sampled)
    done.sort(key=lambda one: one.choice)
    return [DoneChoice(one, sampled[one.choice]) for one in done]
