"""verifiers' interception server with its train client: renders, bridges and calls vLLM's /inference/v1/generate."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process
from benchmarks.gateway.targets.base import Session, Site
from benchmarks.gateway.targets.peer import python_of, version_of, why_missing

VARIABLE = "TOKENTAPE_BENCH_VERIFIERS"
_SCRIPT = Path(__file__).parent.parent / "peers" / "verifiers_server.py"


class Verifiers:
    """Target with bearer tokens as sessions. It builds whole replies before streaming, so streams are not measured."""

    name = "verifiers, train client"
    kind = "exact"
    streams = False
    stores = False

    def missing(self) -> str | None:
        return why_missing(VARIABLE)

    def version(self) -> str:
        return version_of(VARIABLE, "verifiers")

    def start(self, site: Site) -> tuple[str, Process | None]:
        command = [str(python_of(VARIABLE)), str(_SCRIPT), site.generate, str(site.model)]
        process = Process(command, site.log, {"HF_HUB_OFFLINE": "1"})
        said = process.said(r"READY (\S+) (\S+)")
        self._sessions = said[2]
        return said[1], process

    async def session(self, connection: Connection, name: str) -> Session:
        async with Connection(self._sessions) as control:
            _, answer = await control.request("/", b"{}")
        secret = json.loads(answer)["secret"]
        return Session("/v1/chat/completions", {"authorization": f"Bearer {secret}"})
