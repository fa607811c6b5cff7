"""vLLM's Rust frontend, over an engine of ours: accepted and refused requests, and the check of its model.

`TOKENTAPE_VLLM_RS` names `vllm-rs` from a wheel of vLLM 0.33. This also needs pyzmq, but neither a GPU nor torch.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.fake_vllm import by_route
from tests.engines.real import MODEL, free_port, served
from tests.engines.stand_in import LanguageModel

from tokentape.audit._served import CheckResult, FolderModel, serves_model
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import EngineInfo, SamplingParams
from tokentape.engines._openai_compatible import OpenAiEngine
from tokentape.engines._remote import RemoteEngine
from tokentape.engines._vllm import Route, VllmEngine
from tokentape.engines._vllm_chat import VllmChatServer

BINARY = os.environ.get("TOKENTAPE_VLLM_RS")
VOCAB_SIZE = 4000
PROMPT = np.array([3, 4, 5], np.int32)

pytestmark = [pytest.mark.engines, pytest.mark.skipif(BINARY is None, reason="set TOKENTAPE_VLLM_RS to vllm-rs")]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(MODEL)


@pytest.fixture(scope="module")
def url(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    rust_engine = pytest.importorskip("tests.engines.rust_engine", exc_type=ImportError)
    handshake = free_port()

    def command(port: int) -> list[str]:
        assert BINARY is not None
        where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(handshake)]
        engines = ["--data-parallel-size", "1", "--data-parallel-size-local", "0", *where]
        return [BINARY, "serve", str(MODEL), "--port", str(port), *engines, "--enable-scale-out"]

    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    with (
        rust_engine.connected(f"tcp://127.0.0.1:{handshake}", LanguageModel(renderer).logprobs),
        served(command, log, {}) as url,
    ):
        yield url


async def sampled(engine: RemoteEngine, params: SamplingParams, *, stream: bool) -> tuple[list[int], Any, Any]:
    deltas = [delta async for delta in engine.sample(PROMPT, params, stream=stream, request_id="q")]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return ids, deltas[-1].finish_reason, deltas[-1].stop


def test_the_route_that_takes_stop_strings_is_used(url: str) -> None:
    async def run() -> EngineInfo:
        engine = await VllmEngine.open(url, vocab_size=VOCAB_SIZE)
        await engine.close()
        return engine.info

    info = asyncio.run(run())
    assert info.version.endswith("+rust")
    assert info.capabilities == ("completions",)
    assert info.max_context == 1024
    assert {"stop_strings", "stop_token_ids", "min_tokens", "seed", "cache_salt"} <= info.sampling


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["generate", "completions"])
@pytest.mark.parametrize("verify_prompt", [True, False])
def test_ids_stops_and_log_probabilities_are_returned(
    url: str, route: Route, stream: bool, verify_prompt: bool
) -> None:
    async def run() -> None:
        engine = await by_route(route).open(url, vocab_size=VOCAB_SIZE, verify_prompt=verify_prompt)
        assert await sampled(engine, SamplingParams(max_tokens=4), stream=stream) == ([11, 12, 13, 11], "length", None)
        at_13 = SamplingParams(max_tokens=4, stop_token_ids=(13,), top_logprobs=2)
        assert await sampled(engine, at_13, stream=stream) == ([11, 12, 13], "stop", 13)
        if "stop_strings" in engine.info.sampling:
            # Ids 11 and 12 are a comma and a hyphen.
            at_hyphen = SamplingParams(max_tokens=4, stop_strings=("-",))
            assert await sampled(engine, at_hyphen, stream=stream) == ([11, 12], "stop", "-")
        await engine.close()

    asyncio.run(run())


def test_engine_opens_for_chats_and_other_clients_of_the_api(url: str) -> None:
    async def run() -> None:
        for opening in (VllmChatServer.open, OpenAiEngine.open):
            await (await opening(url, vocab_size=VOCAB_SIZE)).close()

    asyncio.run(run())


def checks_of(url: str, renderer: Renderer, folder: FolderModel) -> list[CheckResult]:
    async def run() -> list[CheckResult]:
        engine = await VllmEngine.open(url, vocab_size=VOCAB_SIZE)
        try:
            return await serves_model("vllm", engine.http, engine.info, renderer, folder)
        finally:
            await engine.close()

    return asyncio.run(run())


def test_model_check_runs_in_every_way(url: str, renderer: Renderer) -> None:
    assert [check.status for check in checks_of(url, renderer, FolderModel.read(MODEL))] == ["ok"] * 3


def test_folder_of_another_model_is_detected(url: str, renderer: Renderer, tmp_path: Path) -> None:
    source = (MODEL / "tokenizer.json").read_text(encoding="utf-8")
    assert '"<|im_end|>"' in source
    for file in MODEL.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes().replace(b"<|im_end|>", b"<|im_stop|>"))
    assert checks_of(url, Renderer.load(tmp_path), FolderModel.read(tmp_path))[0].status == "fail"
