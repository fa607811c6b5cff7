"""What is known of each request: its id, its line in the log, its place in the metrics and traces.

The line has names and numbers. Of what callers write it holds only the names that they give requests and sessions,
after these have been checked to be names.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentape.errors import TokentapeError
from tokentape.gateway.draining import Drain
from tokentape.gateway.events import TurnDone, TurnEvent
from tokentape.gateway.telemetry import Telemetry

REQUEST_ID = "X-Request-Id"

PROBES = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
"""Paths that machines ask all the time: logged at level DEBUG, and answered until the very end."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that is being worked on: for every line logged meanwhile."""

_KEY = "tokentape.note"
_REQUEST_ID = REQUEST_ID.lower().encode()
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_UNMATCHED = "unmatched"

_log = logging.getLogger("tokentape.access")


@dataclass(slots=True)
class Note:
    """What handlers add to the line of their request."""

    key: str = ""
    """Name of the caller's API key."""
    session_id: str = ""
    turns: list[int] = field(default_factory=list)
    engine_requests: tuple[str, ...] = ()
    """Ids under which the engine was asked, one per choice."""
    error: str = ""
    """Code of the error that ended it."""
    status: int = 0
    """Of the response, once it has begun."""

    async def follow(self, first: TurnEvent, events: AsyncGenerator[TurnEvent]) -> AsyncGenerator[TurnEvent]:
        """`first` and then `events` as they are; what they tell is noted."""
        async with aclosing(events):
            try:
                yield first
                async for event in events:
                    if isinstance(event, TurnDone):
                        self.turns.append(event.turn.seq)
                    yield event
            except TokentapeError as error:
                self.error = error.code
                raise


def note(request: Request) -> Note:
    """The note of a request."""
    found = request.scope[_KEY]
    assert isinstance(found, Note)
    return found


class Access:
    """Around the whole application: names each request, counts it as under way, and logs it when it is answered.

    `X-Request-Id` is taken from the request if it is a name of letters, digits and `.-_`, else made; the response has
    the same.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route], telemetry: Telemetry, drain: Drain) -> None:
        self._app = app
        self._routes = routes
        uses = Counter(route.endpoint for route in routes)
        self._paths: dict[Any, str] = {route.endpoint: route.path for route in routes if uses[route.endpoint] == 1}
        self._telemetry = telemetry
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and tell of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in PROBES:
            await self._answer(scope, receive, send)
        else:
            with self._drain.one_more(), self._telemetry.metrics.requests_under_way.track_inprogress():
                await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        name = given if _ID.fullmatch(given) else secrets.token_hex(16)
        request_id.set(name)
        noted = scope[_KEY] = Note()
        received, sent, left, complete = 0, 0, False, False

        async def watched_receive() -> Message:
            nonlocal received, left
            message = await receive()
            received += len(message.get("body", b""))
            left = left or (message["type"] == "http.disconnect" and not complete)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal sent, complete
            if message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            elif message["type"] == "http.response.start":
                noted.status = message["status"]
                message["headers"] = [*message["headers"], (_REQUEST_ID, name.encode())]
            await send(message)

        with self._telemetry.spans.request(headers) as attributes:
            try:
                await self._app(scope, watched_receive, watched_send)
            finally:
                seconds = time.perf_counter() - began
                route = self._template(scope)
                fields: dict[str, object] = {
                    "method": scope["method"],
                    "route": route,
                    "status": noted.status,
                    "duration_ms": round(1000 * seconds, 3),
                    "bytes_in": received,
                    "bytes_out": sent,
                    "session_id": noted.session_id,
                    "turns": noted.turns,
                    "key": noted.key,
                    "engine_requests": noted.engine_requests,
                    "error": noted.error,
                    "client_left": left,
                }
                attributes["http.request.method"] = scope["method"]
                attributes["http.route"] = route
                attributes["http.response.status_code"] = noted.status
                _log.log(
                    logging.DEBUG if route in PROBES else logging.INFO,
                    "request",
                    extra={"fields": {key: value for key, value in fields.items() if value not in ("", [], (), False)}},
                )
                self._telemetry.metrics.answered(scope["method"], route, noted.status, seconds)

    def _template(self, scope: Scope) -> str:
        """The path of the route that takes this request: never the raw one, which callers write."""
        # The router says what it has called. What it has not, for another method for example, it had no reason to note.
        path = self._paths.get(scope["endpoint"]) if "endpoint" in scope else None
        if path is not None:
            return path
        return next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), _UNMATCHED)
