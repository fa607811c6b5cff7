"""What every wire API shares: who asks, which session, retries, clients that leave, replies and streams."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from tokentape.engines.base import EngineInfo, SampleDelta
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.gateway.access import note
from tokentape.gateway.draining import Drain
from tokentape.gateway.events import Attempt, TurnDelta, TurnDone, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway.http import (
    EventStream,
    encode_json,
    error_headers,
    json_response,
    parse_json,
    read_body,
    unless_client_leaves,
)
from tokentape.gateway.keys import Caller, Keys
from tokentape.gateway.limits import Calls, Limits
from tokentape.gateway.session_ids import check_session_id, new_session_id
from tokentape.gateway.turns import Turns
from tokentape.types import Message


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

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._recent: OrderedDict[tuple[str, str], str] = OrderedDict()

    def session_id(self, owner: str, attempt: Attempt) -> str:
        """The session for a call: with an Idempotency-Key always the same one, else a new one unless it is a retry."""
        if attempt.key is not None:
            return hashlib.sha256(f"{owner}\0{attempt.key}".encode()).hexdigest()[:32]
        call = owner, attempt.body_digest
        if not attempt.retried or call not in self._recent:
            self._recent[call] = new_session_id()
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


def endpoint(gateway: Gateway, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
    """The handler of a dialect's path, with the session in the path or elsewhere."""

    async def answer(request: Request) -> Response:
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

    return answer


async def _answer(gateway: Gateway, dialect: Dialect, caller: Caller, request: Request) -> Response:
    turns = gateway.turns
    data = await read_body(request, gateway.limits.body_bytes)
    body = parse_json(data)
    attempt = _attempt(request, dialect, data)
    session_id = address(request, caller, dialect.session_of(body)) or gateway.nameless.session_id(
        caller.owner, attempt
    )
    noted = note(request)
    noted.session_id = session_id
    asked = await dialect.decode(body, _Asking(turns, session_id, caller.owner))
    turn = replace(asked.turn, owner=caller.owner, attempt=attempt)
    events = noted.follow(turns.take(turn))
    started = await unless_client_leaves(request, anext(events))
    assert isinstance(started, TurnStarted)
    encoder = asked.encoder(started)
    headers = {"X-Session-Id": session_id}
    if asked.unhonoured:
        headers["X-Tokentape-Unhonoured"] = ", ".join(asked.unhonoured)
    if started.replayed:
        headers["X-Tokentape-Replayed"] = "true"
    if not turn.stream:
        choices = await unless_client_leaves(request, _collect(events))
        headers["X-Tokentape-Turn"] = ",".join(str(choice.done.turn.seq) for choice in choices)
        return Response(encode_json(encoder.whole(choices)), 200, headers, "application/json")
    # The status line waits for the first tokens, so that whatever fails before them has its own status.
    first = await unless_client_leaves(request, anext(events))
    return EventStream(encoder.stream(_with_first(first, events)), headers, dialect.error_event)


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


def _attempt(request: Request, dialect: Dialect, data: bytes) -> Attempt:
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= 256:
        raise InvalidRequest("an Idempotency-Key has 1 to 256 characters", "Idempotency-Key")
    count = request.headers.get("x-stainless-retry-count", "0")
    digest = hashlib.sha256(dialect.path.encode() + b"\0" + data).hexdigest()
    return Attempt(digest, key, retried=count.isdecimal() and int(count[:9]) > 0)


async def _collect(events: AsyncGenerator[TurnEvent]) -> list[DoneChoice]:
    """Read the events to their end and return all choices, in order."""
    sampled: dict[int, list[SampleDelta]] = {}
    done: list[TurnDone] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, TurnDone):
                done.append(event)
            elif isinstance(event, TurnDelta):
                sampled.setdefault(event.choice, []).append(event.sampled)
    done.sort(key=lambda one: one.choice)
    return [DoneChoice(one, sampled[one.choice]) for one in done]


async def _with_first(first: TurnEvent, events: AsyncGenerator[TurnEvent]) -> AsyncGenerator[TurnEvent]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event
