"""Sessions as resources: create, list, look at, delete, and take their trajectories out."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape._session.arrow import write_parquet
from tokentape._session.jsonl import trajectory_to_json
from tokentape._session.verdict import check_verdicts, wanted_verdict
from tokentape.errors import Forbidden, InvalidRequest, NotFound
from tokentape.gateway._access import request_log
from tokentape.gateway._endpoint import Gateway, address
from tokentape.gateway._http import check_depth, json_response
from tokentape.gateway._images import MIME_TYPES
from tokentape.gateway._keys import Caller, check_session_id, may_be_session_id, new_session_id
from tokentape.gateway._openapi import JSON, SESSION, WHOLE_NUMBER, ApiRoute
from tokentape.gateway._pins import METADATA
from tokentape.gateway._session_cache import not_found
from tokentape.store import SessionSummary, Store
from tokentape.store._lineage import lineage_of
from tokentape.types import Reward, SessionInfo, Trajectory, Turn

PARQUET = "application/vnd.apache.parquet"

MAX_PAGE = 1000


class NewSession(Struct, forbid_unknown_fields=True):
    """The body of a new session."""

    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    pin: dict[str, Any] | None = None
    """Sampling parameters that calls in the session can't change."""
    default: dict[str, Any] | None = None
    """Sampling parameters of calls that name none."""


def routes(gateway: Gateway) -> list[Route]:
    """Return the endpoints under /sessions, except the wire APIs of a session.

    What they show is read from the record, not from the memory of this process: it is durable. A session belongs to
    the key that made it; to other keys it does not exist. An admin key sees all.
    """
    turns = gateway.turns

    async def create(request: Request) -> Response:
        caller = gateway.caller(request)
        wanted = await gateway.read(request, NewSession, NewSession())
        session_id = address(request, caller, wanted.session_id) or new_session_id()
        check_session_id(session_id)
        metadata = wanted.metadata or {}
        if wanted.pin or wanted.default:
            metadata = {**metadata, METADATA: {"pin": wanted.pin or {}, "default": wanted.default or {}}}
        check_depth(metadata, "metadata")
        if caller.session_id is not None:
            raise Forbidden("a session's own key opens that session and creates none; use an API key")
        info = await turns.create_session(session_id, metadata, caller.owner)
        request_log(request).session_id = session_id
        key = gateway.keys.session_key(caller.owner, session_id)
        return json_response({**_info(info), "api_key": key}, 201, {"Location": f"/sessions/{session_id}"})

    async def show_all(request: Request) -> Response:
        caller = gateway.caller(request)
        if caller.session_id is not None:
            raise Forbidden("a session's own key opens that session only; list sessions with an API key")
        limit = query_number(request, "limit", range(1, MAX_PAGE + 1)) or 100
        after = query_number(request, "after", range(2**63)) or 0
        page = await asyncio.to_thread(turns.store.sessions, limit=limit + 1, after=after, owner=caller.sees)
        shown, more = page[:limit], len(page) > limit
        return json_response(
            {
                "object": "list",
                "data": [_summary(summary) for summary in shown],
                "has_more": more,
                "next_after": shown[-1].position if more else None,
            }
        )

    async def show(request: Request) -> Response:
        _, session_id = await addressed(gateway, request)
        tree = await asyncio.to_thread(_tree, turns.store, session_id)
        owner = (await turns.session(session_id)).info.owner
        return json_response({**tree, "api_key": gateway.keys.session_key(owner, session_id)})

    async def show_trajectories(request: Request) -> Response:
        leaf = query_number(request, "leaf", range(2**63))
        verdicts = request.query_params.get("verdict")
        wanted = None if verdicts is None else [one.strip() for one in verdicts.split(",")]
        check_verdicts(wanted or ())
        _, session_id = await addressed(gateway, request)
        await turns.wait_checks([session_id], query_number(request, "wait_checks", range(61)) or 0)
        unread = query_flag(request, "unread")
        found = await asyncio.to_thread(_trajectories, turns.store, session_id, leaf, wanted, unread=unread)
        return await asyncio.to_thread(_written, found, PARQUET in request.headers.get("accept", ""))

    async def show_media(request: Request) -> Response:
        _, session_id = await addressed(gateway, request)
        found = await asyncio.to_thread(turns.store.load_media, session_id, request.path_params["sha256"])
        # A caller's bytes: to be saved, not to be shown as a page of this origin.
        headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        return Response(found.data, media_type=found.mime, headers=headers)

    async def delete(request: Request) -> Response:
        force = query_flag(request, "force")
        caller, session_id = await addressed(gateway, request)
        if force and not caller.admin:
            raise Forbidden("only an admin key deletes a session that an unconfirmed snapshot holds")
        await turns.delete_session(session_id, caller.sees, force=force)
        return Response(status_code=204)

    page = {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "after": WHOLE_NUMBER}
    text, flag = {"type": "string"}, {"type": "boolean"}
    wanted_rows = {"leaf": WHOLE_NUMBER, "verdict": text, "wait_checks": WHOLE_NUMBER, "unread": flag}
    new: dict[str, Any] = {"body": NewSession, "body_required": False, "status": 201}
    rows: dict[str, Any] = {"media": (JSON, PARQUET), "query": wanted_rows}
    media = "An image of a session as received, or the settings it was processed with"
    return [
        ApiRoute("POST", "/sessions", create, "Create a session", **new),
        ApiRoute("GET", "/sessions", show_all, "List sessions", query=page),
        ApiRoute("GET", SESSION, show, "A session's tree of turns, its leaves and rewards"),
        ApiRoute("GET", SESSION + "/media/{sha256}", show_media, media, media=(*MIME_TYPES, JSON)),
        ApiRoute("DELETE", SESSION, delete, "Delete a session and its record", status=204, media=()),
        ApiRoute("GET", SESSION + "/trajectories", show_trajectories, "A session's trajectories", **rows),
    ]


async def addressed(gateway: Gateway, request: Request) -> tuple[Caller, str]:
    """Return the caller and the session in the path. Raises `NotFound` unless the caller may see it."""
    caller = gateway.caller(request)
    session_id: str = request.path_params["session_id"]
    if not may_be_session_id(session_id) or caller.session_id not in (None, session_id):
        raise not_found(session_id)
    # The owner first, before anything is said of the session.
    await gateway.turns.session(session_id, caller.sees)
    request_log(request).session_id = session_id
    return caller, session_id


def query_flag(request: Request, name: str) -> bool:
    """Whether query parameter `name` is `true`. Raises `InvalidRequest` if it is neither that nor `false`."""
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false", name)
    return text == "true"


def query_number(request: Request, name: str, allowed: range) -> int | None:
    """Return query parameter `name` as a whole number. Raises `InvalidRequest` if it is none or not allowed."""
    text = request.query_params.get(name)
    if text is None:
        return None
    # Nineteen digits hold every allowed number; int() of very many raises.
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) not in allowed:
        raise InvalidRequest(f"{name} must be a whole number from {allowed[0]} to {allowed[-1]}", name)
    return int(text)


def _info(info: SessionInfo) -> dict[str, Any]:
    return {"session_id": info.session_id, "created_at": info.created_at, "metadata": info.metadata}


def _summary(summary: SessionSummary) -> dict[str, Any]:
    return {
        **_info(summary.info),
        "turns": summary.turns,
        "tokens": summary.tokens,
        "sampled_tokens": summary.sampled_tokens,
    }


def reward_view(reward: Reward) -> dict[str, Any]:
    return {"turn": reward.turn, "leaf": reward.leaf, "value": reward.value, "created_at": reward.created_at}


def _tree(store: Store, session_id: str) -> dict[str, Any]:
    """Return a session's turns without text and ids, its leaves with their verdicts, and its aborted turns."""
    stored = store.load_session(session_id)
    names, edges = store.extra_names([session_id]), lineage_of(store.load_session, stored)
    return {
        **_info(stored.info),
        "turns": [_turn(turn) for turn in stored.turns],
        "leaves": [
            {
                "turn": one.leaf,
                "verdict": one.verdict,
                "tokens": len(one.token_ids),
                "reward": one.reward,
                "role": one.role,
            }
            for one in stored.trajectories(unread=True, edges=edges)
        ],
        "aborted": [
            {
                "turn": turn.seq,
                "parent": turn.parent,
                "cause": turn.abort_cause,
                "added_tokens": len(turn.added_ids),
                "sampled_tokens": len(turn.completion_ids),
            }
            for turn in stored.turns
            if turn.finish_reason == "abort"
        ],
        "rewards": [reward_view(reward) for reward in stored.rewards],
        "lineage": [asdict(edge) for edge in edges],
        "columns": names.columns,
        "payloads": names.payloads,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "seq": turn.seq,
        "parent": turn.parent,
        "fork": turn.fork,
        "finish_reason": turn.finish_reason,
        "added_tokens": len(turn.added_ids),
        "sampled_tokens": len(turn.completion_ids),
        "weight_version": turn.weight_version,
        "weight_changes": turn.weight_changes,
        "abort_cause": turn.abort_cause,
        "engine": turn.engine,
        "sampled_from": turn.sampled_from and asdict(turn.sampled_from),
        "logprobs_of": turn.logprobs_of and asdict(turn.logprobs_of),
        "resumes": [asdict(one) for one in turn.resumes],
        "adapter": turn.adapter,
        "parse_problem": turn.sampling.get("parse_problem"),
        "created_at": turn.created_at,
        "digest": turn.digest,
    }


def _trajectories(
    store: Store, session_id: str, leaf: int | None, verdicts: Collection[str] | None, *, unread: bool
) -> list[Trajectory]:
    stored = store.load_session(session_id, per_token=True)
    found = stored.trajectories(unread=unread, edges=lineage_of(store.load_session, stored))
    if leaf is not None:
        found = [one for one in found if one.leaf == leaf]
        if not found:
            raise NotFound(f"session {session_id!r} has no leaf {leaf}; GET the session to see its leaves")
    return found if verdicts is None else [one for one in found if wanted_verdict(one.verdict, verdicts)]


def _written(found: list[Trajectory], parquet: bool) -> Response:
    if not parquet:
        return json_response({"object": "list", "data": [trajectory_to_json(one) for one in found]})
    sink = io.BytesIO()
    write_parquet(found, sink)
    return Response(sink.getvalue(), media_type=PARQUET)
