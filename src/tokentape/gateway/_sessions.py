"""Endpoints for sessions: create, list, show, delete, export trajectories, add rewards and columns."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape._session.arrow import write_parquet
from tokentape._session.flatten import trained_turns
from tokentape._session.jsonl import trajectory_to_json
from tokentape._session.tree import UNREAD, Session, unread_turns
from tokentape._session.verdict import check_verdicts, wanted_verdict
from tokentape.errors import Conflict, Forbidden, InvalidRequest, LimitReached, NotFound
from tokentape.gateway._access import request_log
from tokentape.gateway._endpoint import Gateway, address
from tokentape.gateway._http import check_depth, json_response, read_body
from tokentape.gateway._images import MIME_TYPES
from tokentape.gateway._keys import Caller, check_session_id, may_be_session_id, new_session_id
from tokentape.gateway._openapi import BINARY, JSON, SESSION, WHOLE_NUMBER, ApiRoute
from tokentape.gateway._pins import METADATA_KEY
from tokentape.gateway._session_cache import not_found
from tokentape.store import SessionSummary, Store
from tokentape.store._reads import lineage_of
from tokentape.types import Reward, SessionInfo, TokenValues, Trajectory, Turn, TurnColumn

PARQUET = "application/vnd.apache.parquet"

MAX_PAGE = 1000

_log = logging.getLogger("tokentape.gateway")


class NewSession(Struct, forbid_unknown_fields=True):
    """Body of a request to create a session."""

    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    pin: dict[str, Any] | None = None
    """Sampling parameters that calls in the session can't change."""
    default: dict[str, Any] | None = None
    """Sampling parameters for calls that don't set them."""
    exist_ok: bool = False
    """If the caller sees a session with this id, return it instead of a conflict, unless `metadata`, `pin` or `default`
    are given and differ."""


def routes(gateway: Gateway) -> list[Route]:
    """Return the endpoints under /sessions, except those of `feedback_routes` and a session's wire APIs.

    They read from the record and not from this process's memory, so everything they return is durable. A session is
    visible only to the key that created it and to admin keys.
    """
    turns = gateway.turns

    async def create(request: Request) -> Response:
        caller = gateway.caller(request)
        body = await gateway.read(request, NewSession, NewSession())
        session_id = address(request, caller, body.session_id) or new_session_id()
        check_session_id(session_id)
        for name in ("metadata", "pin", "default"):
            check_depth(getattr(body, name) or {}, name)
        metadata = body.metadata or {}
        if body.pin or body.default:
            metadata = {**metadata, METADATA_KEY: {"pin": body.pin or {}, "default": body.default or {}}}
        if caller.session_id is not None:
            raise Forbidden("a session key can't create sessions; use an API key")
        any_metadata = (body.metadata, body.pin, body.default) == (None, None, None)

        async def existing() -> SessionInfo | None:
            with suppress(NotFound):
                found = (await turns.session(session_id, caller.sees)).info
                return found if any_metadata or found.metadata == metadata else None
            return None

        info = await existing() if body.exist_ok else None
        status = 201 if info is None else 200
        if info is None:
            try:
                info = await turns.create_session(session_id, metadata, caller.owner)
            except Conflict:
                # Another call may have created it just now.
                info, status = await existing() if body.exist_ok else None, 200
                if info is None:
                    raise
        request_log(request).session_id = session_id
        key = gateway.keys.session_key(info.owner, session_id)
        return json_response({**_info(info), "api_key": key}, status, {"Location": f"/sessions/{session_id}"})

    async def show_all(request: Request) -> Response:
        caller = gateway.caller(request)
        if caller.session_id is not None:
            raise Forbidden("a session key can't list sessions; use an API key")
        limit = query_number(request, "limit", range(1, MAX_PAGE + 1)) or 100
        after = query_number(request, "after", range(2**63)) or 0
        page = await asyncio.to_thread(turns.store.sessions, limit=limit + 1, after=after, owner=caller.sees)
        shown, has_more = page[:limit], len(page) > limit
        body = {"object": "list", "data": [_summary(summary) for summary in shown], "has_more": has_more}
        return json_response({**body, "next_after": shown[-1].position if has_more else None})

    async def show(request: Request) -> Response:
        _, session_id = await addressed(gateway, request)
        tree = await asyncio.to_thread(_tree, turns.store, session_id)
        owner = (await turns.session(session_id)).info.owner
        return json_response({**tree, "api_key": gateway.keys.session_key(owner, session_id)})

    async def show_trajectories(request: Request) -> Response:
        leaf, parquet = query_number(request, "leaf", range(2**63)), wants_parquet(request, "json")
        listed = request.query_params.get("verdict")
        verdicts = None if listed is None else [verdict.strip() for verdict in listed.split(",")]
        check_verdicts(verdicts or ())
        _, session_id = await addressed(gateway, request)
        await turns.checks.wait([session_id], query_number(request, "wait_checks", range(61)) or 0)
        await turns.unread.recorded(session_id)
        unread = query_flag(request, "unread")
        trajectories = await asyncio.to_thread(_trajectories, turns.store, session_id, leaf, verdicts, unread=unread)
        return await asyncio.to_thread(_written, trajectories, parquet)

    async def show_media(request: Request) -> Response:
        _, session_id = await addressed(gateway, request)
        media = await asyncio.to_thread(turns.store.load_media, session_id, request.path_params["sha256"])
        # The bytes come from a caller, so browsers should save them instead of showing them as a page of this origin.
        headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        return Response(media.data, media_type=media.mime, headers=headers)

    async def delete(request: Request) -> Response:
        force = query_flag(request, "force")
        caller, session_id = await addressed(gateway, request)
        if force and not caller.admin:
            raise Forbidden("force needs an admin key: it deletes a session that an unconfirmed snapshot contains")
        await turns.delete_session(session_id, caller.sees, force=force)
        return Response(status_code=204)

    page = {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "after": WHOLE_NUMBER}
    text, flag = {"type": "string"}, {"type": "boolean"}
    row_query = {"leaf": WHOLE_NUMBER, "verdict": text, "wait_checks": WHOLE_NUMBER, "unread": flag, "format": text}
    rows: dict[str, Any] = {"media": (JSON, PARQUET), "query": row_query}
    media = "An image in a session as received, or the settings with which it was processed"
    return [
        ApiRoute("POST", "/sessions", create, "Create a session", body=NewSession, body_required=False, status=201),
        ApiRoute("GET", "/sessions", show_all, "List sessions", query=page),
        ApiRoute("GET", SESSION, show, "A session's tree of turns, its leaves and rewards"),
        ApiRoute("GET", SESSION + "/media/{sha256}", show_media, media, media=(*MIME_TYPES, JSON)),
        ApiRoute(
            "DELETE", SESSION, delete, "Delete a session and its record", status=204, media=(), query={"force": flag}
        ),
        ApiRoute("GET", SESSION + "/trajectories", show_trajectories, "A session's trajectories", **rows),
    ]


async def addressed(gateway: Gateway, request: Request) -> tuple[Caller, str]:
    """Return the caller and the session id in the path. Raises `NotFound` unless the caller may see the session."""
    caller = gateway.caller(request)
    session_id: str = request.path_params["session_id"]
    if not may_be_session_id(session_id) or caller.session_id not in (None, session_id):
        raise not_found(session_id)
    # Check the owner before anything else about the session can be observed.
    await gateway.turns.session(session_id, caller.sees)
    request_log(request).session_id = session_id
    return caller, session_id


def query_flag(request: Request, name: str) -> bool:
    """Return whether query parameter `name` is `true`. Raises `InvalidRequest` if it is neither `true` nor `false`."""
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false", name)
    return text == "true"


def wants_parquet(request: Request, other: str) -> bool:
    """Return whether the parameter `format` is `parquet` or, if it is missing, whether the `Accept` header has Parquet.

    Raises `InvalidRequest` if `format` is neither `parquet` nor `other`.
    """
    text = request.query_params.get("format")
    if text not in (None, "parquet", other):
        raise InvalidRequest(f"format is {text[:64]!r}; expected {other} or parquet", "format")
    return text == "parquet" or (text is None and PARQUET in request.headers.get("accept", ""))


def query_number(request: Request, name: str, allowed: range) -> int | None:
    """Return query parameter `name` as an integer; None if it is missing. Raises `InvalidRequest`."""
    text = request.query_params.get(name)
    if text is None:
        return None
    # Every allowed number has at most 19 digits, and int() raises for very long strings.
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) not in allowed:
        raise InvalidRequest(f"{name} must be a whole number from {allowed[0]} to {allowed[-1]}", name)
    return int(text)


def _fields(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _info(info: SessionInfo) -> dict[str, Any]:
    return _fields(info, "session_id", "created_at", "metadata")


def _summary(summary: SessionSummary) -> dict[str, Any]:
    return {**_info(summary.info), **_fields(summary, "turns", "tokens", "sampled_tokens")}


def reward_view(reward: Reward) -> dict[str, Any]:
    return _fields(reward, "turn", "leaf", "value", "created_at")


def _tree(store: Store, session_id: str) -> dict[str, Any]:
    """Return a session's turns without text and ids, its leaves with their verdicts, and its aborted turns."""
    stored = store.load_session(session_id)
    names, edges = store.extra_names([session_id]), lineage_of(store.load_session, stored)
    return {
        **_info(stored.info),
        "turns": [_turn_view(turn) for turn in stored.turns],
        "leaves": [
            {
                "turn": trajectory.leaf,
                "verdict": trajectory.verdict,
                "tokens": len(trajectory.token_ids),
                "reward": trajectory.reward,
                "role": trajectory.role,
            }
            for trajectory in stored.trajectories(unread=True, edges=edges)
        ],
        "aborted": [
            {"turn": turn.seq, "parent": turn.parent, "cause": turn.abort_cause, **_token_counts(turn)}
            for turn in stored.turns
            if turn.finish_reason == "abort"
        ],
        "rewards": [reward_view(reward) for reward in stored.rewards],
        "lineage": edges,
        "columns": names.columns,
        "payloads": names.payloads,
    }


def _turn_view(turn: Turn) -> dict[str, Any]:
    return {
        **_fields(turn, "seq", "parent", "fork", "finish_reason"),
        **_token_counts(turn),
        **_fields(turn, "weight_version", "weight_changes", "abort_cause", "engine", "sampled_from", "logprobs_of"),
        **_fields(turn, "resumes", "adapter"),
        "parse_problem": turn.sampling.get("parse_problem"),
        **_fields(turn, "created_at", "digest"),
    }


def _token_counts(turn: Turn) -> dict[str, int]:
    return {"added_tokens": len(turn.added_ids), "sampled_tokens": len(turn.completion_ids)}


def _trajectories(
    store: Store, session_id: str, leaf: int | None, verdicts: Collection[str] | None, *, unread: bool
) -> list[Trajectory]:
    stored = store.load_session(session_id, per_token=True)
    trajectories = stored.trajectories(unread=unread, edges=lineage_of(store.load_session, stored))
    if leaf is not None:
        trajectories = [trajectory for trajectory in trajectories if trajectory.leaf == leaf]
        if not trajectories:
            raise NotFound(f"session {session_id!r} has no leaf {leaf}; GET the session to list its leaves")
    if verdicts is None:
        return trajectories
    return [trajectory for trajectory in trajectories if wanted_verdict(trajectory.verdict, verdicts)]


def _written(trajectories: list[Trajectory], parquet: bool) -> Response:
    if not parquet:
        return json_response({"object": "list", "data": [*map(trajectory_to_json, trajectories)]})
    sink = io.BytesIO()
    write_parquet(trajectories, sink)
    return Response(sink.getvalue(), media_type=PARQUET)


MAX_COLUMNS = 64
"""Maximum number of columns per session."""

_NAME = re.compile("[a-z][a-z0-9_]{0,63}")
_Seq = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class NewReward(Struct, forbid_unknown_fields=True):
    """Body of a reward for a turn, for the path to a leaf (a branch's last turn), or without both for the session."""

    value: float
    turn: _Seq | None = None
    leaf: _Seq | None = None


class NewColumns(Struct, forbid_unknown_fields=True):
    """Body of columns (per-token values by column name) for a turn or for the path to a leaf."""

    columns: dict[str, list[float]]
    turn: _Seq | None = None
    leaf: _Seq | None = None


def feedback_routes(gateway: Gateway) -> list[Route]:
    """Return the endpoints for rewards and columns, under /sessions/{session_id}."""
    turns = gateway.turns

    async def current(session_id: str) -> Session:
        session = await turns.session(session_id)
        if turns.store.shared:
            # Another gateway may have set or removed unread marks, which changes the leaves. Use a copy, because the
            # session in memory keeps its own marks, which may not be recorded yet.
            session = copy(session)
            session.unread = unread_turns(await asyncio.to_thread(turns.store.events, session_id, UNREAD))
        return session

    async def reward(request: Request) -> Response:
        _, session_id = await addressed(gateway, request)
        body = await gateway.read(request, NewReward)
        session = await current(session_id)
        if body.turn is not None and body.leaf is not None:
            raise InvalidRequest("a reward can't have both a turn and a leaf; send only one of them", "leaf")
        if body.turn is not None:
            _turn(session, body.turn)
        elif body.leaf is not None:
            _check_leaf(session, body.leaf)
        warning = {}
        if not (session.turns or session.info.metadata or turns.store.shared):
            # A reward may come before the first turn, but more often the id is wrong and its session has just been
            # created. A session with metadata was created on purpose.
            warning = {"warning": f"session {session_id!r} got a reward but has no turns yet: is its id right?"}
            _log.warning(warning["warning"])
        new_reward = Reward(session_id, body.turn, body.value, time.time(), body.leaf)
        await turns.store.write(new_reward)
        return json_response(reward_view(new_reward) | warning, 201)

    async def columns(request: Request) -> Response:
        _, session_id = await addressed(gateway, request)
        turn, leaf, values_by_name = await _read_columns(gateway, request)
        session = await current(session_id)
        names = (await asyncio.to_thread(turns.store.extra_names, [session_id])).columns
        if len({*names, *values_by_name}) > MAX_COLUMNS:
            raise LimitReached(f"a session can have at most {MAX_COLUMNS} columns; reuse the names of existing columns")
        records = [
            record for name, values in values_by_name.items() for record in _records(session, name, values, turn, leaf)
        ]
        await turns.store.write(*records)
        turn_numbers = sorted({record.turn for record in records})
        return json_response({"columns": sorted(values_by_name), "turns": turn_numbers}, 201)

    place = {"name": {"type": "string"}, "turn": WHOLE_NUMBER, "leaf": WHOLE_NUMBER}
    options: dict[str, Any] = {"body": NewColumns, "binary_body": True, "query": place, "status": 201}
    return [
        ApiRoute(
            "POST", SESSION + "/reward", reward, "Set a reward for a session, path or turn", body=NewReward, status=201
        ),
        ApiRoute("POST", SESSION + "/columns", columns, "Set named values for tokens", **options),
    ]


async def _read_columns(gateway: Gateway, request: Request) -> tuple[int | None, int | None, Mapping[str, TokenValues]]:
    """Read a request's columns. Return the turn or None, the leaf or None, and the values by column name."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == BINARY:
        name = request.query_params.get("name")
        if name is None:
            raise InvalidRequest("a binary request body is one column; pass its name in the URL (?name=NAME)", "name")
        data = await read_body(request, gateway.turns.limits.body_bytes)
        if len(data) % 4:
            raise InvalidRequest(f"the body has {len(data)} bytes; expected a multiple of 4, the size of a float32")
        values = {name: np.frombuffer(data, "<f4").astype(np.float32, copy=False)}
        turn, leaf = query_number(request, "turn", range(2**63)), query_number(request, "leaf", range(2**63))
    else:
        body = await gateway.read(request, NewColumns)
        # A double that is too large for float32 becomes infinite, which is refused below.
        with np.errstate(over="ignore"):
            values = {name: np.array(numbers, np.float32) for name, numbers in body.columns.items()}
        turn, leaf = body.turn, body.leaf
    if (turn is None) == (leaf is None):
        raise InvalidRequest("columns need either a turn or a leaf; send exactly one of them", "turn")
    if not values:
        raise InvalidRequest("columns is empty; send at least one column", "columns")
    for name, numbers in values.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "a column's name must begin with a lower-case letter and have up to 64 lower-case letters, digits and "
                "underscores",
                "columns",
            )
        if not np.isfinite(numbers).all():
            index = int(np.flatnonzero(~np.isfinite(numbers))[0])
            raise InvalidRequest(f"column {name}: value {index} is not a finite float32", "columns")
    return turn, leaf, values


def _records(
    session: Session, name: str, values: TokenValues, seq: int | None, leaf: int | None
) -> Sequence[TurnColumn]:
    now = time.time()
    session_id = session.info.session_id
    if seq is not None:
        turn = _turn(session, seq)
        sampled, everything = len(turn.completion_ids), len(turn.added_ids) + len(turn.completion_ids)
        if len(values) not in (sampled, everything):
            raise InvalidRequest(
                f"column {name} has {len(values)} values; turn {seq} has {sampled} sampled tokens, "
                f"{everything} with the tokens added before them; send one value per token",
                "columns",
            )
        return [TurnColumn(session_id, seq, name, values, now)]
    assert leaf is not None
    _check_leaf(session, leaf)
    path = session.path(leaf)
    ends = np.cumsum([len(turn.added_ids) + len(turn.completion_ids) for turn in path])
    if len(values) != ends[-1]:
        raise InvalidRequest(
            f"column {name} has {len(values)} values; the trajectory of leaf {leaf} has {ends[-1]} tokens", "columns"
        )
    # A turn that is trained in an earlier branch keeps that branch's values, because its loss uses them.
    trained = {turn.seq for turn in trained_turns(session, leaf)}
    return [
        TurnColumn(session_id, turn.seq, name, part, now)
        for turn, part in zip(path, np.split(values, ends[:-1]), strict=True)
        if turn.seq in trained
    ]


def _turn(session: Session, seq: int) -> Turn:
    if seq >= len(session.turns):
        raise NotFound(f"session {session.info.session_id!r} has no turn {seq}; it has {len(session.turns)} turns")
    turn = session.turns[seq]
    if turn.finish_reason == "abort":
        raise InvalidRequest(f"turn {seq} was aborted, so no trajectory contains it; choose a different turn", "turn")
    return turn


def _check_leaf(session: Session, leaf: int) -> None:
    # If the last turn of a branch is unread, the branch's default trajectory ends before it.
    if leaf not in {*session.leaves(), *session.leaves(unread=True)}:
        raise NotFound(
            f"session {session.info.session_id!r} has no leaf {leaf}; GET the session to list its leaves, "
            "or send `turn` in place of `leaf` for a reward or a column of one turn"
        )
