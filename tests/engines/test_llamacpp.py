"""The llama.cpp engine: what it sends, how pieces become a completion, and what it refuses to make of wrong replies."""

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

# Fields of the server's completion schema that there is a use for here, written down from its source. It ignores
# others without a word.
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


def test_bodies_hold_only_fields_that_the_server_knows_and_all_that_it_has_a_default_for(server: FakeServer) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop_strings=("x",))
    for given in (PARAMS, params):
        sample(server, given)
        (body,) = server.bodies("/completion")
        assert set(body) == FIELDS
        assert (body["temperature"], body["top_p"], body["top_k"]) == (given.temperature, given.top_p, given.top_k)
        assert body["stop"] == list(given.stop_strings)
        assert body["seed"] == (-1 if given.seed is None else given.seed)


def test_a_completion_is_sampled_in_pieces_that_each_continue_the_one_before(server: FakeServer) -> None:
    params = replace(PARAMS, max_tokens=len(LONG), seed=5)
    deltas = sample(server, params, answer=answering(LONG))
    assert [len(delta.token_ids) for delta in deltas] == [PIECE, PIECE, 5]
    assert joined(deltas) == (tuple(LONG), tuple(map(logprob_of, LONG)))
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    bodies = server.bodies("/completion")
    assert [body["prompt"] for body in bodies] == [[*PROMPT.tolist(), *LONG[:n]] for n in (0, PIECE, 2 * PIECE)]
    assert [body["seed"] for body in bodies] == [5, 5 + PIECE, 5 + 2 * PIECE]
    assert {body["id_slot"] for body in bodies} == {0}


def test_a_whole_reply_is_one_delta_of_the_same_tokens(server: FakeServer) -> None:
    params = replace(PARAMS, max_tokens=len(LONG), seed=5)
    (delta,) = sample(server, params, stream=False, answer=answering(LONG))
    assert delta.token_ids == tuple(LONG)
    assert delta.finish_reason == "length"


def test_a_completion_that_fills_its_last_piece_ends_with_it(server: FakeServer) -> None:
    deltas = sample(server, replace(PARAMS, max_tokens=PIECE), answer=answering(LONG))
    assert [(len(delta.token_ids), delta.finish_reason) for delta in deltas] == [(PIECE, "length")]


def test_with_stop_strings_it_is_one_piece_since_they_are_found_only_within_one(server: FakeServer) -> None:
    params = replace(PARAMS, max_tokens=len(LONG), stop_strings=("x",))
    assert len(sample(server, params, answer=answering(LONG))) == 1
    assert server.bodies("/completion")[0]["n_predict"] == len(LONG)


@pytest.mark.parametrize("at", [0, 4, PIECE - 1, PIECE, PIECE + 3])
def test_a_stop_id_ends_the_completion_and_what_was_sampled_behind_it_is_no_part_of_it(
    server: FakeServer, at: int
) -> None:
    ids = [*LONG]
    ids[at] = 99
    params = replace(PARAMS, max_tokens=len(ids), stop_token_ids=(98, 99))
    deltas = sample(server, params, answer=answering(ids))
    assert joined(deltas)[0] == tuple(ids[: at + 1])
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", 99)


def test_an_end_of_the_models_own_is_a_stop_at_its_id(server: FakeServer) -> None:
    deltas = sample(server, replace(PARAMS, max_tokens=9), answer=answering(LONG, end=LONG[4]))
    assert joined(deltas)[0] == tuple(LONG[:5])
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", LONG[4])


@pytest.mark.parametrize(("ids", "hidden"), [(LONG, [0, 3, PIECE + 1]), ([9, 9, 9, 8], [0, 2]), ([5, 6, 6], [2])])
def test_a_log_probability_that_is_missing_is_asked_for_at_its_position(
    server: FakeServer, ids: list[int], hidden: list[int]
) -> None:
    params = replace(PARAMS, max_tokens=len(ids), top_logprobs=2)
    deltas = sample(server, params, answer=answering(ids, hidden=hidden))
    assert joined(deltas) == (tuple(ids), tuple(map(logprob_of, ids)))
    assert all(len(row) == 2 for delta in deltas for row in delta.top_logprobs)
    scored = [body for body in server.bodies("/completion") if body["logit_bias"]]
    asked = {len(body["prompt"]) - len(PROMPT) for body in scored}
    # Where equal ids stand together it can't be told which of them is missing: all of them are asked for.
    assert asked >= set(hidden)
    for body in scored:
        at = len(body["prompt"]) - len(PROMPT)
        assert body["prompt"] == [*PROMPT.tolist(), *ids[:at]]
        assert (body["n_predict"], body["logit_bias"][0][0]) == (1, PLAIN)


def wherever(ids: list[int]) -> Callable[[Body], Response]:
    """A server that samples `ids` behind any prompt."""

    def answer(body: Body) -> Response:
        reply = json.loads(answering(ids)({**body, "prompt": PROMPT.tolist()}).body)
        return JSONResponse(reply | {"tokens_evaluated": len(body["prompt"])})

    return answer


def test_a_call_takes_the_slot_that_holds_most_of_its_context(server: FakeServer) -> None:
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


def test_no_more_calls_run_than_there_are_slots(server: FakeServer) -> None:
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
def test_what_the_server_means_otherwise_or_ignores_is_refused(server: FakeServer, name: str) -> None:
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
def test_a_reply_that_disagrees_with_itself_is_refused(server: FakeServer, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineContractError, match=says):
        sample(server, answer=lambda body: answering([11])(body) if body["logit_bias"] else changed(**fields)(body))


def test_an_id_that_it_can_say_nothing_of_is_refused(server: FakeServer) -> None:
    def silent(body: Body) -> Response:
        return changed(completion_probabilities=[])(body)

    with pytest.raises(EngineContractError, match="no log-probability for id 11"):
        sample(server, answer=silent)


def test_the_budget_is_cut_to_the_context(server: FakeServer) -> None:
    prompt = np.full(MAX_CONTEXT - 2, 3, np.int32)
    deltas = sample(server, replace(PARAMS, max_tokens=50), prompt=prompt, answer=wherever([11, 12, 13]))
    assert joined(deltas)[0] == (11, 12)


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1])
def test_an_id_outside_the_vocabulary_is_never_sent(server: FakeServer, bad: int) -> None:
    with pytest.raises(InvalidRequest, match="not in this model's vocabulary"):
        sample(server, prompt=np.array([1, bad], np.int32))
    assert not server.asked


def test_a_model_file_with_fewer_ids_than_the_tokenizer_is_refused(server: FakeServer) -> None:
    with pytest.raises(EngineContractError, match="104 ids, expected at least 200"):
        sample(server, vocab_size=200)


def test_a_server_that_returns_no_log_probabilities_is_found_out_when_it_is_opened(server: FakeServer) -> None:
    server.answers["/completion"] = changed(completion_probabilities=[])
    with pytest.raises(EngineContractError, match="one token"):
        sample(server)


def test_a_server_that_still_loads_its_model_is_unavailable(server: FakeServer) -> None:
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    server.answers["/props"] = JSONResponse(loading, status_code=503)
    with pytest.raises(EngineUnavailable):
        sample(server)


def test_a_schema_is_followed_within_one_reply(server: FakeServer) -> None:
    params = replace(PARAMS, max_tokens=len(LONG), json_schema='{"type":"object"}')
    (delta,) = sample(server, params, answer=answering(LONG))
    assert delta.token_ids == tuple(LONG)
    (body,) = server.bodies("/completion")
    assert body["json_schema"] == {"type": "object"}
