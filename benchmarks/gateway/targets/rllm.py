"""rllm-model-gateway: capture with its default store, and the cumulative token mode of its repository's main branch.

The release on PyPI (0.1.0) has no cumulative mode. TOKENTAPE_BENCH_RLLM names a Python with either version. With the
main branch, both modes are measured.
"""

from __future__ import annotations

import json
import subprocess

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process, free_port
from benchmarks.gateway.targets.base import Session, Site
from benchmarks.gateway.targets.peer import python_of, version_of, why_missing

VARIABLE = "TOKENTAPE_BENCH_RLLM"


class Rllm:
    """Target; if `cumulative` it sends token ids from the second turn on, else it captures the server's ids."""

    streams = True

    def __init__(self, *, cumulative: bool) -> None:
        self._cumulative = cumulative
        self.kind = "exact" if cumulative else "capture"
        self.stores = not cumulative
        self.name = f"rllm-model-gateway, {'cumulative' if cumulative else 'capture, sqlite'}"

    def missing(self) -> str | None:
        why = why_missing(VARIABLE)
        if why is None and self._cumulative:
            ask = "import rllm_model_gateway.token_accumulator, renderers"
            if subprocess.run([str(python_of(VARIABLE)), "-c", ask], capture_output=True).returncode:
                return "this release has no cumulative mode"
        return why

    def version(self) -> str:
        return version_of(VARIABLE, "rllm-model-gateway")

    def start(self, site: Site) -> tuple[str, Process | None]:
        port = free_port()
        config = {
            "host": "127.0.0.1",
            "port": port,
            "log_level": "error",
            "workers": [{"url": f"{site.completions}/v1"}],
        }
        if self._cumulative:
            config |= {"cumulative_token_mode": True, "renderer_family": "qwen3", "model": str(site.model)}
            config |= {"store_worker": "memory"}
        else:
            config |= {"store_worker": "sqlite", "db_path": str(site.folder / "traces.db")}
        path = site.folder / "config.yaml"
        path.write_text(json.dumps(config))
        command = [str(python_of(VARIABLE)), "-m", "rllm_model_gateway", "--config", str(path)]
        process = Process(command, site.log)
        url = f"http://127.0.0.1:{port}"
        process.answers(f"{url}/health")
        return url, process

    async def session(self, connection: Connection, name: str) -> Session:
        return Session(f"/sessions/{name}/v1/chat/completions", {})
