"""The viewer of a gateway's own record: mounted under the gateway's keys."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from tokentape.gateway.access import note
from tokentape.gateway.endpoint import Gateway
from tokentape.gateway.metrics import Metrics
from tokentape.gateway.session_ids import may_be_session_id
from tokentape.viewer.comparing import Reader
from tokentape.viewer.routes import Viewer, Visitor
from tokentape.viewer.routes import routes as viewer_routes
from tokentape.viewer.source import StoreSource


def routes(gateway: Gateway) -> list[Route]:
    """The page at /view and its data. The page says nothing of anybody and takes no key; all data does.

    A key sees its own sessions, a session's key that session, an admin key everything and the metrics.
    """
    turns = gateway.turns

    def visit(request: Request) -> Visitor:
        caller = gateway.caller(request)
        session_id = request.path_params.get("session_id", "")
        if may_be_session_id(session_id):
            note(request).session_id = session_id
        return Visitor(caller.sees, caller.session_id, metrics=caller.admin)

    reader = Reader(turns.renderer.tokenizer, turns.renderer)
    source = StoreSource(turns.store, gateway.model_id)
    return viewer_routes(Viewer(source, reader, visit, lambda: _values(turns.telemetry.metrics)))


def _values(metrics: Metrics) -> dict[str, Any]:
    """What counters and gauges are at, and sums and counts of histograms; names as in /metrics."""
    return {
        sample.name: [
            {"labels": other.labels, "value": other.value} for other in family.samples if other.name == sample.name
        ]
        for family in metrics.whole().collect()
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }
