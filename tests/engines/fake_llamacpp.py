"""Replies of a llama-server without faults, in the form of 0.5.0-dev; `transcripts/` has real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response
from tests.engines.fake_server import Answer, Body, FakeServer

from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._llamacpp import LlamaCppEngine

VOCAB_SIZE = 100
MAX_CONTEXT = 256
PLAIN = 64
PROMPT = np.array([3, 4, 5], np.int32)
PARAMS = SamplingParams(max_tokens=3)


def logprob_of(token_id: int) -> float:
    """Return this server's log-probability of an id, at any position."""
    return -0.7 * (token_id + 1)


def reported(token_id: int, count: int) -> Body:
    """Return an entry of `completion_probabilities`."""
    top = [{"id": i, "logprob": logprob_of(i)} for i in range(min(count, VOCAB_SIZE))]
    return {"id": token_id, "token": "x", "logprob": logprob_of(token_id), "top_logprobs": top}


def answering(ids: Sequence[int], *, hidden: Sequence[int] = (), end: int | None = None) -> Callable[[Body], Response]:
    """Return answers that sample `ids` after `PROMPT`, piece by piece, without log-probabilities of `hidden` positions.

    `hidden` are positions in `ids`; `end` is an id that the server stops at by itself.
    """

    def answer(body: Body) -> Response:
        done = len(body["prompt"]) - len(PROMPT)
        piece = list(ids[done : done + body["n_predict"]])
        stop_type = "limit"
        if body["logit_bias"]:
            piece = [body["logit_bias"][0][0]]
        elif end in piece:
            piece = piece[: piece.index(end) + 1]
            stop_type = "eos"
        shown = [] if body["logit_bias"] else [at - done for at in hidden]
        reply = {
            "tokens": piece,
            "tokens_evaluated": len(body["prompt"]),
            "tokens_predicted": len(piece),
            "stop_type": stop_type,
            "stopping_word": "",
            "completion_probabilities": [
                reported(token_id, body["n_probs"]) for at, token_id in enumerate(piece) if at not in shown
            ],
        }
        return JSONResponse(reply)

    return answer


def answers(slots: int = 1) -> dict[str, Answer]:
    """Return a server's routes and replies."""
    settings = {"n_ctx": MAX_CONTEXT}
    props = {"default_generation_settings": settings, "total_slots": slots, "build_info": "b1-test"}
    return {
        "/props": JSONResponse(props),
        "/v1/models": JSONResponse({"data": [{"id": "tiny.gguf", "meta": {"n_vocab": VOCAB_SIZE + 4}}]}),
        "/tokenize": JSONResponse({"tokens": [PLAIN]}),
        "/health": JSONResponse({"status": "ok"}),
        "/completion": answering([11, 12, 13]),
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
        engine = await LlamaCppEngine.open(server.url, vocab_size=vocab_size, **opening)
        server.asked.clear()
        if answer is not None:
            server.answers["/completion"] = answer
        try:
            return [d async for d in engine.sample(prompt, params, stream=stream, request_id="call-1")]
        finally:
            await engine.close()

    return asyncio.run(main())
