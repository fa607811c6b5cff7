"""The vLLM engine on replies that a real server gave, recorded by `record_vllm.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import fake_vllm
import numpy as np
import pytest
from fake_vllm import FakeVllm, joined, open_and_sample, streaming
from starlette.responses import JSONResponse, Response

from tokentape.engines.base import SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("vllm_*.json"))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeVllm]:
    with fake_vllm.running() as fake:
        yield fake


def slow_reading(transcript: dict[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and log-probabilities of a recorded reply, by the obvious way."""
    lines = transcript["reply"].splitlines() if transcript["request"]["stream"] else [transcript["reply"]]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    choices = [choice for body in bodies for choice in body.get("choices", [])]
    ids = tuple(token_id for choice in choices for token_id in choice["token_ids"])
    return ids, tuple(lp for choice in choices for lp in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_recorded_reply_of_the_real_server_is_read_exactly(server: FakeVllm, path: Path) -> None:
    server.reset()
    transcript = json.loads(path.read_text())
    request = transcript["request"]
    renamed = {"stop_strings": "stop", "top_logprobs": "logprobs"}
    values = {field.name: request[renamed.get(field.name, field.name)] for field in fields(SamplingParams)}
    params = SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    raw = transcript["reply"].encode()
    cards = [{"id": request["model"], "max_model_len": transcript["max_context"]}]
    server.routes["/v1/models"] = JSONResponse({"data": cards})

    def sample() -> list[SampleDelta]:
        return open_and_sample(
            server,
            params,
            prompt=np.array(request["prompt"], np.int32),
            stream=request["stream"],
            vocab_size=transcript["vocab_size"],
            answer=lambda body: streaming(raw) if request["stream"] else Response(raw),
        )

    if transcript["expect"] == "refused":
        with pytest.raises(InvalidRequest):
            sample()
        return
    deltas = sample()
    assert server.bodies == [request]
    assert joined(deltas) == slow_reading(transcript)
    assert deltas[-1].finish_reason == transcript["expect"]
