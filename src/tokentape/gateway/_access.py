"""Middleware for every request: request id, log line, metrics, span, and the response to unexpected errors.

A log line contains names and numbers. The only text from callers in it is request ids and session ids, which are
checked first.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentape.errors import Forbidden
from tokentape.gateway._http import unexpected
from tokentape.gateway._limits import Drain
from tokentape.gateway._telemetry import Attribute, Telemetry

REQUEST_ID = "X-Request-Id"
_REQUEST_ID = REQUEST_ID.lower().encode()

PROBES = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
"""Paths of probes, which are logged at level DEBUG and not waited for at shutdown."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current request. Every log line written during the request has it."""

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Host names under which a gateway can be reached only from its own machine."""

ANY = "*"
"""Wildcard that allows every host name."""

_KEY = "tokentape.request_log"
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_UNMATCHED = "unmatched"

_log = logging.getLogger("tokentape.access")


@dataclass(slots=True)
class RequestLog:
    """Fields that handlers add to the log line of their request."""

    key: str = ""
    """Name of the caller's API key."""
    session_id: str = ""
    turns: list[int] = field(default_factory=list)
    engine_requests: tuple[str, ...] = ()
    """Ids of the engine's requests, one per choice."""
    reply_id: str = ""
    """Id of the reply that the request started or joined."""
    replayed: bool = False
    """Whether the request got a recorded reply."""
    error: str = ""
    """Code of the error that ended the request."""
    status: int = 0
    """Status of the response; 0 before the response begins."""


def request_log(request: Request) -> RequestLog:
    line = request.scope[_KEY]
    assert isinstance(line, RequestLog)
    return line


class AccessMiddleware:
    """Assigns an id to each request, counts and logs it, and answers exceptions with the response from `answer`.

    The id is the request's `X-Request-Id` if it consists of letters, digits and `.-_`, otherwise a random id. The
    response returns it in the same header.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[Route],
        telemetry: Telemetry,
        drain: Drain,
        answer: Callable[[Request, Exception], Response],
    ) -> None:
        self._app = app
        self._routes = routes
        keys = [(route.endpoint, *sorted(route.param_convertors)) for route in routes]
        uses = Counter(keys)
        self._paths: dict[Any, str] = {
            key: route.path for key, route in zip(keys, routes, strict=True) if uses[key] == 1
        }
        self._answer = answer
        self._telemetry = telemetry
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        requested = first_values(scope).get(_REQUEST_ID, b"").decode("latin-1")
        name = requested if _ID.fullmatch(requested) else secrets.token_hex(16)
        request_id.set(name)
        line = scope[_KEY] = RequestLog()
        received_bytes, sent_bytes, client_left, complete = 0, 0, False, False

        async def counting_receive() -> Message:
            nonlocal received_bytes, client_left
            message = await receive()
            received_bytes += len(message.get("body", b""))
            client_left = client_left or (message["type"] == "http.disconnect" and not complete)
            return message

        async def counting_send(message: Message) -> None:
            nonlocal sent_bytes, complete
            if message["type"] == "http.response.body":
                sent_bytes += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            elif message["type"] == "http.response.start":
                line.status = message["status"]
                message["headers"] = [*message["headers"], (_REQUEST_ID, name.encode())]
            await send(message)

        spans = self._telemetry.spans
        counted = nullcontext() if scope["path"] in PROBES else self._drain.requests
        attributes = dict[str, Attribute]()
        with counted, nullcontext() if spans is None else spans.request(Headers(scope=scope), attributes):
            try:
                await self._app(scope, counting_receive, counting_send)
            except Exception as error:
                if line.status:
                    unexpected(error)
                else:
                    answer = self._answer(Request(scope, receive), error)
                    await answer(scope, counting_receive, counting_send)
            finally:
                seconds = time.perf_counter() - began
                route = self._template(scope)
                fields: dict[str, object] = {
                    "method": scope["method"],
                    "route": route,
                    "status": line.status,
                    "duration_ms": round(1000 * seconds, 3),
                    "bytes_in": received_bytes,
                    "bytes_out": sent_bytes,
                    "session_id": line.session_id,
                    "turns": line.turns,
                    "key": line.key,
                    "engine_requests": line.engine_requests,
                    "error": line.error,
                    "client_left": client_left,
                }
                attributes |= {"http.request.method": scope["method"], "http.route": route}
                attributes["http.response.status_code"] = line.status
                if _log.isEnabledFor(level := logging.DEBUG if route in PROBES else logging.INFO):
                    extra = {"fields": {key: item for key, item in fields.items() if item not in ("", [], (), False)}}
                    # `log` would search the stack for the line of this call, which no format shows.
                    _log.handle(_log.makeRecord(_log.name, level, __file__, 0, "request", (), None, extra=extra))
                self._telemetry.metrics.answered(scope["method"], route, line.status, seconds)

    def _template(self, scope: Scope) -> str:
        """Return the path template of the request's route, never the raw path, which is text from the caller."""
        # The router sets `endpoint` only when it calls an endpoint, for example not for a wrong method.
        path = self._paths.get((scope["endpoint"], *sorted(scope["path_params"]))) if "endpoint" in scope else None
        if path is not None:
            return path
        return next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), _UNMATCHED)


class AllowedHosts:
    """Raises `Forbidden` if a request's `Host`, or the host of the page that a browser sends it from, is not allowed.

    An attacker's page can reach 127.0.0.1 through its own host name (DNS rebinding), which shows in `Host`, or by a
    cross-site request, which shows in `Origin`. Ports are ignored.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], advice: str) -> None:
        self._app, self._advice = app, advice
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allows(first_values(scope)):
            raise Forbidden(f"the request's Host or Origin is not accepted here; {self._advice}")
        await self._app(scope, receive, send)

    def _allows(self, headers: Mapping[bytes, bytes]) -> bool:
        host, origin = headers.get(b"host"), headers.get(b"origin")
        return (host is None or _host(b"//" + host) in self._hosts) and (origin is None or _host(origin) in self._hosts)


@lru_cache(maxsize=256)
def _host(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return None


def first_values(scope: Scope) -> dict[bytes, bytes]:
    """Return a request's headers by lower-case name, each with its first value."""
    return dict(reversed(scope["headers"]))
