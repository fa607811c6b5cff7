"""The llama.cpp engine: request bodies, joining pieces to a completion, and refusal of wrong replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response
from tests.engines import fake_server
from tests.engines.fake_llamacpp import (
    MAX_CONTEXT,
    PARAMS,
    PLAIN,
    PROMPT,
    VOCAB_SIZE,
    answering,
    answers,
    logprob_of,
    sample,
)
from tests.engines.fake_server import Body, FakeServer
from tests.engines.fake_vllm import joined

from tokentape.engines._base import SamplingParams
from tokentape.engines._llamacpp import PIECE, LlamaCppEngine
from tokentape.errors import EngineContractError, EngineUnavailable, InvalidRequest, UnsupportedParameter

# Used fields of the server's completion schema, copied from its source. It silently ignores others.
FIELDS = frozenset(
    {
        *("prompt", "n_predict", "n_cmpl", "stream", "return_tokens", "n_probs", "post_sampling_probs", "id_slot"),
        *("cache_prompt", "n_cache_reuse", "samplers", "temperature", "top_k", "top_p", "min_p", "repeat_penalty"),
        *("repeat_last_n", "presence_penalty", "frequency_penalty", "dynatemp_range", "mirostat", "min_keep"),
        *("backend_sampling", "logit_bias", "ignore_eos", "seed", "stop", "n_indent", "t_max_predict_ms"),
        *("reasoning_budget_tokens", "response_fields"),
    }
)
LONG = [7 + i % 50 for i in range(2 * PIECE + 5)]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server.running() as fake:
        yield fake


@pytest.fixture(autouse=True)
def _forget(server: FakeServer) -> None:
    server.reset(answers())


def test_bodies_set_every_field_with_a_default_and_no_unknown_field(server: FakeServer) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop_strings=("x",))
    for requested in (PARAMS, params):
        sample(server, requested)
        (body,) = server.bodies("/completion")
        assert set(body) == FIELDS
        assert (body["temperature"], body["top_p"], body["top_k"]) == (
            requested.temperature,
            requested.top_p,
            requested.top_k,
        )
        assert body["stop"] == list(requested.stop_strings)
        assert body["seed"] == (-1 if requested.seed is None else requested.seed)


def test_completion_is_sampled_in_consecutive_pieces(server: FakeServer) -> None:
    params = replace(PARAMS, max_tokens=len(LONG), seed=5)
    deltas = sample(server, params, answer=answering(LONG))
    assert [len(delta.token_ids) for delta in deltas] == [PIECE, PIECE, 5]
    assert joined(deltas) == (tuple(LONG), tuple(map(logprob_of, LONG)))
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    bodies = server.bodies("/completion")
    assert [body["prompt"] for body in bodies] == [[*PROMPT.tolist(), *LONG[:n]] for n in (0, PIECE, 2 * PIECE)]
    assert [body["seed"] for body in bodies] == [5, 5 + PIECE, 5 + 2 * PIECE]
    assert {body["id_slot"] for body in bodies} == {0}


def test_reply_without_streaming_is_a_single_delta_of_the_same_tokens(server: FakeServer) -> None:
    params = replace(PARAMS, max_tokens=len(LONG), seed=5)
    (delta,) = sample(server, params, stream=False, answer=answering(LONG))
    assert delta.token_ids == tuple(LONG)
    assert delta.finish_reason == "length"


def test_a_completion_that_fills_its_last_piece_ends_with_it(server: FakeServer) -> None:
    deltas = sample(server, replace(PARAMS, max_tokens=PIECE), answer=answering(LONG))
    assert [(len(delta.token_ids), delta.finish_reason) for delta in deltas] == [(PIECE, "length")]


def test_with_stop_strings_a_completion_is_a_single_piece(server: FakeServer) -> None:
    params = replace(PARAMS, max_tokens=len(LONG), stop_strings=("x",))
    assert len(sample(server, params, answer=answering(LONG))) == 1
    assert server.bodies("/completion")[0]["n_predict"] == len(LONG)


@pytest.mark.parametrize("at", [0, 4, PIECE - 1, PIECE, PIECE + 3])
def test_stop_id_ends_the_completion_and_later_tokens_are_dropped(server: FakeServer, at: int) -> None:
    ids = [*LONG]
    ids[at] = 99
    params = replace(PARAMS, max_tokens=len(ids), stop_token_ids=(98, 99))
    deltas = sample(server, params, answer=answering(ids))
    assert joined(deltas)[0] == tuple(ids[: at + 1])
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", 99)


def test_model_eos_is_a_stop_at_its_id(server: FakeServer) -> None:
    deltas = sample(server, replace(PARAMS, max_tokens=9), answer=answering(LONG, end=LONG[4]))
    assert joined(deltas)[0] == tuple(LONG[:5])
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", LONG[4])


@pytest.mark.parametrize(("ids", "hidden"), [(LONG, [0, 3, PIECE + 1]), ([9, 9, 9, 8], [0, 2]), ([5, 6, 6], [2])])
def test_missing_log_probability_is_requested_for_its_position(
    server: FakeServer, ids: list[int], hidden: list[int]
) -> None:
    params = replace(PARAMS, max_tokens=len(ids), top_logprobs=2)
    deltas = sample(server, params, answer=answering(ids, hidden=hidden))
    assert joined(deltas) == (tuple(ids), tuple(map(logprob_of, ids)))
    assert all(len(row) == 2 for delta in deltas for row in delta.top_logprobs)
    scored = [body for body in server.bodies("/completion") if body["logit_bias"]]
    asked = {len(body["prompt"]) - len(PROMPT) for body in scored}
    # Among equal adjacent ids, the missing one is unknown: all of them are requested.
    assert asked >= set(hidden)
    for body in scored:
        at = len(body["prompt"]) - len(PROMPT)
        assert body["prompt"] == [*PROMPT.tolist(), *ids[:at]]
        assert (body["n_predict"], body["logit_bias"][0][0]) == (1, PLAIN)


def wherever(ids: list[int]) -> Callable[[Body], Response]:
    """Return answers that sample `ids` after any prompt."""

    def answer(body: Body) -> Response:
        reply = json.loads(answering(ids)({**body, "prompt": PROMPT.tolist()}).body)
        return JSONResponse(reply | {"tokens_evaluated": len(body["prompt"])})

    return answer


def test_call_uses_the_slot_with_the_longest_cached_prefix(server: FakeServer) -> None:
    server.reset(answers(slots=2))

    async def main() -> None:
        engine = await LlamaCppEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.asked.clear()
        server.answers["/completion"] = wherever([11, 12, 13])

        async def call(*prompt: int) -> None:
            async for _ in engine.sample(np.array(prompt, np.int32), PARAMS, stream=False, request_id="a"):
                pass

        await call(1, 2, 3)
        await asyncio.gather(call(1, 2, 3, 11, 12, 13, 20), call(9, 9, 9))
        await call(9, 9, 9, 11)
        await call(1, 2, 3, 11)
        await engine.close()

    asyncio.run(main())
    slot = {tuple(body["prompt"]): body["id_slot"] for body in server.bodies("/completion")}
    assert slot[1, 2, 3] == slot[1, 2, 3, 11, 12, 13, 20] == slot[1, 2, 3, 11]
    assert slot[9, 9, 9] == slot[9, 9, 9, 11] != slot[1, 2, 3]


def test_number_of_running_calls_is_limited_by_slots(server: FakeServer) -> None:
    server.reset(answers(slots=2))
    running = most = 0
    both = asyncio.Event()
    sampled = wherever([11, 12, 13])

    class Slow(JSONResponse):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 2:
                both.set()
            await both.wait()
            await asyncio.sleep(0.05)
            running -= 1
            await super().__call__(scope, receive, send)

    async def main() -> None:
        engine = await LlamaCppEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answers["/completion"] = lambda body: Slow(json.loads(sampled(body).body))

        async def call(first: int) -> None:
            async for _ in engine.sample(np.array([first], np.int32), PARAMS, stream=False, request_id="a"):
                pass

        await asyncio.gather(*map(call, range(6)))
        await engine.close()

    asyncio.run(main())
    assert most == 2


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "min_tokens"])
def test_parameters_that_the_server_changes_or_ignores_are_refused(server: FakeServer, name: str) -> None:
    with pytest.raises(UnsupportedParameter, match=name):
        sample(server, replace(PARAMS, **{name: 1}))
    assert not server.bodies("/completion")


def changed(**fields: Any) -> Callable[[Body], Response]:
    def answer(body: Body) -> Response:
        return JSONResponse(json.loads(answering([11, 12, 13])(body).body) | fields)

    return answer


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": []}, "return_tokens"),
        ({"tokens_predicted": 4}, "counts 3 prompt and 4"),
        ({"tokens_evaluated": 4}, "counts 4 prompt"),
        ({"stop_type": "none"}, "none"),
        ({"stop_type": "word", "stopping_word": "y"}, "without a requested stop"),
        ({"tokens": [11, 12, 200]}, "sampled id 200"),
        ({"tokens": [11, 12], "tokens_predicted": 2, "completion_probabilities": []}, "after 2 of 3 tokens"),
        ({"tokens": ["11"]}, "reply is not in"),
    ],
)
def test_inconsistent_reply_is_refused(server: FakeServer, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineContractError, match=says):
        sample(server, answer=lambda body: answering([11])(body) if body["logit_bias"] else changed(**fields)(body))


def test_id_without_a_log_probability_is_refused(server: FakeServer) -> None:
    def silent(body: Body) -> Response:
        return changed(completion_probabilities=[])(body)

    with pytest.raises(EngineContractError, match="no log-probability for id 11"):
        sample(server, answer=silent)


def test_max_tokens_is_limited_to_the_context(server: FakeServer) -> None:
    prompt = np.full(MAX_CONTEXT - 2, 3, np.int32)
    deltas = sample(server, replace(PARAMS, max_tokens=50), prompt=prompt, answer=wherever([11, 12, 13]))
    assert joined(deltas)[0] == (11, 12)


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1])
def test_id_outside_the_vocabulary_is_never_sent(server: FakeServer, bad: int) -> None:
    with pytest.raises(InvalidRequest, match="not in this model's vocabulary"):
        sample(server, prompt=np.array([1, bad], np.int32))
    assert not server.asked


def test_a_model_file_with_fewer_ids_than_the_tokenizer_is_refused(server: FakeServer) -> None:
    with pytest.raises(EngineContractError, match="104 ids, expected at least 200"):
        sample(server, vocab_size=200)


def test_missing_log_probabilities_are_detected_when_opening(server: FakeServer) -> None:
    server.answers["/completion"] = changed(completion_probabilities=[])
    with pytest.raises(EngineContractError, match="one token"):
        sample(server)


def test_server_that_is_loading_its_model_is_unavailable(server: FakeServer) -> None:
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    server.answers["/props"] = JSONResponse(loading, status_code=503)
    with pytest.raises(EngineUnavailable):
        sample(server)


def test_schema_is_enforced_within_a_single_piece(server: FakeServer) -> None:
    params = replace(PARAMS, max_tokens=len(LONG), json_schema='{"type":"object"}')
    (delta,) = sample(server, params, answer=answering(LONG))
    assert delta.token_ids == tuple(LONG)
    (body,) = server.bodies("/completion")
    assert body["json_schema"] == {"type": "object"}
