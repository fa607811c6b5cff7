from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tokentape._opening import open_configured, open_renderer
from tokentape.config import EngineConfig, ServeConfig
from tokentape.engines._pool import EnginePool


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
def test_what_takes_seconds_is_logged_before_it_begins(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO)
    for _ in range(2):
        open_renderer(ServeConfig(model=model_dir))
    loading = f"loading tokenizer and chat template from {model_dir}"
    # What was tried out is kept.
    once = "trying out conversations with the chat template, once per model"
    assert [one.partition(" (")[0] for one in caplog.messages] == [loading, once, loading]
