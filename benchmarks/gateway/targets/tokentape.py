"""Tokentape as `tokentape serve` runs it, token-exact, with vLLM's /v1/completions."""

from __future__ import annotations

import sys
from importlib.metadata import version

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process
from benchmarks.gateway.targets.base import Session, Site


class Tokentape:
    """Target; `synchronous` is `full`, the default, or `normal`."""

    kind = "exact"
    streams = True
    stores = True

    def __init__(self, synchronous: str) -> None:
        self._synchronous = synchronous
        self.name = f"Tokentape, {synchronous}"

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return version("tokentape")

    def start(self, site: Site) -> tuple[str, Process | None]:
        command = [sys.executable, "-m", "tokentape", "serve", str(site.model), "--engine", "vllm"]
        command += ["--engine-url", site.completions, "--data", str(site.folder / "data"), "--port", "0"]
        command += ["--synchronous", self._synchronous]
        process = Process(command, site.log)
        return process.said(r"at (http://\S+)/v1")[1], process

    async def session(self, connection: Connection, name: str) -> Session:
        return Session(f"/sessions/{name}/v1/chat/completions", {})
