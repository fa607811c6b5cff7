"""Ids scored by servers of each kind and by the embedded engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.responses import JSONResponse
from tests.engines import fake_server
from transformers import AutoModelForCausalLM

from tokentape.engines._base import EngineInfo
from tokentape.engines._forward import ForwardPass
from tokentape.engines._http import HttpClient
from tokentape.engines._llamacpp import LlamaCppEngine
from tokentape.engines._scoring import Scores, refuse_unscorable, server_scores
from tokentape.engines._transformers import TransformersEngine
from tokentape.errors import EngineContractError, EngineError, EngineUnavailable, InvalidRequest

IDS = np.array([3, 4, 5], np.int32)
ROWS = [
    None,
    {"4": {"logprob": -1.5, "rank": 2}, "9": {"logprob": -0.5, "rank": 1}},
    {"5": {"logprob": -2.5, "rank": 7}, "8": {"logprob": -0.25, "rank": 1}, "7": {"logprob": -2.0, "rank": 2}},
]

PATHS = {
    "vllm": ("/v1/completions", "/inference/v1/generate"),
    "openai:vllm": ("/v1/completions",),
    "sglang": ("/generate",),
}


@pytest.fixture(scope="module")
def running() -> Iterator[fake_server.FakeServer]:
    with fake_server.running() as fake:
        yield fake


@pytest.fixture
def server(running: fake_server.FakeServer) -> fake_server.FakeServer:
    running.reset({})
    return running


def scored(server: fake_server.FakeServer, name: str, start: int = 1, top: int = 0) -> Scores | None:
    info = EngineInfo(name, "1", "policy", 10, 100, "raw_logprobs", frozenset(), scoring_paths=PATHS.get(name, ()))

    async def run() -> Scores | None:
        http = HttpClient(server.url)
        try:
            return await server_scores(http, info, IDS, start, top)
        finally:
            await http.close()

    return asyncio.run(run())


def logprobs_of(scores: Scores | None) -> list[float] | None:
    return None if scores is None else scores.logprobs.tolist()


@pytest.mark.parametrize("name", ["vllm", "openai:vllm"])
def test_completions_score_a_prompt(server: fake_server.FakeServer, name: str) -> None:
    server.answers["/v1/completions"] = JSONResponse({"choices": [{"prompt_logprobs": ROWS}]})
    assert logprobs_of(scored(server, name)) == [-1.5, -2.5]
    assert logprobs_of(scored(server, name, start=2)) == [-2.5]


def test_alternatives_are_sorted_and_limited_to_the_requested_number(server: fake_server.FakeServer) -> None:
    server.answers["/v1/completions"] = JSONResponse({"choices": [{"prompt_logprobs": ROWS}]})
    scores = scored(server, "vllm", top=2)
    assert scores is not None
    assert scores.top.tolist() == [[-0.5, -1.5], [-0.25, -2.0]]


def test_other_route_is_used_if_completions_give_no_scores(server: fake_server.FakeServer) -> None:
    server.answers["/v1/completions"] = JSONResponse({"choices": [{"prompt_logprobs": None}]})
    assert scored(server, "vllm") is None
    server.answers["/inference/v1/generate"] = JSONResponse({"choices": [], "prompt_logprobs": ROWS})
    assert logprobs_of(scored(server, "vllm")) == [-1.5, -2.5]
    assert scored(server, "openai:vllm") is None


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([[None, 3, None], [-1.5, 4, None], [-2.5, 5, None]], [-1.5, -2.5]),
        ([[None, 3, None], [-1.5, 7, None], [-2.5, 5, None]], None),
        ([[-1.5, 4, None], [-2.5, 5, None]], None),
        ([], None),
    ],
)
def test_sglang_scores_the_sent_ids(
    server: fake_server.FakeServer, entries: list[Any], expected: list[float] | None
) -> None:
    server.answers["/generate"] = JSONResponse({"meta_info": {"input_token_logprobs": entries}})
    assert logprobs_of(scored(server, "sglang")) == expected


def test_sglang_request_starts_one_position_earlier(server: fake_server.FakeServer) -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> JSONResponse:
        asked.append(body)
        entries = [[None, 4, None], [-2.5, 5, None]]
        best = [None, [[-0.5, 9, None], [-2.5, 5, None]]]
        return JSONResponse({"meta_info": {"input_token_logprobs": entries, "input_top_logprobs": best}})

    server.answers["/generate"] = answer
    scores = scored(server, "sglang", start=2, top=2)
    assert scores is not None
    assert (logprobs_of(scores), scores.top.tolist()) == ([-2.5], [[-0.5, -2.5]])
    assert (asked[0]["logprob_start_len"], asked[0]["top_logprobs_num"]) == (1, 2)


def test_logits_are_refused_as_scores(server: fake_server.FakeServer) -> None:
    rows = [None, {"4": {"logprob": 11.5}}, {"5": {"logprob": 7.5}}]
    server.answers["/v1/completions"] = JSONResponse({"choices": [{"prompt_logprobs": rows}]})
    with pytest.raises(EngineContractError, match="logits"):
        scored(server, "vllm")


@pytest.mark.parametrize("name", ["vllm", "sglang", "llamacpp", "openai:tensorrt_llm"])
def test_server_without_scores_gives_none(server: fake_server.FakeServer, name: str) -> None:
    assert scored(server, name) is None


@pytest.mark.parametrize(("name", "path"), [("vllm", "/inference/v1/generate"), ("sglang", "/generate")])
def test_refusal_of_ids_by_the_server_is_an_error(server: fake_server.FakeServer, name: str, path: str) -> None:
    server.answers |= dict.fromkeys([path, "/v1/completions"], JSONResponse({"error": {"code": 400}}, 400))
    with pytest.raises(InvalidRequest, match=f"400 at {path}"):
        scored(server, name)


def test_engine_that_can_not_score_fails_permanently(server: fake_server.FakeServer) -> None:
    info = EngineInfo("llamacpp", "1", "policy", 10, 100, "raw_logprobs", frozenset())

    async def run() -> None:
        engine = LlamaCppEngine(HttpClient(server.url), info, slots=1, plain_id=0)
        try:
            await engine.score(IDS, 1)
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="can't score ids") as raised:
        asyncio.run(run())
    assert not raised.value.retry


@pytest.mark.parametrize(
    ("ids", "start", "room", "why"),
    [
        ([3, 4], 0, 0, "start"),
        ([3, 4], 2, 0, "start"),
        ([3, 10], 1, 0, "0 to 9"),
        ([3, 4, 5, 6], 1, 1, "at most 3"),
    ],
)
def test_ids_that_can_not_be_scored_are_refused(ids: list[int], start: int, room: int, why: str) -> None:
    info = EngineInfo("vllm", "1", "policy", 10, 4, "raw_logprobs", frozenset())
    with pytest.raises(InvalidRequest, match=why):
        refuse_unscorable(np.array(ids, np.int32), start, info, room=room)


@pytest.fixture(scope="module")
def model(untrained_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(untrained_dir, dtype=torch.float32).eval()


def expected(model: Any, ids: np.ndarray) -> torch.Tensor:
    """Return next-token log-probabilities, float64 [tokens - 1, vocabulary], without cache and chunks."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
    return logits.double().log_softmax(-1)


@pytest.fixture(scope="module")
def ids(model: Any) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.config.vocab_size - 30, 90).astype(np.int32)


@pytest.mark.parametrize("start", [1, 40, 89])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_chunked_forward_pass_equals_the_whole_one(model: Any, ids: np.ndarray, start: int, chunk: int) -> None:
    scores = ForwardPass(model, chunk=chunk).score(ids, start, top=5)
    rows = expected(model, ids)[start - 1 :]
    own = rows.gather(1, torch.from_numpy(ids[start:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(scores.logprobs, own, atol=1e-5)
    np.testing.assert_allclose(scores.top, rows.topk(5).values, atol=1e-5)


def test_common_prefixes_are_computed_once(model: Any, ids: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    forward = model.forward

    @functools.wraps(forward)
    def counted(input_ids: torch.Tensor, **more: Any) -> Any:
        computed.append(input_ids.shape[1])
        return forward(input_ids, **more)

    monkeypatch.setattr(model, "forward", counted)
    scorer = ForwardPass(model)
    other = np.concatenate([ids[:60], ids[:20]])
    for row_ids, start in ((ids, 50), (other, 61), (ids[:30], 10), (other, 61)):
        scores = scorer.score(row_ids, start)
        rows = expected(model, row_ids)[start - 1 :]
        computed.pop()
        own = rows.gather(1, torch.from_numpy(row_ids[start:].astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(scores.logprobs, own, atol=1e-5)
    # 90 - 1; from the common 60 on; from start - 1 on; from the 29 that the previous call left.
    assert computed == [89, 19, 20, 50]


def test_failed_forward_pass_leaves_no_state(model: Any, ids: np.ndarray) -> None:
    scorer = ForwardPass(model, chunk=30)
    good = scorer.score(ids, 1).logprobs
    with pytest.raises((IndexError, RuntimeError)):
        scorer.score(np.concatenate([ids[:40], [10**6, 3]]).astype(np.int32), 1)
    np.testing.assert_allclose(scorer.score(ids, 1).logprobs, good, atol=1e-5)


def test_embedded_engine_scores_while_it_samples(untrained_dir: Path, model: Any, ids: np.ndarray) -> None:
    async def run() -> tuple[Scores, Scores]:
        engine = TransformersEngine.open(untrained_dir, max_context=128)
        try:
            before = await engine.score(ids, 1, top=3)
            halved = [(name, tensor * 0.5) for name, tensor in model.state_dict().items()]
            await engine.push_weights(halved, "1")
            after = await engine.score(ids, 1)
            with pytest.raises(InvalidRequest, match="at most 128"):
                await engine.score(np.resize(ids, 129), 1)
        finally:
            await engine.close()
        with pytest.raises(EngineUnavailable):
            await engine.score(ids, 1)
        return before, after

    before, after = asyncio.run(run())
    own = expected(model, ids).gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(before.logprobs, own, atol=1e-5)
    assert before.top.shape == (89, 3)
    assert np.abs(after.logprobs - before.logprobs).max() > 0.1
