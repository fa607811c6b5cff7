"""The viewer for a gateway's own record, protected by the gateway's keys."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from tokentape.gateway._access import request_log
from tokentape.gateway._endpoint import Gateway
from tokentape.gateway._keys import may_be_session_id
from tokentape.gateway._openapi import WHOLE_NUMBER, ApiRoute
from tokentape.gateway._telemetry import Metrics
from tokentape.viewer._comparing import AGAINST, BRANCH, RecordReader
from tokentape.viewer._routes import ALTERNATIVES, API, LEAF, LISTING_QUERY, PAGE, SESSION, Viewer, Visitor
from tokentape.viewer._routes import routes as viewer_routes
from tokentape.viewer._source import StoreSource
from tokentape.viewer._views import MEDIA_TYPE as PACKED

_DESCRIBED: dict[str, dict[str, Any]] = {
    "/": {"summary": "Redirects to the viewer", "status": 307, "media": ()},
    PAGE: {"summary": "The viewer, a page", "media": ("text/html",)},
    PAGE + "/static/{name}": {"summary": "Styles and scripts of the page", "media": ("text/css", "text/javascript")},
    API + "/about": {"summary": "What the viewer shows, and what it can't"},
    API + "/overview": {"summary": "Values of all metrics"},
    API + "/measures": {
        "summary": "Measure sessions: verdicts, roles, weights and drift",
        "query": {"ids": {"type": "string"}},
    },
    API + "/run": {
        "summary": "Statistics of listed sessions by weight version and by group",
        "query": {**LISTING_QUERY, "group": {"type": "string"}},
    },
    API + "/sessions": {"summary": "Search, filter and sort sessions", "query": LISTING_QUERY},
    SESSION: {"summary": "A session's tree of turns and its leaves"},
    LEAF: {"summary": "A trajectory as packed arrays", "media": (PACKED,), "query": {"from": WHOLE_NUMBER}},
    ALTERNATIVES: {"summary": "The most likely alternatives at each sampled token of a turn, where requested"},
    LEAF + "/comparison": {
        "summary": "Compare a trajectory with a branch of any session, or with its re-tokenized or rendered form",
        "media": (PACKED,),
        "query": {"with": {"type": "string", "pattern": f"^({'|'.join(AGAINST)}|{BRANCH})$"}},
    },
}


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes for the page at /view and its data. The page needs no key, because only the data are private.

    The page shows the sessions of an API key, the session of a session key, and everything for an admin key.
    """
    turns = gateway.turns

    def visit(request: Request) -> Visitor:
        caller = gateway.caller(request)
        session_id = request.path_params.get("session_id", "")
        if may_be_session_id(session_id):
            request_log(request).session_id = session_id
        return Visitor(caller.sees, caller.session_id, metrics=caller.admin)

    reader = RecordReader(turns.renderer.tokenizer, turns.renderer)
    source = StoreSource(turns.store, gateway.model_id)
    viewer = Viewer(source, reader, visit, lambda: _values(turns.telemetry.metrics))
    # A link to the page may have parameters of an older release.
    return [
        ApiRoute("GET", route.path, route.endpoint, any_query=True, **_DESCRIBED[route.path])
        for route in viewer_routes(viewer)
    ]


def _values(metrics: Metrics) -> dict[str, Any]:
    """Return counter and gauge values, and sums and counts of histograms, by their names in /metrics."""
    return {
        sample.name: [
            {"labels": value.labels, "value": value.value} for value in family.samples if value.name == sample.name
        ]
        for family in metrics.whole().collect()
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }
