"""LiteLLM's proxy without a database: a widely used general gateway that records nothing."""

from __future__ import annotations

import json

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process, free_port
from benchmarks.gateway.targets.base import Session, Site
from benchmarks.gateway.targets.peer import python_of, version_of, why_missing

VARIABLE = "TOKENTAPE_BENCH_LITELLM"


class LiteLlm:
    """Target with one worker."""

    name = "LiteLLM proxy"
    kind = "proxy"
    streams = True
    stores = False

    def missing(self) -> str | None:
        return why_missing(VARIABLE)

    def version(self) -> str:
        return version_of(VARIABLE, "litellm")

    def start(self, site: Site) -> tuple[str, Process | None]:
        port = free_port()
        model = {"model": "hosted_vllm/m", "api_base": f"{site.completions}/v1", "api_key": "none"}
        config = {
            "model_list": [{"model_name": "m", "litellm_params": model}],
            "general_settings": {"master_key": "sk-benchmark"},
            "litellm_settings": {"telemetry": False},
        }
        path = site.folder / "config.yaml"
        path.write_text(json.dumps(config))
        python = python_of(VARIABLE)
        assert python is not None
        command = [str(python.with_name("litellm")), "--config", str(path), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--telemetry", "False"]
        quiet = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
        process = Process(command, site.log, quiet)
        url = f"http://127.0.0.1:{port}"
        process.answers(f"{url}/health/liveliness")
        return url, process

    async def session(self, connection: Connection, name: str) -> Session:
        return Session("/v1/chat/completions", {"authorization": "Bearer sk-benchmark"})
