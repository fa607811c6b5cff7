"""Replies of an SGLang without faults, in the form of 0.5.23; `transcripts/` has real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response
from tests.engines.fake_server import Answer, Body, FakeServer
from tests.engines.fake_vllm import sse, streaming

from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._sglang import SglangEngine

VOCAB_SIZE = 100
MAX_CONTEXT = 64
SAMPLED = [11, 11, 13]
LOGPROBS = [-0.5, -1.5, -2.5]
MASKS = [[11, 4], [90, 11, 7], [13]]
"""Of the sampled ids, likeliest first."""
OVER_MASKS = [-0.25, -1.25, 0.0]
PROMPT = np.array([3, 4, 5], np.int32)
PARAMS = SamplingParams(max_tokens=3)

Events = list[dict[str, Any]]


def events(body: Body, *, incremental: bool = False) -> Events:
    """Return a stream's events for a request: the ids `SAMPLED`, as many as requested, one more in each event."""
    sampling = body["sampling_params"]
    count = min(sampling["max_new_tokens"], len(SAMPLED))
    heat = sampling["temperature"] or 1.0
    top = [[[-1.25 / heat, 1, None], [-3.0 / heat, 2, None]]] * count
    entries = [[logprob, token_id, None] for logprob, token_id in zip(LOGPROBS, SAMPLED, strict=True)]
    sent: Events = []
    for end in range(1, count + 1):
        begin = end - 1 if incremental else 0
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": None,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": end,
            "cached_tokens": 0,
            "weight_version": "v1",
            "output_token_logprobs": entries[begin:end],
        }
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = MASKS[begin:end]
            meta["output_token_sampling_logprobs"] = OVER_MASKS[begin:end]
        if body["top_logprobs_num"]:
            meta["output_top_logprobs"] = top[begin:end]
        echo = {"prompt_token_ids": body["input_ids"]} if body.get("return_prompt_token_ids") else {}
        sent.append({"text": "x", "output_ids": SAMPLED[begin:end], "meta_info": meta} | echo)
    stopped = SAMPLED[count - 1] in sampling["stop_token_ids"]
    meta["finish_reason"] = (
        {"type": "stop", "matched": SAMPLED[count - 1]} if stopped else {"type": "length", "length": count}
    )
    meta["weight_versions"] = [{"version": "v1", "start": 0, "end": count}]
    return sent


def generate(body: Body) -> Response:
    """Return the replies of a server without faults."""
    sent = events(body)
    return streaming(sse(sent)) if body["stream"] else JSONResponse(sent[-1])


def answers(version: str = "0.5.23", **server: object) -> dict[str, Answer]:
    """Return a server's routes and replies; keywords go into its server info."""
    return {
        "/server_info": JSONResponse({"version": version, **server}),
        "/model_info": JSONResponse({"model_path": "tiny", "preferred_sampling_params": None}),
        "/v1/models": JSONResponse({"data": [{"id": "tiny", "max_model_len": MAX_CONTEXT}]}),
        "/health": Response(),
        "/abort_request": Response(),
        "/generate": generate,
    }


def sample(
    server: FakeServer,
    params: SamplingParams = PARAMS,
    *,
    prompt: np.ndarray = PROMPT,
    stream: bool = True,
    answer: Callable[[Body], Response] | None = None,
    vocab_size: int = VOCAB_SIZE,
    **opening: Any,
) -> list[SampleDelta]:
    """Return the deltas of a call of a new engine. `answer` replaces the replies after opening."""

    async def main() -> list[SampleDelta]:
        engine = await SglangEngine.open(server.url, vocab_size=vocab_size, **opening)
        server.asked.clear()
        if answer is not None:
            server.answers["/generate"] = answer
        try:
            return [d async for d in engine.sample(prompt, params, stream=stream, request_id="call-1")]
        finally:
            await engine.close()

    return asyncio.run(main())


def tampered(change: Callable[[Events], object], *, incremental: bool = False) -> Callable[[Body], Response]:
    """Return replies without faults, except that `change` edits the events."""

    def answer(body: Body) -> Response:
        sent = events(body, incremental=incremental)
        change(sent)
        return streaming(sse(sent)) if body["stream"] else JSONResponse(sent[-1])

    return answer
