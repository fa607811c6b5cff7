"""Serve the viewer's page at /view, to which / redirects, and its data below /view/api.

The application that mounts the routes returns a `Visitor` per request, which limits what the sender may see. Hidden
sessions get the same answer as sessions that do not exist.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, get_args
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tokentape._version import __version__
from tokentape.errors import Forbidden, InvalidRequest, NotFound
from tokentape.store._listing import Listing, SessionSummary, SortKey
from tokentape.types import Trajectory
from tokentape.viewer import _views as views
from tokentape.viewer._comparing import AGAINST, RecordReader, against, comparison, recorded_side
from tokentape.viewer._run import GROUP_KEYS, Measures, SessionMeasures, Unreadable, group_value, run_of
from tokentape.viewer._source import SessionView, ViewerSource
from tokentape.viewer._views import MEDIA_TYPE, SECURITY, pack, static_file

PAGE = "/view"
API = "/view/api"
SESSION = API + "/sessions/{session_id:path}"
LEAF = SESSION + "/leaves/{leaf}"
ALTERNATIVES = SESSION + "/turns/{turn}/alternatives"

MAX_PAGE = 500
MAX_MEASURED = 50
"""The maximum number of sessions in a request to /measures."""

MAX_COMPARED = 10_000
"""The maximum number of sessions, newest first, that the run page and filters by measures use."""

MEASURING_SECONDS = 0.5
"""How long a request may spend measuring. The page repeats it until all sessions are measured."""

LISTING_QUERY: Mapping[str, Any] = {
    "search": {"type": "string"},
    "fork": {"type": "string"},
    "reward_min": {"type": "number"},
    "reward_max": {"type": "number"},
    "since": {"type": "number"},
    "until": {"type": "number"},
    "weights": {"type": "string"},
    "metadata": {"type": "string"},
    "verdict": {"type": "string"},
    "role": {"type": "string"},
    "drift": {"type": "string", "enum": ["any", "none"]},
    "group_key": {"type": "string"},
    "group_value": {"type": "string"},
    "sort": {"type": "string", "enum": [*get_args(SortKey), "drift"]},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "offset": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
}
"""Schemas of a list's query parameters."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """What the sender of a request may see."""

    owner: str | None = None
    """Only sessions that belong to this owner (an API key) are visible; None means all."""
    session_id: str | None = None
    """Only this session is visible; None means all."""
    metrics: bool = True
    """True if the gateway's metrics are visible."""


Visit: TypeAlias = Callable[[Request], Visitor]
"""Returns what the sender of a request may see. Raises `Unauthorized`."""

Overview: TypeAlias = Callable[[], Mapping[str, Any]]
"""The current values of all counters and gauges: name -> [{labels, value}]."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """The data that the viewer shows, and its access check."""

    source: ViewerSource
    reader: RecordReader
    """The record's tokenizer and renderer."""
    visit: Visit = lambda request: Visitor()
    overview: Overview | None = None
    """None if no gateway is running."""


def routes(viewer: Viewer) -> list[Route]:
    """Return the viewer's endpoints."""
    source, reader = viewer.source, viewer.reader

    # A page requests several parts of a session.
    @lru_cache(maxsize=8)
    def load(session_id: str, version: str) -> SessionView:
        """Load a session in this version or a newer version."""
        return source.load(session_id)

    measures = Measures(source, reader)

    async def to_page(request: Request) -> Response:
        return RedirectResponse(PAGE, headers=SECURITY)

    async def page(request: Request) -> Response:
        return static_file(request, "index.html")

    async def static(request: Request) -> Response:
        return static_file(request, request.path_params["name"])

    async def about(request: Request) -> Response:
        return _json(about_of(viewer, viewer.visit(request)))

    async def sessions(request: Request) -> Response:
        listing, query = _listing(request, viewer.visit(request)), request.query_params
        by_drift = query.get("sort") == "drift"

        def answer() -> dict[str, Any]:
            if by_drift or any(query.get(name) for name in ("verdict", "role", "drift", "group_key")):
                return _measured_page(source, measures, listing, query, by_drift)
            page = source.page(listing)
            return {"total": page.total, "sessions": listed_lines(source, measures, page.sessions)}

        return _json(await asyncio.to_thread(answer))

    async def run(request: Request) -> Response:
        visitor = viewer.visit(request)
        listing, query = _listing(request, visitor), request.query_params
        values = viewer.overview() if viewer.overview is not None and visitor.metrics else {}

        def answer() -> dict[str, Any]:
            versions = source.versions(replace(listing, offset=0, limit=MAX_COMPARED))
            measured, unreadable = measures.measured(versions, MEASURING_SECONDS)
            progress = progress_of(measured, unreadable, versions) | {"most": MAX_COMPARED, "cache": _cache(values)}
            chosen = _chosen(measured, query)
            return progress | run_of(chosen, query.get("group", ""), aborts_recorded=source.grows)

        return _json(await asyncio.to_thread(answer))

    async def measure(request: Request) -> Response:
        visitor = viewer.visit(request)
        names = map(unquote, request.query_params.get("ids", "").split(","))
        ids = {name for name in names if name and "\0" not in name}
        if len(ids) > MAX_MEASURED:
            raise InvalidRequest(f"too many sessions: at most {MAX_MEASURED} are measured per request", "ids")
        if visitor.session_id is not None:
            ids &= {visitor.session_id}

        def answer() -> dict[str, Any]:
            versions = source.versions(Listing(owner=visitor.owner, session_ids=sorted(ids)))
            measured, unreadable = measures.measured(versions)
            shown = {session_id: session.shown() for session_id, session in measured.items()}
            return {"measures": shown, "unreadable": unreadable}

        return _json(await asyncio.to_thread(answer))

    def of_session(answer: Callable[[Request, SessionView], Response]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint for the session in the path, with status 304 if the page has its version."""

        async def endpoint(request: Request) -> Response:
            session_id = request.path_params["session_id"]
            version = await asyncio.to_thread(_version, source, viewer.visit(request), session_id)
            if request.headers.get("if-none-match") == _etag(version):
                return Response(status_code=304, headers={**_PRIVATE, "ETag": _etag(version)})
            return await asyncio.to_thread(lambda: answer(request, load(session_id, version)))

        return endpoint

    def session(request: Request, view: SessionView) -> Response:
        return _json(views.tree(view), view.version)

    def leaf(request: Request, view: SessionView) -> Response:
        shown = _shown(view, request)
        start = min(_number(request, "from", 0, 2**63 - 1), len(shown.token_ids))
        return _binary(pack(*views.trajectory(view, shown, reader.tokenizer, start)), view.version)

    def alternatives(request: Request, view: SessionView) -> Response:
        turn = request.path_params["turn"]
        if turn not in {str(node.seq) for node in view.turns}:
            raise NotFound(f"session {view.info.session_id!r} has no turn {turn[:40]!r}")
        return _json({"alternatives": views.alternatives(view, int(turn), reader.tokenizer)}, view.version)

    def compared(request: Request, view: SessionView) -> Response:
        side = request.query_params.get("with", AGAINST[0])
        other_id, _ = recorded_side(side) or (None, None)
        if other_id is None:
            return _binary(comparison(reader, view, _shown(view, request), side), view.version)
        other_view = load(other_id, _version(source, viewer.visit(request), other_id))
        # No ETag, because an ETag covers one session only.
        return _binary(comparison(reader, view, _shown(view, request), side, other_view))

    async def overview(request: Request) -> Response:
        visitor = viewer.visit(request)
        if viewer.overview is None:
            raise NotFound("there is no overview without a gateway: open /view on a running gateway")
        if not visitor.metrics:
            raise Forbidden("metrics need an admin key")
        return _json(viewer.overview())

    endpoints = {
        "/": to_page,
        PAGE: page,
        PAGE + "/static/{name}": static,
        API + "/about": about,
        API + "/overview": overview,
        API + "/run": run,
        API + "/measures": measure,
        API + "/sessions": sessions,
        LEAF + "/comparison": of_session(compared),
        LEAF: of_session(leaf),
        ALTERNATIVES: of_session(alternatives),
        # Last, because the id of a session may contain slashes.
        SESSION: of_session(session),
    }
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]


def about_of(viewer: Viewer, visitor: Visitor) -> dict[str, Any]:
    """Return the name of the record, what the page can compare it with, and the views that the visitor may open."""
    source, reader = viewer.source, viewer.reader
    return {
        "name": source.name,
        "version": __version__,
        "grows": source.grows,
        "text": reader.tokenizer is not None,
        "why_no_text": reader.why_none,
        "against": against(source, reader),
        "group_keys": GROUP_KEYS,
        "overview": viewer.overview is not None and visitor.metrics,
        "only_session": visitor.session_id,
        "exported": False,
    }


def _version(source: ViewerSource, visitor: Visitor, session_id: str) -> str:
    """Return a session's version. Raises the same `NotFound` for unknown ids and for other owners' sessions."""
    missing = NotFound(f"there is no session {session_id!r}")
    # No database contains a name with NUL.
    if "\0" in session_id or visitor.session_id not in (None, session_id):
        raise missing
    try:
        owner, version = source.version(session_id)
    except NotFound:
        raise missing from None
    if visitor.owner is not None and owner != visitor.owner:
        raise missing
    return version


def _shown(view: SessionView, request: Request) -> Trajectory:
    text = request.path_params["leaf"]
    trajectory = view.trajectory(int(text)) if text.isascii() and text.isdigit() and len(text) < 19 else None
    if trajectory is None:
        leaves = ", ".join(str(branch.leaf) for branch in view.trajectories) or "none"
        raise NotFound(f"session {view.info.session_id!r} has no leaf {text[:40]!r}; its leaves: {leaves}")
    return trajectory


def _listing(request: Request, visitor: Visitor) -> Listing:
    query = request.query_params
    for name, schema in LISTING_QUERY.items():
        if query.get(name) and query[name] not in schema.get("enum", [query[name]]):
            raise InvalidRequest(f"{name} must be one of {', '.join(schema['enum'])}", name)
    for name in ("search", "fork", "weights", "metadata"):
        if "\0" in query.get(name, ""):
            raise InvalidRequest(f"{name} contains a NUL character: remove it", name)
    sort = query.get("sort") or "created"
    limits: dict[str, Any] = {name: _real(request, name) for name in ("reward_min", "reward_max", "since", "until")}
    texts: dict[str, Any] = {name: query.get(name, "") for name in ("search", "fork", "weights")}
    return Listing(
        owner=visitor.owner,
        **texts,
        **limits,
        metadata=_pairs(query.getlist("metadata")),
        session_ids=None if visitor.session_id is None else [visitor.session_id],
        sort="created" if sort == "drift" else sort,  # type: ignore[arg-type]
        descending=query.get("order") != "asc",
        offset=_number(request, "offset", 0, 2**31 - 1),
        limit=_number(request, "limit", 100, MAX_PAGE, least=1),
    )


def listed_lines(source: ViewerSource, measures: Measures, sessions: Sequence[SessionSummary]) -> list[dict[str, Any]]:
    """Return a list's lines, with the measures of the sessions' current versions if already measured."""
    ids = [session.info.session_id for session in sessions]
    versions = source.versions(Listing(session_ids=ids, limit=MAX_PAGE)) if ids else {}
    lines = []
    for session in sessions:
        _, version = versions.get(session.info.session_id, ("", ""))
        measured = measures.known(session.info.session_id, version)
        line = views.listed(session)
        line["measures"] = measured.shown() if isinstance(measured, SessionMeasures) else None
        if isinstance(measured, Unreadable):
            line["unreadable"] = measured.why
        lines.append(line)
    return lines


def progress_of(
    measured: Mapping[str, SessionMeasures], unreadable: Mapping[str, str], versions: Mapping[str, Any]
) -> dict[str, int]:
    """Return how many of the sessions are measured. Unreadable sessions count as measured."""
    return {"measured": len(measured) + len(unreadable), "of": len(versions), "unreadable": len(unreadable)}


def _measured_page(
    source: ViewerSource, measures: Measures, listing: Listing, query: Mapping[str, str], by_drift: bool
) -> dict[str, Any]:
    """Return a page of the newest `MAX_COMPARED` sessions, filtered or sorted by their measures."""
    versions = source.versions(replace(listing, offset=0, limit=MAX_COMPARED))
    measured, unreadable = measures.measured(versions, MEASURING_SECONDS)
    chosen = [session.info.session_id for session in _chosen(measured, query)]
    if by_drift:
        changed = {session_id: (measured[session_id].drift or {}).get("changed_tokens", -1) for session_id in chosen}
        chosen.sort(key=lambda session_id: changed[session_id], reverse=listing.descending)
        chosen, total = chosen[listing.offset : listing.offset + listing.limit], len(chosen)
        sessions = source.page(replace(listing, session_ids=chosen, offset=0)).sessions if chosen else ()
        sessions = tuple(sorted(sessions, key=lambda session: chosen.index(session.info.session_id)))
    else:
        page = source.page(replace(listing, session_ids=chosen))
        sessions, total = page.sessions, page.total
    progress = progress_of(measured, unreadable, versions)
    return {"total": total, "sessions": listed_lines(source, measures, sessions), **progress}


def _chosen(measured: Mapping[str, SessionMeasures], query: Mapping[str, str]) -> list[SessionMeasures]:
    """Return the sessions that match a query's verdict, role, drift and group."""
    verdict, role, drift, key = (query.get(name, "") for name in ("verdict", "role", "drift", "group_key"))
    return [
        session
        for session in measured.values()
        if (not verdict or any(verdict in _words(of_leaf) for of_leaf in session.verdicts))
        and (not role or role in session.roles)
        and (not drift or _drifts(session) == drift)
        and (not key or (key in session.info.metadata and group_value(session, key) == query.get("group_value", "")))
    ]


def _drifts(session: SessionMeasures) -> str:
    """Return `any` if sampled tokens drift, `none` if not, and an empty string if no token was measured."""
    if not session.drift or not session.drift["tokens"]:
        return ""
    return "any" if session.drift["changed_tokens"] else "none"


def _cache(values: Mapping[str, Any]) -> dict[str, float] | None:
    """Return how many prompt tokens a gateway sent, and how many of them its engine had cached."""
    names = {"prompt_tokens": "tokentape_prompt_tokens_total", "cached_tokens": "tokentape_cached_prompt_tokens_total"}
    if not all(values.get(name) for name in names.values()):
        return None
    return {short: sum(series["value"] for series in values[name]) for short, name in names.items()}


def _words(verdict: str) -> list[str]:
    """Return the texts that a filter may match a verdict by: itself, its first part or word, its reservations."""
    first, *reservations = verdict.split(", ")
    return [verdict, first, first.partition(":")[0], *reservations]


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [line.partition("=") for text in texts for line in text.split("\n") if line]
    if any(not key or not equals for key, equals, _ in pairs):
        raise InvalidRequest("metadata must be KEY=VALUE, one pair per line", "metadata")
    return [(key, value) for key, _, value in pairs]


def _number(request: Request, name: str, default: int, most: int, least: int = 0) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19 and least <= int(text) <= most):
        raise InvalidRequest(f"{name} must be a whole number from {least} to {most}", name)
    return int(text)


def _real(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a number", name)
    return value


_PRIVATE = {**SECURITY, "Cache-Control": "private, no-cache"}
"""Headers of replies that only the browser may cache and must revalidate on each use."""


def _etag(version: str) -> str:
    return f'"{version}"'


def _json(value: Any, version: str | None = None) -> Response:
    return _binary(views.as_json(value), version, "application/json")


def _binary(data: bytes, version: str | None = None, media_type: str = MEDIA_TYPE) -> Response:
    headers = {**SECURITY, "Cache-Control": "no-store"} if version is None else {**_PRIVATE, "ETag": _etag(version)}
    return Response(data, headers=headers, media_type=media_type)
