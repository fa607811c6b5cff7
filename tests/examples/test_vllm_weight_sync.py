"""The example's loop, with the embedded engine in place of vLLM: the called routes change the weights."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokentape import Client
from tokentape.demo import MODEL
from tokentape.engines._transformers import TransformersEngine
from tokentape.gateway import serving
from tokentape.gateway._serve import running

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_weight_sync.py"


class Server:
    """The routes of vLLM's development mode that change an engine's weights."""

    def __init__(self, engine: TransformersEngine, *, loads: bool) -> None:
        self.engine = engine
        self.loads = loads
        self.called: list[str] = []
        routes = [Route("/{path}", self.handle, methods=["POST"])]
        self.app = Starlette(routes=routes)

    async def handle(self, request: Request) -> Response:
        path, body = request.path_params["path"], await request.body()
        self.called.append(path)
        if path == "collective_rpc":
            call = await request.json()
            assert call["method"] == "reload_weights"
            if self.loads:
                version = f"step-{self.called.count(path)}"
                await self.engine.update_weights(call["kwargs"]["weights_path"], version)
        return JSONResponse({"results": [None]}) if body else Response()


@pytest.fixture
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, str, str]]:
    engine = TransformersEngine.open(MODEL, threads=1)
    server = Server(engine, loads=request.param)
    with running(server.app) as control, serving(engine, MODEL, directory=tmp_path / "record") as gateway:
        yield server, control, gateway


def apart_by_step(parts: tuple[Server, str, str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> list[float]:
    """Return the printed distances of the trainer's logprobs from the sampled ones."""
    _, control, gateway = parts
    options = ["--gateway", gateway, "--engine", control, "--out", str(tmp_path / "weights")]
    sizes = ["--steps", "2", "--group", "2", "--lr", "1e-3"]
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), str(MODEL), *options, *sizes])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return [float(value) for value in re.findall(r"apart by (\S+)", capsys.readouterr().out)]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("parts", [True], indirect=True)
def test_each_step_trains_on_samples_of_the_current_weights(
    parts: tuple[Server, str, str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    first, second = apart_by_step(parts, tmp_path, monkeypatch, capsys)
    assert max(first, second) < 1e-3
    assert parts[0].called == ["collective_rpc", "reset_prefix_cache", "update_weight_version"] * 2
    with Client(parts[2]) as client:
        sampled = [
            (entry.metadata["step"], turn.weight_version)
            for entry in client.sessions()
            for turn in client.session(entry.session_id).info().turns
        ]
    assert set(sampled) == {(0, "0"), (1, "step-1")}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("parts", [False], indirect=True)
def test_server_that_keeps_old_weights_is_detected(
    parts: tuple[Server, str, str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    first, second = apart_by_step(parts, tmp_path, monkeypatch, capsys)
    assert first < 1e-3
    assert second > 1e-2
