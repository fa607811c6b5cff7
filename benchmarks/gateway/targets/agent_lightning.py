"""Agent Lightning 1.0's server: captures in memory what the model's server reports, as events of a rollout's attempt.

The release on PyPI (0.3.0) is a different program, LiteLLM's proxy with a store of spans. It is not measured.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process, free_port
from benchmarks.gateway.targets.base import Session, Site
from benchmarks.gateway.targets.peer import python_of, version_of, why_missing

VARIABLE = "TOKENTAPE_BENCH_AGENT_LIGHTNING"


class AgentLightning:
    """Target where a session is the first attempt of a rollout in mode `train`. It refuses streams with 400."""

    name = "Agent Lightning"
    kind = "capture"
    streams = False
    stores = False

    def missing(self) -> str | None:
        why = why_missing(VARIABLE)
        if why is None and not _server().is_file():
            return "this release has no agl-server"
        return why

    def version(self) -> str:
        return version_of(VARIABLE, "agentlightning")

    def start(self, site: Site) -> tuple[str, Process | None]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        # It logs lines for every call. They are not part of the record, so they go outside the measured folder.
        beside = site.folder.with_name(f"{site.folder.name}-log")
        beside.mkdir()
        command = [str(_server()), "host=127.0.0.1", f"port={port}", "default_proxy.model_name=m"]
        command += [f"hydra.run.dir={beside}", "hydra.output_subdir=null"]
        process = Process(command, site.log)
        process.answers(f"{url}/healthz")
        served = json.dumps([{"model": "m", "endpoint": f"{site.completions}/v1"}]).encode()
        registering = urllib.request.Request(f"{url}/api/models", served, {"content-type": "application/json"})
        with urllib.request.urlopen(registering, timeout=5):
            return url, process

    async def session(self, connection: Connection, name: str) -> Session:
        rollout = json.dumps([{"rollout_id": name, "input": {}}]).encode()
        await connection.request("/api/rollouts", rollout)
        return Session(f"/proxy/rollout/{name}/attempt/0/mode/train/openai/v1/chat/completions", {})


def _server() -> Path:
    python = python_of(VARIABLE)
    assert python is not None
    return python.with_name("agl-server")
