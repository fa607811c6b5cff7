"""Sessions as resources: create, list, look at, reward, delete, and take their trajectories out."""

from __future__ import annotations

import asyncio
import io
import re
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape.errors import Forbidden, InvalidRequest, NotFound
from tokentape.gateway.endpoint import Gateway, address
from tokentape.gateway.http import check_depth, json_response, read_as, read_json
from tokentape.gateway.keys import Caller
from tokentape.gateway.open_sessions import not_found
from tokentape.gateway.session_ids import check_session_id, may_be_session_id, new_session_id
from tokentape.session.arrow import write_parquet
from tokentape.session.flatten import trajectories
from tokentape.session.jsonl import trajectory_to_json
from tokentape.session.tree import Session
from tokentape.store import SessionSummary, StoredSession
from tokentape.types import Reward, SessionInfo, Turn

PARQUET = "application/vnd.apache.parquet"

MAX_PAGE = 1000


class _NewSession(Struct, forbid_unknown_fields=True):
    session_id: str | None = None
    metadata: dict[str, Any] | None = None


class _NewReward(Struct, forbid_unknown_fields=True):
    value: float
    turn: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


def routes(gateway: Gateway) -> list[Route]:
    """The endpoints under /sessions, the wire APIs of a session left out.

    What they show is read from the record, not from the memory of this process: it is durable. A session belongs to
    the key that made it; to other keys it does not exist. An admin key sees all.
    """
    turns = gateway.turns

    async def asked(request: Request) -> tuple[Caller, str]:
        caller = gateway.keys.caller(request.headers)
        session_id: str = request.path_params["session_id"]
        if not may_be_session_id(session_id) or caller.session_id not in (None, session_id):
            raise not_found(session_id)
        # Whose it is, before anything is said of it.
        await turns.session(session_id, caller.sees)
        return caller, session_id

    async def stored(request: Request) -> StoredSession:
        _, session_id = await asked(request)
        return await asyncio.to_thread(turns.store.load_session, session_id)

    async def create(request: Request) -> Response:
        caller = gateway.keys.caller(request.headers)
        body = await read_json(request, gateway.limits.body_bytes)
        wanted = _NewSession() if body is None else read_as(body, _NewSession)
        session_id = address(request, caller, wanted.session_id) or new_session_id()
        check_session_id(session_id)
        metadata = wanted.metadata or {}
        check_depth(metadata, "metadata")
        info = await turns.create_session(session_id, metadata, caller.owner)
        key = gateway.keys.session_key(caller.owner, session_id)
        return json_response({**_info(info), "api_key": key}, 201, {"Location": f"/sessions/{session_id}"})

    async def show_all(request: Request) -> Response:
        caller = gateway.keys.caller(request.headers)
        if caller.session_id is not None:
            raise Forbidden("a session's own key opens that session only; list sessions with an API key")
        limit = _number(request, "limit", range(1, MAX_PAGE + 1)) or 100
        after = _number(request, "after", range(2**63)) or 0
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
        session = await stored(request)
        return json_response(await asyncio.to_thread(_tree, session))

    async def show_trajectories(request: Request) -> Response:
        leaf = _number(request, "leaf", range(2**63))
        session = await stored(request)
        return await asyncio.to_thread(_trajectories, session, leaf, PARQUET in request.headers.get("accept", ""))

    async def reward(request: Request) -> Response:
        wanted = read_as(await read_json(request, gateway.limits.body_bytes), _NewReward)
        caller, session_id = await asked(request)
        given = await turns.reward(session_id, wanted.turn, wanted.value, caller.sees)
        return json_response(_reward(given), 201)

    async def delete(request: Request) -> Response:
        caller, session_id = await asked(request)
        await turns.delete_session(session_id, caller.sees)
        return Response(status_code=204)

    return [
        Route("/sessions", create, methods=["POST"]),
        Route("/sessions", show_all, methods=["GET"]),
        Route("/sessions/{session_id}", show, methods=["GET"]),
        Route("/sessions/{session_id}", delete, methods=["DELETE"]),
        Route("/sessions/{session_id}/trajectories", show_trajectories, methods=["GET"]),
        Route("/sessions/{session_id}/reward", reward, methods=["POST"]),
    ]


def _number(request: Request, name: str, allowed: range) -> int | None:
    """The whole number that query parameter `name` gives. Raises `InvalidRequest` if it is none or not allowed."""
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


def _reward(reward: Reward) -> dict[str, Any]:
    return {"turn": reward.turn, "value": reward.value, "created_at": reward.created_at}


def _tree(stored: StoredSession) -> dict[str, Any]:
    """A session's turns without their text and ids, its leaves with their verdicts, its rewards."""
    session = Session(stored.info, stored.turns)
    return {
        **_info(stored.info),
        "turns": [_turn(turn) for turn in stored.turns],
        "leaves": [
            {"turn": one.leaf, "verdict": one.verdict, "tokens": len(one.token_ids), "reward": one.reward}
            for one in trajectories(session, stored.rewards)
        ],
        "rewards": [_reward(reward) for reward in stored.rewards],
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
        "created_at": turn.created_at,
        "digest": turn.digest,
    }


def _trajectories(stored: StoredSession, leaf: int | None, parquet: bool) -> Response:
    found = trajectories(Session(stored.info, stored.turns), stored.rewards)
    if leaf is not None:
        found = [one for one in found if one.leaf == leaf]
        if not found:
            raise NotFound(f"session {stored.info.session_id!r} has no leaf {leaf}; GET the session to see its leaves")
    if not parquet:
        return json_response({"object": "list", "data": [trajectory_to_json(one) for one in found]})
    sink = io.BytesIO()
    write_parquet(found, sink)
    return Response(sink.getvalue(), media_type=PARQUET)
