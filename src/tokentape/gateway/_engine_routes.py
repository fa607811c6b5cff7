"""Endpoints for the engine: show it, and pause and resume sampling while a trainer updates the weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape.engines._pool import EnginePool
from tokentape.errors import Forbidden, InvalidRequest
from tokentape.gateway._endpoint import Gateway
from tokentape.gateway._http import json_response
from tokentape.gateway._openapi import ApiRoute

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


def routes(gateway: Gateway) -> list[Route]:
    """Return the endpoints under /engine. If the gateway has keys, pause and resume need an admin key."""
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
