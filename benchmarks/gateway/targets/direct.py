"""Direct calls of the mock server, as a baseline for latency and bytes."""

from __future__ import annotations

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process
from benchmarks.gateway.targets.base import Session, Site


class Direct:
    """Target without a gateway."""

    name = "direct call"
    kind = "floor"
    streams = True
    stores = False

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return ""

    def start(self, site: Site) -> tuple[str, Process | None]:
        return site.completions, None

    async def session(self, connection: Connection, name: str) -> Session:
        return Session("/v1/chat/completions", {})
