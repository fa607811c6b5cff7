"""The ASGI application: every path that the gateway answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tokentape.engines.base import UNVERIFIED
from tokentape.errors import Forbidden, NotFound, StoreError, TokentapeError
from tokentape.gateway import engine_routes, feedback, openapi, sessions, snapshots, viewing
from tokentape.gateway.access import Access, note
from tokentape.gateway.draining import Drain
from tokentape.gateway.endpoint import Dialect, Endpoint, Gateway, Nameless
from tokentape.gateway.hosts import ANY, THIS_MACHINE, AllowedHosts
from tokentape.gateway.http import ClientLeft, error_body, error_response, json_response, unexpected
from tokentape.gateway.keys import Keys
from tokentape.gateway.limits import Calls
from tokentape.gateway.turns import Turns
from tokentape.gateway.wire import responses, vllm_paths
from tokentape.gateway.wire.anthropic_messages import COUNT_PATH, AnthropicMessages, count_tokens
from tokentape.gateway.wire.chat_completions import ChatCompletions
from tokentape.gateway.wire.completions import Completions
from tokentape.gateway.wire.responses import Responses


def create_app(
    turns: Turns,
    *,
    model_id: str,
    keys: Keys | None = None,
    allowed_hosts: Collection[str] | None = None,
    drain: Drain | None = None,
) -> Starlette:
    """The gateway over one engine, one renderer and one store.

    It takes the engine and the store over: both are closed when the application shuts down, what is being written
    first. `model_id` is the model's name in replies and in /v1/models. Without `keys` whoever reaches the gateway may
    do everything. `allowed_hosts` are those that it answers as, see `AllowedHosts`; if None, any with keys, and without
    them this machine's own names. A `drain` is given to `serve` as well.
    """
    keys, drain, telemetry = keys or Keys(), drain or Drain(), turns.telemetry
    if allowed_hosts is None:
        allowed_hosts = [ANY] if keys else THIS_MACHINE
    gateway = Gateway(turns, model_id, keys, Calls(turns.limits.calls_per_key), Nameless(turns.store), drain)
    drain.abort = turns.abort_all
    telemetry.metrics.follow(telemetry.metrics.open_sessions, lambda: turns.open_sessions)
    telemetry.metrics.follow(telemetry.metrics.store_healthy, lambda: turns.store.healthy)
    verified = telemetry.metrics.model_verified
    telemetry.metrics.follow(verified, lambda: UNVERIFIED not in turns.engine.info.capabilities)
    engine = turns.engine.info
    telemetry.metrics.build.labels(version("tokentape"), engine.name, engine.version, model_id).set(1)
    anthropic_messages = AnthropicMessages(model_id, turns.renderer.template)
    dialects: list[Dialect] = [
        ChatCompletions(model_id, turns.renderer.tokenizer),
        Completions(model_id, turns.renderer.tokenizer),
        Responses(model_id, turns.renderer.tokenizer),
        anthropic_messages,
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await turns.prepare()
            async with telemetry.metrics.following(), turns.pausing.together():
                yield
        finally:
            await turns.abort_all()
            await turns.engine.close()
            if turns.checks is not None:
                await turns.checks.close()
            await asyncio.to_thread(turns.store.close)
            await asyncio.to_thread(telemetry.close)

    started = int(time.time())

    async def models(request: Request) -> Response:
        gateway.caller(request)
        model = {
            "id": model_id,
            "object": "model",
            "created": started,
            "owned_by": "tokentape",
            "max_model_len": turns.engine.info.max_context,
        }
        return json_response({"object": "list", "data": [model]})

    async def healthz(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(request: Request) -> Response:
        drain.refuse()
        await turns.engine.check()
        if not turns.store.healthy:
            raise StoreError("the store is closed or broken; nothing can be recorded until a restart")
        return json_response({"status": "ready"})

    async def metrics(request: Request) -> Response:
        if not gateway.caller(request).admin:
            raise Forbidden("metrics are for admin keys")
        exposition, content_type = telemetry.metrics.exposition(request.headers.get("accept", ""))
        return Response(exposition, media_type=content_type)

    routes = [
        *(
            Route(prefix + dialect.path, Endpoint(gateway, dialect), methods=["POST"])
            for dialect in dialects
            for prefix in ("", "/sessions/{session_id}")
        ),
        *(
            Route(prefix + COUNT_PATH, count_tokens(gateway, anthropic_messages), methods=["POST"])
            for prefix in ("", "/sessions/{session_id}")
        ),
        *sessions.routes(gateway),
        *feedback.routes(gateway),
        *snapshots.routes(gateway),
        *engine_routes.routes(gateway),
        *responses.routes(gateway),
        *vllm_paths.routes(gateway),
        *viewing.routes(gateway),
        *openapi.routes(),
        Route("/v1/models", models, methods=["GET"]),
        Route("/sessions/{session_id}/v1/models", models, methods=["GET"]),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", readyz, methods=["GET"]),
        Route("/sessions/{session_id}/health", readyz, methods=["GET"]),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={
            TokentapeError: _tokentape_error,
            HTTPException: _http_error,
            ClientLeft: _client_left,
            ClientDisconnect: _client_left,
        },
        middleware=[
            Middleware(Access, routes=routes, telemetry=telemetry, drain=drain),
            Middleware(AllowedHosts, hosts=allowed_hosts),
            Middleware(_Bugs),
        ],
        lifespan=lifespan,
    )


async def _tokentape_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokentapeError)
    note(request).error = error.code
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound("there is nothing at this path"))
    body = error_body(TokentapeError(f"{error.detail}: {request.method} is not for this path"))
    body["error"].update(type="invalid_request_error", code="method_not_allowed")
    return json_response(body, error.status_code, error.headers)


async def _client_left(request: Request, error: Exception) -> Response:
    """Nobody reads this; 499 is what access logs call it."""
    return Response(status_code=499)


class _Bugs:
    """Answers an unexpected exception with 500 and no details, and keeps it from loggers that print its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            failure = unexpected(error)
            if not note(Request(scope)).status:
                await error_response(failure)(scope, receive, send)
