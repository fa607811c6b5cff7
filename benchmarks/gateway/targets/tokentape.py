"""Tokentape as `tokentape serve` runs it, token-exact, with vLLM's /v1/completions: one process, workers, replicas."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import version

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process
from benchmarks.gateway.targets.base import Session, Site

POSTGRES = "TOKENTAPE_POSTGRES_URL"
"""Names an empty database for the replicas. The CPU time of its server is not counted."""


class Tokentape:
    """Target; `synchronous` is `full`, the default, or `normal`. Replicas share a PostgreSQL database."""

    streams = True
    stores = True

    def __init__(self, synchronous: str, *, workers: int = 1, replicas: int = 1) -> None:
        self._synchronous = synchronous
        self._workers = workers
        self._replicas = replicas
        several = {f"{workers} workers": workers > 1, f"{replicas} replicas on PostgreSQL": replicas > 1}
        names = [name for name, given in several.items() if given]
        self.kind = "several" if names else "exact"
        self.name = ", ".join(["Tokentape", *(names or [synchronous])])

    def missing(self) -> str | None:
        return None if self._replicas == 1 or POSTGRES in os.environ else f"{POSTGRES} names no database"

    def version(self) -> str:
        return version("tokentape")

    def start(self, site: Site) -> tuple[str, Process | None]:
        command = [sys.executable, "-m", "tokentape", "serve", str(site.model), "--engine", "vllm"]
        command += ["--engine-url", site.completions, "--port", "0"]
        if self._replicas > 1:
            one = shlex.join([*command, "--store", os.environ[POSTGRES]])
            process = Process(["sh", "-c", f"{f'{one} & ' * self._replicas} wait"], site.log)
            said = process.said(r"(?s)at (http://\S+)/v1" + r".*at (http://\S+)/v1" * (self._replicas - 1))
            return " ".join(said.groups()), process
        command += ["--data", str(site.folder / "data"), "--synchronous", self._synchronous]
        process = Process([*command, "--workers", str(self._workers)], site.log)
        return process.said(r"at (http://\S+)/v1")[1], process

    async def session(self, connection: Connection, name: str) -> Session:
        return Session(f"/sessions/{name}/v1/chat/completions", {})
