"""Endpoints for snapshots: freeze sessions, export them, confirm that the export is safe, and only then drop them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tokentape._session.arrow import ExtraNames, write_parquet
from tokentape._session.fields import SCHEMA_VERSION
from tokentape._session.jsonl import json_line
from tokentape.errors import Conflict, Forbidden, NotFound
from tokentape.gateway._endpoint import Gateway
from tokentape.gateway._http import check_depth, json_response
from tokentape.gateway._keys import Caller
from tokentape.gateway._openapi import ApiRoute
from tokentape.gateway._sessions import PARQUET, query_flag, wants_parquet
from tokentape.store._snapshots import Selection, Snapshot, Snapshots

JSON_LINES = "application/jsonl"

_CHUNK = 1 << 20


class NewSnapshot(Struct, forbid_unknown_fields=True):
    """Body of a request to take a snapshot. It selects the sessions that match all fields that are set.

    With an admin key, `owner` is the snapshot's owner, by which `tokentape archive` recognizes its own snapshots.
    """

    session_ids: list[str] | None = None
    since: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    idle_seconds: Annotated[float, Meta(ge=0)] | None = None
    metadata: dict[str, Any] | None = None
    owner: str | None = None
    wait_checks: Annotated[int, Meta(ge=0, le=60)] = 0


class Confirmation(Struct, forbid_unknown_fields=True):
    """Body of a request to confirm a snapshot."""

    digest: str
    drop_sessions: bool = False


def routes(gateway: Gateway) -> list[Route]:
    """Return the endpoints under /snapshots.

    A snapshot is visible only to the API key that took it and to admin keys. A session key can't take snapshots.
    """
    turns = gateway.turns
    snapshots = Snapshots(turns.store)

    def asking(request: Request) -> Caller:
        caller = gateway.caller(request)
        if caller.session_id is not None:
            raise Forbidden("a session key can't use snapshots; use an API key")
        return caller

    async def create(request: Request) -> Response:
        caller = asking(request)
        body = await gateway.read(request, NewSnapshot, NewSnapshot())
        if body.owner is not None and not caller.admin:
            raise Forbidden("only a request with an admin key can set the owner of a snapshot")
        check_depth(body.metadata or {}, "metadata")
        session_ids = None if body.session_ids is None else tuple(body.session_ids)
        selection = Selection(session_ids, body.since, body.idle_seconds, body.metadata or {})
        await turns.checks.wait(selection.session_ids, body.wait_checks)
        await turns.unread.recorded()
        snapshot = await snapshots.take(selection, body.owner or caller.owner, caller.sees)
        return json_response(_manifest(snapshot), 201, {"Location": f"/snapshots/{snapshot.snapshot_id}"})

    async def show_all(request: Request) -> Response:
        visible = await asyncio.to_thread(snapshots.all, asking(request).sees)
        return json_response({"object": "list", "data": [_summary(snapshot) for snapshot in visible]})

    async def show(request: Request) -> Response:
        return json_response(_manifest(await snapshots.snapshot(_id(request), asking(request).sees)))

    async def show_trajectories(request: Request) -> Response:
        snapshot = await snapshots.snapshot(_id(request), asking(request).sees)
        if snapshot.state == "released" or snapshot.contents is None:
            raise Conflict(f"snapshot {snapshot.snapshot_id} was released, so its contents are gone; take a new one")
        headers = {"X-Tokentape-Digest": str(snapshot.digest)}
        if not wants_parquet(request, "jsonl"):
            lines = map(json_line, snapshots.trajectories(snapshot.snapshot_id))
            return StreamingResponse(lines, headers=headers, media_type=JSON_LINES)
        extra = ExtraNames(tuple(snapshot.contents["columns"]), tuple(snapshot.contents["payloads"]))
        file = await asyncio.to_thread(_parquet, snapshots, snapshot.snapshot_id, extra)
        return StreamingResponse(_chunks(file), headers=headers, media_type=PARQUET)

    async def confirm(request: Request) -> Response:
        caller, snapshot_id = asking(request), _id(request)
        body = await gateway.read(request, Confirmation)
        await snapshots.confirm(snapshot_id, caller.sees, body.digest)
        if body.drop_sessions:
            return await drop(snapshot_id, caller)
        return json_response(_summary(await snapshots.snapshot(snapshot_id, caller.sees)))

    async def delete(request: Request) -> Response:
        caller, snapshot_id = asking(request), _id(request)
        if query_flag(request, "drop_sessions"):
            return await drop(snapshot_id, caller)
        await snapshots.release(snapshot_id, caller.sees)
        return json_response(_summary(await snapshots.snapshot(snapshot_id, caller.sees)))

    async def drop(snapshot_id: int, caller: Caller) -> Response:
        # Keep sessions with a reply that a retry has just received, because the snapshot lacks that reply.
        await turns.unread.recorded()
        dropped, reasons = await snapshots.drop(snapshot_id, caller.sees, turns.sessions_in_use())
        turns.forget(dropped)
        snapshot = await snapshots.snapshot(snapshot_id, caller.sees)
        kept = [{"session_id": session_id, "reason": reason} for session_id, reason in reasons.items()]
        return json_response({**_summary(snapshot), "dropped": dropped, "kept": kept})

    path = "/snapshots/{snapshot_id}"
    new: dict[str, Any] = {"body": NewSnapshot, "body_required": False, "status": 201}
    rows: dict[str, Any] = {"media": (JSON_LINES, PARQUET), "query": {"format": {"type": "string"}}}
    drops = {"drop_sessions": {"type": "boolean"}}
    return [
        ApiRoute("POST", "/snapshots", create, "Take a snapshot of sessions", **new),
        ApiRoute("GET", "/snapshots", show_all, "List snapshots"),
        ApiRoute("GET", path, show, "A snapshot"),
        ApiRoute("DELETE", path, delete, "Release a snapshot", query=drops),
        ApiRoute("GET", path + "/trajectories", show_trajectories, "A snapshot's trajectories", **rows),
        ApiRoute("POST", path + "/confirm", confirm, "Confirm that a snapshot is stored elsewhere", body=Confirmation),
    ]


def _id(request: Request) -> int:
    text: str = request.path_params["snapshot_id"]
    # Every id has at most 18 digits, and int() raises for very long strings.
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise NotFound(f"there is no snapshot {text[:40]!r}; snapshot ids are numbers")
    return int(text)


def _summary(snapshot: Snapshot) -> dict[str, Any]:
    contents = snapshot.contents or {}
    return {
        **{name: getattr(snapshot, name) for name in ("snapshot_id", "created_at", "since", "state", "digest")},
        "schema_version": SCHEMA_VERSION,
        **{name: contents.get(name) for name in ("trajectories", "tokens", "trained_tokens", "verdicts")},
    }


def _manifest(snapshot: Snapshot) -> dict[str, Any]:
    contents = snapshot.contents or {}
    return {**_summary(snapshot), **{name: contents.get(name) for name in ("columns", "payloads", "sessions")}}


def _parquet(snapshots: Snapshots, snapshot_id: int, extra: ExtraNames) -> IO[bytes]:
    """Write the snapshot's trajectories to an unnamed temporary file, to use little memory and need no cleanup."""
    with ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile())
        write_parquet(snapshots.trajectories(snapshot_id), file, extra)
        file.seek(0)
        undo.pop_all()
    return file


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk
