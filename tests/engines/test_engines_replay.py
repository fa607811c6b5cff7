"""The SGLang and llama.cpp engines on replies of real servers, recorded by `record_engines.py`."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response
from tests.engines import fake_llamacpp, fake_server, fake_sglang
from tests.engines.fake_server import Body, FakeServer
from tests.engines.fake_vllm import joined

from tokentape.engines._base import PromptMedia, SampleDelta, SamplingParams
from tokentape.engines._kinds import open_engine

FOLDER = Path(__file__).parent / "transcripts"
TRANSCRIPTS = sorted([*FOLDER.glob("sglang_*.json"), *FOLDER.glob("llamacpp_*.json")])


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server.running() as fake:
        yield fake


def without_names(body: Body) -> Body:
    """Return a body without its random parts."""
    return {name: value for name, value in body.items() if name != "rid"}


def slow_reading(kind: str, exchange: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Read ids and log-probabilities of a recorded reply in a simple way."""
    if kind == "llamacpp":
        reply = json.loads(exchange["reply"])
        return reply["tokens"], [entry["logprob"] for entry in reply["completion_probabilities"]]
    text = exchange["reply"]
    if exchange["request"]["stream"]:
        # These are cumulative streams: the last event has all tokens.
        text = [line for line in text.splitlines() if line.startswith("data: {")][-1].removeprefix("data: ")
    last = json.loads(text)
    return last["output_ids"], [entry[0] for entry in last["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_recorded_reply_of_the_real_server_is_read_exactly(server: FakeServer, path: Path) -> None:
    transcript = json.loads(path.read_text())
    kind = transcript["engine"].split()[0]
    media = tuple(PromptMedia(at, length, b64decode(data)) for at, length, data in transcript.get("media", ()))
    fakes: Any = {"sglang": fake_sglang, "llamacpp": fake_llamacpp}[kind]
    server.reset(fakes.answers())
    context, vocab_size = transcript["max_context"], transcript["vocab_size"]
    if kind == "sglang":
        server.answers["/model_info"] = JSONResponse({"has_image_understanding": bool(media)})
        server.answers["/v1/models"] = JSONResponse({"data": [{"id": "demo", "max_model_len": context}]})
    else:
        settings = {"n_ctx": context}
        props = {"default_generation_settings": settings, "total_slots": 1, "build_info": "b1"}
        server.answers["/props"] = JSONResponse(props)
        server.answers["/v1/models"] = JSONResponse({"data": [{"id": "demo", "meta": {"n_vocab": vocab_size}}]})
    params = {name: tuple(v) if isinstance(v, list) else v for name, v in transcript["params"].items()}
    exchanges = iter(transcript["exchanges"])

    def answer(body: Body) -> Response:
        exchange = next(exchanges)
        # The slot depends on earlier calls.
        assert without_names(body) | {"id_slot": 0} == without_names(exchange["request"]) | {"id_slot": 0}
        stream = body["stream"]
        return Response(exchange["reply"], media_type="text/event-stream" if stream else "application/json")

    async def main() -> list[SampleDelta]:
        engine = await open_engine(kind, server.url, vocab_size=vocab_size)
        server.answers |= {"/generate": answer, "/completion": answer}
        prompt = np.array(transcript["prompt"], np.int32)
        try:
            sampling = SamplingParams(**params)
            more: Any = {"media": media} if media else {}
            stream = transcript["stream"]
            return [d async for d in engine.sample(prompt, sampling, stream=stream, request_id="replayed", **more)]
        finally:
            await engine.close()

    deltas = asyncio.run(main())
    ids, logprobs = joined(deltas)
    slowly = [slow_reading(kind, exchange) for exchange in transcript["exchanges"]]
    assert list(ids) == transcript["ids"]
    assert list(ids) == [i for reply in slowly for i in reply[0]][: len(ids)]
    assert list(logprobs) == [lp for reply in slowly for lp in reply[1]][: len(ids)]
    assert deltas[-1].finish_reason == transcript["finish_reason"]
    assert next(exchanges, None) is None
