"""Images through SGLang's `/generate`, and its sessions, with a fake server."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real import MODEL
from starlette.responses import JSONResponse, Response
from test_sglang import API_TYPES, load
from tests.engines import fake_server
from tests.engines.fake_server import FakeServer
from tests.engines.fake_sglang import PARAMS, SAMPLED, VOCAB_SIZE, answers, generate

from tokentape.chat._renderer import Renderer
from tokentape.engines._base import PromptMedia, SampleDelta
from tokentape.engines._guarded import GuardedEngine, ModelCheck
from tokentape.engines._pool import EnginePool
from tokentape.engines._sglang import SglangEngine
from tokentape.errors import EngineContractError, InvalidRequest
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

IMAGES = (PromptMedia(1, 3, b"one"), PromptMedia(5, 2, b"two"))
WITH_IMAGES = np.array([3, 50, 50, 50, 4, 50, 50, 5], np.int32)
SEES = JSONResponse({"model_path": "tiny", "has_image_understanding": True})


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server.running() as fake:
        yield fake


@pytest.fixture(autouse=True)
def _forget(server: FakeServer) -> None:
    server.reset(answers() | {"/model_info": SEES})


def expanding(lengths: Sequence[int]) -> Callable[[dict[str, Any]], Response]:
    """Return replies of a server that repeats the placeholder (50) of each image, as its processors do."""

    def answer(body: dict[str, Any]) -> Response:
        left = iter(lengths)
        ids = [
            repeated
            for token_id in body["input_ids"]
            for repeated in [token_id] * (next(left) if token_id == 50 else 1)
        ]
        return generate({**body, "input_ids": ids})

    return answer


async def pool_over(server: FakeServer) -> EnginePool:
    async def look(*_: Any) -> ModelCheck:
        return ModelCheck("ok")

    async def guarded() -> GuardedEngine:
        return await GuardedEngine.open(await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE), look)

    return await EnginePool.open({"one": guarded})


def sampled_with_images(server: FakeServer, lengths: Sequence[int], *, stream: bool = True) -> list[SampleDelta]:
    async def main() -> list[SampleDelta]:
        pool = await pool_over(server)
        assert pool.info.media == {"image"}
        server.asked.clear()
        server.answers["/generate"] = expanding(lengths)
        try:
            call = pool.sample(WITH_IMAGES, PARAMS, stream=stream, request_id="r", media=IMAGES)
            return [delta async for delta in call]
        finally:
            await pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_images_are_sent_with_a_placeholder_each(server: FakeServer, stream: bool) -> None:
    deltas = sampled_with_images(server, [3, 2], stream=stream)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == SAMPLED
    (body,) = server.bodies("/generate")
    assert body["input_ids"] == [3, 50, 4, 50, 5]
    assert [base64.b64decode(image.partition("base64,")[2]) for image in body["image_data"]] == [b"one", b"two"]
    assert body["return_prompt_token_ids"] is True


@pytest.mark.parametrize("lengths", [[3, 1], [1, 1], [2, 3]])
def test_image_with_another_token_count_in_the_server_fails_the_call(server: FakeServer, lengths: list[int]) -> None:
    with pytest.raises(EngineContractError, match="prompt"):
        sampled_with_images(server, lengths)


def test_ids_retokenized_by_the_server_fail_the_call(server: FakeServer) -> None:
    """With SGLANG_MM_AVOID_RETOKENIZE=0, the server decodes the prompt and encodes the text."""

    def encoding_again(body: dict[str, Any]) -> Response:
        return generate({**body, "input_ids": [7, *WITH_IMAGES.tolist()[1:]]})

    async def main() -> None:
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answers["/generate"] = encoding_again
        try:
            with pytest.raises(EngineContractError, match="prompt"):
                async for _ in engine.sample(WITH_IMAGES, PARAMS, stream=True, request_id="r", media=IMAGES):
                    pass
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("version", ["0.5.23", "0.5.12"])
def test_server_without_vision_or_prompt_ids_refuses_images(server: FakeServer, version: str) -> None:
    server.reset(answers(version) | ({"/model_info": SEES} if version == "0.5.12" else {}))

    async def main() -> None:
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        assert engine.info.media == set()
        try:
            with pytest.raises(InvalidRequest, match="not accept images"):
                engine.sample(WITH_IMAGES, PARAMS, stream=True, request_id="r", media=IMAGES)
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.skipif(API_TYPES is None, reason="needs sglang/api/v1/api_types.py of a wheel: TOKENTAPE_SGLANG_API_TYPES")
def test_a_body_with_images_satisfies_the_decoder_of_the_server(server: FakeServer) -> None:
    assert API_TYPES is not None
    sampled_with_images(server, [3, 2])
    (body,) = server.bodies("/generate")
    types = load(Path(API_TYPES))
    assert types.GenerateRequest.from_json_value(body).to_json_value()["image_data"] == body["image_data"]
    with pytest.raises(types.JsonContractError):
        types.GenerateRequest.from_json_value({**body, "image_data": [1]})


@pytest.mark.parametrize("keeps", [True, False])
def test_server_session_is_closed_with_the_gateway_s(server: FakeServer, tmp_path: Path, keeps: bool) -> None:
    """Sessions are closed if deleted or if they leave the memory. A server without session caches logs a warning."""
    server.reset(answers(enable_session_radix_cache=keeps) | {"/close_session": Response()})

    async def main() -> None:
        renderer = Renderer.load(MODEL)
        engine = SglangEngine.open(server.url, vocab_size=renderer.tokenizer.vocab_size)
        pool = await EnginePool.open({"one": lambda: engine})
        with SqliteStore.open(tmp_path) as store:
            turns = Turns(pool, renderer, store)
            for name in ("deleted", "forgotten", "open"):
                await turns.create_session(name, {})
            await turns.delete_session("deleted")
            turns.forget(["forgotten"])
            await pool.close()

    asyncio.run(main())
    closed = server.bodies("/close_session")
    assert closed == ([{"session_id": "deleted"}, {"session_id": "forgotten"}] if keeps else [])
