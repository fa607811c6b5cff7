"""The ASGI application with all routes of the gateway."""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from tokentape._version import __version__
from tokentape.engines._base import UNVERIFIED
from tokentape.engines._pool import EnginePool
from tokentape.errors import Forbidden, InvalidRequest, NotFound, TokentapeError
from tokentape.gateway import _sessions as sessions
from tokentape.gateway import _snapshots as snapshots
from tokentape.gateway import _viewing as viewing
from tokentape.gateway._access import ANY, THIS_MACHINE, AccessMiddleware, AllowedHosts, request_log
from tokentape.gateway._dialect import Dialect
from tokentape.gateway._endpoint import AnonymousSessions, Endpoint, Gateway
from tokentape.gateway._http import ClientLeft, error_response, json_response, unexpected
from tokentape.gateway._keys import IDEMPOTENCY_HEADER, SESSION_HEADER, Keys
from tokentape.gateway._limits import Drain
from tokentape.gateway._openapi import JSON, SESSION, ApiRoute, also_below_sessions, document_route
from tokentape.gateway._turns import Turns
from tokentape.gateway._wire import completions, responses
from tokentape.gateway._wire.anthropic_messages import AnthropicMessages, count_routes
from tokentape.gateway._wire.chat_completions import ChatCompletions
from tokentape.gateway._wire.completions import Completions
from tokentape.gateway._wire.responses import Responses

_OTHER_HOSTS = "add its host name to allowed_hosts"
_BELOW_SESSION = re.compile(r"/sessions/[^/]+(/.+)")


def create_app(
    turns: Turns,
    *,
    model_id: str,
    keys: Keys | None = None,
    allowed_hosts: Collection[str] | None = None,
    drain: Drain | None = None,
) -> Starlette:
    """Return the gateway's ASGI application for one engine, one renderer and one store.

    The application owns the engine and the store, and closes both at shutdown, after pending writes. `model_id` is the
    model's name in replies and in /v1/models. Without `keys` every client has full access. `allowed_hosts` are the
    accepted `Host` names, see `AllowedHosts`; None accepts any host if there are keys, else only this machine's own
    names. Pass the same `drain` to `serve`.
    """
    keys, drain, telemetry = keys or Keys(), drain or Drain(), turns.telemetry
    if allowed_hosts is None:
        allowed_hosts = [ANY] if keys else THIS_MACHINE
    gateway = Gateway(turns, model_id, keys, AnonymousSessions(turns.store), drain)
    drain.abort = turns.abort_all
    _follow(turns, drain, model_id)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await turns.prepare()
            async with telemetry.metrics.following(), turns.pausing.together():
                await turns.bind()
                yield
        finally:
            await turns.abort_all()
            await turns.engine.close()
            await turns.checks.close()
            await asyncio.to_thread(turns.store.close)
            await asyncio.to_thread(telemetry.close)

    routes = _routes(gateway)
    app = Starlette(routes=routes, lifespan=lifespan)
    served = app.router if ANY in allowed_hosts else AllowedHosts(app.router, allowed_hosts, _OTHER_HOSTS)
    # Without starlette's own error middleware: `AccessMiddleware` answers all errors.
    app.middleware_stack = AccessMiddleware(served, routes, telemetry, drain, _answer_error)
    return app


def _follow(turns: Turns, drain: Drain, model_id: str) -> None:
    metrics, engine = turns.telemetry.metrics, turns.engine.info
    metrics.follow(metrics.open_sessions, lambda: len(turns.sessions))
    metrics.follow(metrics.store_healthy, lambda: turns.store.healthy)
    metrics.follow(metrics.model_verified, lambda: UNVERIFIED not in turns.engine.info.capabilities)
    metrics.follow(metrics.requests_in_flight, lambda: drain.requests.count)
    metrics.follow(metrics.calls_in_flight, lambda: turns.calls_in_flight)
    metrics.build.labels(__version__, engine.name, engine.version, model_id).set(1)


def _routes(gateway: Gateway) -> list[Route]:
    turns, started = gateway.turns, int(time.time())
    tokenizer = turns.renderer.tokenizer
    anthropic_messages = AnthropicMessages(gateway.model_id, turns.renderer.template, tokenizer)
    dialects: list[Dialect] = [
        ChatCompletions(gateway.model_id, tokenizer),
        Completions(gateway.model_id, tokenizer),
        Responses(gateway.model_id, tokenizer),
        anthropic_messages,
    ]

    async def models(request: Request) -> Response:
        gateway.caller(request)
        model = {"id": gateway.model_id, "object": "model", "created": started, "owned_by": "tokentape"}
        model["max_model_len"] = turns.engine.info.max_context
        model_id = request.path_params.get("model_id")
        if model_id is None:
            return json_response({"object": "list", "data": [model]})
        if model_id != gateway.model_id:
            raise NotFound(f"this gateway does not serve that model; request {gateway.model_id!r} instead")
        return json_response(model)

    async def healthz(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(request: Request) -> Response:
        gateway.drain.refuse()
        await turns.engine.check()
        turns.store.check()
        turns.pausing.check()
        return json_response({"status": "ready"})

    async def metrics(request: Request) -> Response:
        if not gateway.caller(request).admin:
            raise Forbidden("metrics need an admin key")
        exposition, content_type = turns.telemetry.metrics.exposition(request.headers.get("accept", ""))
        return Response(exposition, media_type=content_type)

    wire: dict[str, Any] = {"media": (JSON, "text/event-stream"), "headers": (SESSION_HEADER, IDEMPOTENCY_HEADER)}
    routes: list[Route] = []
    for dialect in dialects:
        fields: dict[str, Any] = {"body": dialect.body, "more_fields": dialect.ignored}
        routes += also_below_sessions(
            "POST", dialect.path, Endpoint(gateway, dialect), dialect.summary, **fields, **wire
        )
    routes += [
        *count_routes(gateway, anthropic_messages),
        *sessions.routes(gateway),
        *sessions.feedback_routes(gateway),
        *snapshots.routes(gateway),
        *_engine_routes(gateway),
        *responses.routes(gateway),
        *completions.routes(gateway),
        *viewing.routes(gateway),
        *also_below_sessions("GET", "/v1/models", models, "The model that is served"),
        *also_below_sessions("GET", "/v1/models/{model_id:path}", models, "The model, by its name"),
        *also_below_sessions("GET", "/health", readyz, "Whether the gateway accepts turns now, under vLLM's path"),
        ApiRoute("GET", "/readyz", readyz, "Whether the gateway accepts turns now"),
        ApiRoute("GET", "/healthz", healthz, "Whether the process is alive"),
        ApiRoute(
            "GET", "/metrics", metrics, "Prometheus metrics", media=("text/plain", "application/openmetrics-text")
        ),
    ]
    return [*routes, document_route(routes)]


_Version = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


class Pause(Struct, forbid_unknown_fields=True):
    """Body of a request to pause sampling."""

    mode: Literal["wait", "abort"] = "wait"
    timeout: Annotated[float, Meta(ge=0, le=3600)] = 60.0


class ResumeSampling(Struct, forbid_unknown_fields=True):
    """Body of a request to resume sampling."""

    weight_version: _Version | None = None
    adapter: _Version | None = None
    """The adapter that has this version; None for the model."""


def _engine_routes(gateway: Gateway) -> list[Route]:
    """Return the endpoints that show the engine, and pause and resume sampling while a trainer updates the weights.

    If the gateway has keys, pause and resume need an admin key.
    """
    turns = gateway.turns

    def admin_only(request: Request) -> None:
        if not gateway.caller(request).admin:
            raise Forbidden("pausing and resuming the engine needs an admin key")

    async def state() -> dict[str, Any]:
        engine = turns.engine
        other_gateways, in_flight = await turns.pausing.in_flight_elsewhere()
        shown: dict[str, Any] = {
            "engine": str(engine.info),
            "model": engine.info.model,
            "max_context": engine.info.max_context,
            "vocab_size": turns.vocab_size,
            "sampling": sorted(engine.info.sampling),
            "paused": turns.gate.closed,
            "calls_under_way": turns.gate.calls.count + in_flight,
            "weight_version": turns.gate.weight_version,
            "adapter_versions": turns.gate.adapter_versions,
        }
        if other_gateways:
            shown["gateways"] = other_gateways + 1
        if isinstance(engine, EnginePool):
            shown["replicas"] = dict(engine.available)
        return shown

    async def show(request: Request) -> Response:
        gateway.caller(request)
        return json_response(await state())

    async def pause(request: Request) -> Response:
        admin_only(request)
        body = await gateway.read(request, Pause, Pause())
        idle = await turns.pausing.pause(abort=body.mode == "abort", seconds=body.timeout)
        return json_response({**await state(), "idle": idle})

    async def resume(request: Request) -> Response:
        admin_only(request)
        body = await gateway.read(request, ResumeSampling, ResumeSampling())
        if body.adapter is not None and body.weight_version is None:
            raise InvalidRequest("weight_version is missing; send the adapter's version with adapter", "weight_version")
        await turns.pausing.resume(body.weight_version, body.adapter)
        return json_response(await state())

    optional: dict[str, Any] = {"body_required": False}
    return [
        ApiRoute("GET", "/engine", show, "Show the engine"),
        ApiRoute("POST", "/engine/pause", pause, "Pause sampling: new engine calls wait", body=Pause, **optional),
        ApiRoute("POST", "/engine/resume", resume, "Resume sampling", body=ResumeSampling, **optional),
    ]


def _answer_error(request: Request, error: Exception) -> Response:
    """Return the response to an exception: 500 without details if it is unexpected."""
    match error:
        case TokentapeError():
            request_log(request).error = error.code
            return _error_response(request, error)
        case HTTPException():
            return _http_error(request, error)
        case ClientLeft() | ClientDisconnect():
            # The customary status in access logs if the client has closed the connection.
            return Response(status_code=499)
    return _error_response(request, unexpected(error))


def _http_error(request: Request, error: HTTPException) -> Response:
    """Answer requests that starlette rejects: unknown paths (404) and wrong methods (405)."""
    if error.status_code == 404:
        return _error_response(request, NotFound(f"the gateway has no such path{_nearest(request)}"))
    matching = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
    allowed = ", ".join(sorted({method for route in matching for method in route.methods} - {"HEAD"}))
    refused = TokentapeError(f"{request.method} is not allowed on this path; expected {allowed}")
    refused.status, refused.code = error.status_code, "method_not_allowed"
    answer = _error_response(request, refused)
    answer.headers["allow"] = allowed
    return answer


def _error_response(request: Request, error: TokentapeError) -> Response:
    endpoints = [route.endpoint for route in request.app.routes]
    dialects = [endpoint.dialect for endpoint in endpoints if isinstance(endpoint, Endpoint)]
    bodies = [dialect.error_body for dialect in dialects if dialect.claims(request)]
    return error_response(error, *bodies[:1])


def _nearest(request: Request) -> str:
    """Return a hint with the known path most similar to the request's path; empty if none is similar."""
    below = _BELOW_SESSION.fullmatch(request.url.path)
    prefix, path = (SESSION, below[1]) if below is not None else ("", request.url.path)
    paths = {route.path for route in request.app.routes if isinstance(route, Route)}
    candidates = [candidate.removeprefix(prefix) for candidate in paths if candidate.startswith(prefix)]
    nearest = difflib.get_close_matches(path, candidates, n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
