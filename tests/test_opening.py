from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokentape._opening import open_captured, open_configured, open_renderer, other_sampling
from tokentape.config import EngineConfig, ServeConfig
from tokentape.engines._base import Timeouts
from tokentape.engines._pool import EnginePool
from tokentape.engines._vllm_chat import VllmChatServer
from tokentape.errors import EngineTimeout, EngineUnavailable


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        (("http://host:1", "http://host:2/"), ["host:1", "host:2"]),
        (("http://host/a", "http://host/b/"), ["host/a", "host/b"]),
    ],
)
def test_each_address_is_a_replica(urls: tuple[str, ...], names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(openers: Mapping[str, Any]) -> list[str]:
        return [*openers]

    monkeypatch.setattr(EnginePool, "open", opened)
    config = ServeConfig(engine=EngineConfig(kind="vllm", urls=urls))
    renderer: Any = None
    assert asyncio.run(open_configured(config, renderer, check=False)) == names


@pytest.mark.usefixtures("quick_models")
def test_slow_steps_are_logged_before_they_start(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO)
    for _ in range(2):
        open_renderer(ServeConfig(model=model_dir))
    loading = f"loading tokenizer and chat template from {model_dir}"
    # Results of trials are cached.
    once = "trying out conversations with the chat template, once per model"
    assert [message.partition(" (")[0] for message in caplog.messages] == [loading, once, loading]


def test_unused_sampling_defaults_are_named_with_their_options(tmp_path: Path) -> None:
    own = {"temperature": 0.7, "top_p": 0.8, "top_k": -1, "repetition_penalty": 1.0, "eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    warning = other_sampling(ServeConfig(model=tmp_path))
    assert "sampled with temperature 1, top_p 1. " in warning
    assert warning.endswith("add --default temperature=0.7 --default top_p=0.8")
    assert "--default top_p=0.8" not in other_sampling(ServeConfig(model=tmp_path, pin={"top_p": 1}))
    assert other_sampling(ServeConfig(model=tmp_path, default={"temperature": 0.7, "top_p": 0.8})) == ""
    (tmp_path / "generation_config.json").write_text("[]")
    assert other_sampling(ServeConfig(model=tmp_path)) == ""


def test_opening_waits_for_a_silent_server_no_longer_than_for_a_connection() -> None:
    renderer: Any = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=10))
    # The system accepts connections, and nothing answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        timeouts = Timeouts(connect=0.1, first_token=1.0)
        config = ServeConfig(engine=EngineConfig(kind="vllm", urls=(url,), timeouts=timeouts))
        with pytest.raises(EngineTimeout, match="timeout connect"):
            asyncio.run(open_configured(config, renderer, check=False))


@pytest.mark.parametrize(("paused", "tries"), [(True, 3), (False, 1)])
def test_opening_waits_for_an_engine_that_is_paused(paused: bool, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape._opening._WAIT_TICK_SECONDS", 0)
    tried: list[object] = []

    async def opened(openers: Mapping[str, Any]) -> str:
        tried.append(openers)
        if len(tried) < 3:
            error = EngineUnavailable("503")
            error.paused = paused
            raise error
        return "an engine"

    monkeypatch.setattr(EnginePool, "open", opened)
    config = ServeConfig(engine=EngineConfig(kind="vllm", urls=("http://host:1", "http://host:2")))
    renderer: Any = None
    if paused:
        assert asyncio.run(open_configured(config, renderer, check=False)) == "an engine"
    else:
        with pytest.raises(EngineUnavailable):
            asyncio.run(open_configured(config, renderer, check=False))
    assert len(tried) == tries


def test_opening_waits_for_a_paused_server_that_renders(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape._opening._WAIT_TICK_SECONDS", 0)
    refusals = [EngineUnavailable("503"), EngineUnavailable("503")]

    async def opened(url: str, **_: Any) -> str:
        if not refusals:
            return "a server"
        refusals[0].paused = True
        raise refusals.pop(0)

    async def guarded(server: Any) -> Any:
        return server

    monkeypatch.setattr(VllmChatServer, "open", opened)
    monkeypatch.setattr("tokentape._opening._guard", lambda *_: guarded)
    config = ServeConfig(model=model_dir, engine=EngineConfig(kind="vllm", urls=("http://host:1",), capture=True))
    renderer: Any = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=1))
    assert asyncio.run(open_captured(config, renderer)) == "a server"
