"""The engine as a resource: what it is, and a gate that trainers close while they change the weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape.engines.pool import EnginePool
from tokentape.errors import Forbidden
from tokentape.gateway.endpoint import Gateway
from tokentape.gateway.http import json_response, read_as, read_json

_Version = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


class Pause(Struct, forbid_unknown_fields=True):
    """What pausing takes."""

    mode: Literal["wait", "abort"] = "wait"
    timeout: Annotated[float, Meta(ge=0, le=3600)] = 60.0


class Resume(Struct, forbid_unknown_fields=True):
    """What resuming takes."""

    weight_version: _Version | None = None


def routes(gateway: Gateway) -> list[Route]:
    """The endpoints under /engine. With keys, pausing and resuming need an admin's."""
    turns = gateway.turns

    def refuse_others(request: Request) -> None:
        if not gateway.caller(request).admin:
            raise Forbidden("pausing and resuming the engine takes an admin key")

    async def state() -> dict[str, Any]:
        engine = turns.engine
        others, under_way = await turns.pausing.under_way_elsewhere()
        told: dict[str, Any] = {
            "engine": str(engine.info),
            "model": engine.info.model,
            "max_context": engine.info.max_context,
            "vocab_size": turns.vocab_size,
            "sampling": sorted(engine.info.sampling),
            "paused": turns.gate.closed,
            "calls_under_way": turns.gate.under_way + under_way,
            "weight_version": turns.gate.weight_version,
        }
        if others:
            told["gateways"] = others + 1
        if isinstance(engine, EnginePool):
            told["replicas"] = dict(engine.available)
        return told

    async def show(request: Request) -> Response:
        gateway.caller(request)
        return json_response(await state())

    async def pause(request: Request) -> Response:
        refuse_others(request)
        body = await read_json(request, gateway.limits.body_bytes)
        asked = Pause() if body is None else read_as(body, Pause)
        idle = await turns.pausing.pause(abort=asked.mode == "abort", seconds=asked.timeout)
        return json_response({**await state(), "idle": idle})

    async def resume(request: Request) -> Response:
        refuse_others(request)
        body = await read_json(request, gateway.limits.body_bytes)
        asked = Resume() if body is None else read_as(body, Resume)
        await turns.pausing.resume(asked.weight_version)
        return json_response(await state())

    return [
        Route("/engine", show, methods=["GET"]),
        Route("/engine/pause", pause, methods=["POST"]),
        Route("/engine/resume", resume, methods=["POST"]),
    ]
