"""The vLLM engine on replies of a real server, recorded by `record_vllm.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response
from tests.engines import fake_vllm
from tests.engines.fake_vllm import FakeVllm, joined, open_and_sample, streaming

from tokentape.engines._base import DISTRIBUTION, SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("vllm_*.json"))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeVllm]:
    with fake_vllm.running() as fake:
        yield fake


def slow_reading(transcript: dict[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Read ids and log-probabilities of a recorded reply in a simple way."""
    lines = transcript["reply"].splitlines() if transcript["request"]["stream"] else [transcript["reply"]]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    choices = [choice for body in bodies for choice in body.get("choices", [])]
    ids = tuple(token_id for choice in choices for token_id in choice["token_ids"])
    if "sampling_params" in transcript["request"]:
        return ids, tuple(entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"])
    return ids, tuple(lp for choice in choices for lp in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_recorded_reply_of_the_real_server_is_read_exactly(server: FakeVllm, path: Path) -> None:
    server.reset()
    transcript = json.loads(path.read_text())
    request = transcript["request"]
    renamed = {"stop_strings": "stop", "top_logprobs": "logprobs"}
    generate = "sampling_params" in request
    sampling = request["sampling_params"] if generate else request
    values = {name: sampling[renamed.get(name, name)] for name in DISTRIBUTION}
    if generate and values["top_logprobs"]:
        values["top_logprobs"] -= 1  # One more is requested.
    params = SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    raw = transcript["reply"].encode()
    cards = [{"id": request["model"], "max_model_len": transcript["max_context"]}]
    server.routes["/v1/models"] = JSONResponse({"data": cards})
    server.scale_out = generate

    def sample() -> list[SampleDelta]:
        return open_and_sample(
            server,
            params,
            prompt=np.array(request["token_ids" if generate else "prompt"], np.int32),
            stream=request["stream"],
            vocab_size=transcript["vocab_size"],
            answer=lambda body: streaming(raw) if request["stream"] else Response(raw),
        )

    if transcript["expect"] == "refused":
        with pytest.raises(InvalidRequest):
            sample()
        return
    deltas = sample()
    assert [without_name(body) for body in server.bodies] == [without_name(request)]
    assert joined(deltas) == slow_reading(transcript)
    assert deltas[-1].finish_reason == {"renamed": "length"}.get(transcript["expect"], transcript["expect"])
    if transcript["expect"] == "renamed":
        before, after = deltas[-1].weight_spans
        assert (before.start, before.end, after.version, after.end) == (0, after.start, "step-1", 300)


def without_name(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without the random suffix of its id."""
    return {name: value for name, value in body.items() if name != "request_id"}
