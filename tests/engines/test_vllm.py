"""The vLLM engine: request bodies, reading replies, and refusal of wrong replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response
from tests.engines import fake_vllm
from tests.engines.fake_server import sampled_before_the_error
from tests.engines.fake_vllm import (
    LOGPROBS,
    MAX_CONTEXT,
    MODEL,
    PARAMS,
    PROMPT,
    SAMPLED,
    VOCAB_SIZE,
    FakeVllm,
    joined,
    open_and_sample,
    sse,
    streaming,
    token_by_token,
    whole,
)
from tests.engines.vllm_schemas import each_schema, schema
from tests.json_schemas import validate
from tests.searching import examples
from tests.waiting import PATIENCE

from tokentape.engines._base import DISTRIBUTION, EngineInfo, SampleDelta, SamplingParams, Timeouts
from tokentape.engines._vllm import VllmEngine
from tokentape.errors import (
    EngineContractError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    TokentapeError,
    UnsupportedParameter,
)

Tamper = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeVllm]:
    with fake_vllm.running() as fake:
        yield fake


@pytest.fixture(autouse=True)
def _forget(server: FakeVllm) -> None:
    server.reset()


@pytest.mark.sampled(6)
@each_schema
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("verify_prompt", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        SamplingParams(
            max_tokens=3,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            seed=7,
            stop_token_ids=(90, 91),
            stop_strings=("\n\n",),
            top_logprobs=2,
            min_tokens=1,
            cache_salt="salt",
            session_id="session",
            json_schema='{"type":"object"}',
        ),
    ],
)
def test_bodies_match_vllm_s_schema_without_extra_fields(
    server: FakeVllm, params: SamplingParams, stream: bool, verify_prompt: bool, schemas: str
) -> None:
    request = schema("CompletionRequest", schemas)
    open_and_sample(server, params, stream=stream, verify_prompt=verify_prompt)
    (body,) = server.bodies
    validate(body, request)
    # The schema allows unknown fields, as the server does: it would ignore a misspelled field.
    assert set(body) <= set(request["properties"])
    assert set(body.get("stream_options", {})) <= set(request["$defs"]["StreamOptions"]["properties"])


def test_every_sampling_parameter_is_sent_including_defaults(server: FakeVllm) -> None:
    open_and_sample(server)
    (body,) = server.bodies
    renamed = {"stop_strings": "stop", "top_logprobs": "logprobs"}
    for name in DISTRIBUTION:
        sent = body[renamed.get(name, name)]
        assert sent == json.loads(json.dumps(getattr(PARAMS, name))), name
    assert body["ignore_eos"] is True


@pytest.mark.parametrize(("seed", "sent"), [(-1, 2**63 - 1), (-2, 2**63 - 2), (0, 0), (2**63, 0)])
def test_no_seed_is_sent_as_minus_one_or_beyond_64_bits(server: FakeVllm, seed: int, sent: int) -> None:
    open_and_sample(server, replace(PARAMS, seed=seed))
    (body,) = server.bodies
    assert body["seed"] == sent


def test_the_prompt_is_sent_as_ids_and_the_request_id_as_a_header(server: FakeVllm) -> None:
    open_and_sample(server, api_key="sk-1")
    assert server.bodies[0]["prompt"] == [3, 4, 5]
    assert server.headers[-1]["x-request-id"].startswith("call-1-")
    assert server.headers[-1]["authorization"] == "Bearer sk-1"


@pytest.mark.parametrize("verify_prompt", [True, False])
def test_stream_yields_each_token_on_arrival_and_the_finish_with_the_last(
    server: FakeVllm, verify_prompt: bool
) -> None:
    assert open_and_sample(server, answer=token_by_token, verify_prompt=verify_prompt) == [
        SampleDelta((11,), (-0.5,)),
        SampleDelta((12,), (-1.5,)),
        SampleDelta((13,), (-2.5,), "length"),
    ]


@pytest.mark.parametrize("verify_prompt", [True, False])
def test_reply_without_streaming_gives_a_single_delta(server: FakeVllm, verify_prompt: bool) -> None:
    deltas = open_and_sample(server, stream=False, verify_prompt=verify_prompt)
    assert deltas == [SampleDelta(tuple(SAMPLED), tuple(LOGPROBS), "length")]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_id_is_kept_in_the_ids_and_named(server: FakeVllm, stream: bool) -> None:
    last = open_and_sample(server, replace(PARAMS, stop_token_ids=(50, 13)), stream=stream)[-1]
    assert (last.token_ids[-1], last.finish_reason, last.stop) == (13, "stop", 13)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_is_named(server: FakeVllm, stream: bool) -> None:
    def stopped(events: list[dict[str, Any]]) -> None:
        finishing(events).update(finish_reason="stop", stop_reason="\n\n")

    params = replace(PARAMS, stop_strings=("\n\n",))
    last = open_and_sample(server, params, stream=stream, answer=tampered(stopped))[-1]
    assert (last.finish_reason, last.stop) == ("stop", "\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_alternatives_are_the_most_likely_ones_best_first(server: FakeVllm, stream: bool) -> None:
    deltas = open_and_sample(server, replace(PARAMS, top_logprobs=2), stream=stream)
    assert sum((d.top_logprobs for d in deltas), ()) == (
        ((11, -0.5), (1, -1.25)),
        ((1, -1.25), (12, -1.5)),
        ((1, -1.25), (13, -2.5)),
    )


def test_alternatives_of_probability_zero_are_left_out(server: FakeVllm) -> None:
    def masked(events: list[dict[str, Any]]) -> None:
        finishing(events)["logprobs"]["top_logprobs"] = [{"token_id:13": -2.5, "token_id:1": -9999.0}]

    last = open_and_sample(server, replace(PARAMS, top_logprobs=2), answer=tampered(masked))[-1]
    assert last.top_logprobs == (((13, -2.5),),)


@pytest.mark.parametrize("stream", [True, False])
def test_abort_by_the_server_is_reported_with_the_sampled_tokens(server: FakeVllm, stream: bool) -> None:
    def aborted(events: list[dict[str, Any]]) -> None:
        finishing(events)["finish_reason"] = "abort"

    deltas = open_and_sample(server, replace(PARAMS, max_tokens=9), stream=stream, answer=tampered(aborted))
    assert joined(deltas) == (tuple(SAMPLED), tuple(LOGPROBS))
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("abort", None)


@pytest.mark.parametrize("named", [True, False])
def test_an_abort_before_the_first_token_is_a_delta_without_tokens(server: FakeVllm, named: bool) -> None:
    """The completions of vLLM 0.32 leave out the event with the `finish_reason`."""

    def answer(body: dict[str, Any]) -> Response:
        events = fake_vllm.sampled_events(body)
        empty = {"index": 0, "token_ids": [], "prompt_token_ids": body["prompt"], "finish_reason": "abort"}
        usage = {"prompt_tokens": 3, "completion_tokens": 0}
        ends = [{**events[0], "choices": [empty]}] if named else []
        return streaming(sse([*ends, {"choices": [], "usage": usage}]))

    assert open_and_sample(server, answer=answer) == [SampleDelta((), (), "abort")]


@settings(max_examples=examples(25))
@given(cuts=st.lists(st.integers(min_value=1, max_value=1500), max_size=12), newline=st.sampled_from(["\n", "\r\n"]))
def test_deltas_do_not_depend_on_the_chunking_of_the_stream(server: FakeVllm, cuts: list[int], newline: str) -> None:
    def answer(body: dict[str, Any]) -> Response:
        stream = sse(fake_vllm.sampled_events(body)).replace(b"\n", newline.encode())
        ends = sorted({cut for cut in cuts if cut < len(stream)} | {len(stream)})
        return streaming(*(stream[start:end] for start, end in zip([0, *ends], ends, strict=False)))

    server.reset()
    deltas = open_and_sample(server, answer=answer)
    assert joined(deltas) == ((11, 12, 13), (-0.5, -1.5, -2.5))
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_tokens_that_arrive_together_are_a_single_delta_up_to_an_error(server: FakeVllm) -> None:
    def answer(body: dict[str, Any]) -> Response:
        events = fake_vllm.sampled_events(body)[:2]
        return streaming(sse([*events, {"error": {"code": 503}}]))

    async def main() -> list[SampleDelta]:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answer = answer
        return await sampled_before_the_error(engine, engine.sample(PROMPT, PARAMS, stream=True, request_id="call"))

    assert asyncio.run(main()) == [SampleDelta((11, 12), (-0.5, -1.5))]


def first(events: list[dict[str, Any]]) -> dict[str, Any]:
    return events[0]["choices"][0]


def finishing(events: list[dict[str, Any]]) -> dict[str, Any]:
    return next(e["choices"][0] for e in events if e["choices"] and e["choices"][0]["finish_reason"])


def tampered(tamper: Tamper) -> Callable[[dict[str, Any]], Response]:
    """Return the plain reply after `tamper` has changed it, streamed or not."""

    def answer(body: dict[str, Any]) -> Response:
        events = fake_vllm.sampled_events(body)
        if body["stream"]:
            tamper(events)
            return streaming(sse(events))
        reply = [whole(events)]
        tamper(reply)
        return JSONResponse(reply[0])

    return answer


def usage(events: list[dict[str, Any]]) -> dict[str, Any]:
    return events[-1]["usage"]


def renamed_id(events: list[dict[str, Any]], token_id: int) -> None:
    first(events)["token_ids"][0] = token_id
    first(events)["logprobs"]["tokens"][0] = f"token_id:{token_id}"


WRONG: dict[str, tuple[Tamper, str]] = {
    "ids missing": (lambda e: first(e).update(token_ids=None), r"token_ids \(0\)"),
    "an id missing": (lambda e: first(e)["token_ids"].pop(), "are not the same"),
    "an id more": (lambda e: first(e)["token_ids"].append(1), "are not the same"),
    "another id": (lambda e: first(e)["token_ids"].__setitem__(0, 42), "are not the same"),
    "no logprobs": (lambda e: first(e).update(logprobs=None), r"ids of its log-probabilities \(0\)"),
    "a logprob missing": (lambda e: first(e)["logprobs"]["token_logprobs"].pop(), "log-probabilities for"),
    "a logprob more": (lambda e: first(e)["logprobs"]["token_logprobs"].append(-1.0), "log-probabilities for"),
    "a null logprob": (lambda e: first(e)["logprobs"].update(token_logprobs=[None] * 3), "no usable log-prob"),
    "minus infinity": (lambda e: first(e)["logprobs"].update(token_logprobs=[-9999.0] * 3), "no usable log-prob"),
    "logits": (lambda e: first(e)["logprobs"].update(token_logprobs=[3.5] * 3), "logits"),
    "neither ids nor logprobs": (
        lambda e: [choice.update(logprobs=None, token_ids=None) for event in e for choice in event["choices"]],
        "no token with a logprob",
    ),
    "text for ids": (lambda e: first(e)["logprobs"]["tokens"].__setitem__(0, "hello"), "a token as text"),
    "a number with text": (lambda e: first(e)["logprobs"]["tokens"].__setitem__(0, "token_id:1_1"), "a token as text"),
    "two ids in one": (
        lambda e: first(e)["logprobs"]["tokens"].__setitem__(0, "token_id:1\ntoken_id:2"),
        "a token as text",
    ),
    "a line break": (lambda e: first(e)["logprobs"]["tokens"].__setitem__(0, "token_id:1\n"), "a token as text"),
    "a negative id": (lambda e: first(e)["logprobs"]["tokens"].__setitem__(0, "token_id:-1"), "a token as text"),
    "out of vocabulary": (lambda e: renamed_id(e, VOCAB_SIZE), "sampled id 100; the vocabulary has ids 0 to 99"),
    "another prompt": (lambda e: first(e).update(prompt_token_ids=[3, 4, 6]), "prompt_token_ids differ"),
    "a longer prompt": (lambda e: first(e).update(prompt_token_ids=[1, 3, 4, 5]), "prompt_token_ids differ"),
    "prompt missing": (lambda e: first(e).update(prompt_token_ids=None), "no prompt_token_ids"),
    "another choice": (lambda e: first(e).update(index=1), "more than the one completion"),
    "two choices": (lambda e: e[0]["choices"].append(e[0]["choices"][0]), "more than the one completion"),
    "unknown finish": (lambda e: finishing(e).update(finish_reason="repetition"), "finished with repetition"),
    "unnamed finish": (lambda e: finishing(e).update(finish_reason="a b"), "an unknown reason"),
    "stopped at nothing": (lambda e: finishing(e).update(finish_reason="stop"), "without a requested stop"),
    "stopped at an id not asked for": (
        lambda e: finishing(e).update(finish_reason="stop", stop_reason=13),
        "without a requested stop",
    ),
    "stopped at a string not asked for": (
        lambda e: finishing(e).update(finish_reason="stop", stop_reason="x"),
        "without a requested stop",
    ),
    "fewer tokens counted": (lambda e: usage(e).update(completion_tokens=2), "2 completion tokens"),
    "more tokens counted": (lambda e: usage(e).update(completion_tokens=4), "4 completion tokens"),
    "another prompt counted": (lambda e: usage(e).update(prompt_tokens=4), "counts 4 prompt"),
    "usage missing": (lambda e: e[-1].update(usage=None), "no usage"),
    "an id that is no integer": (lambda e: first(e).update(token_ids=["11"]), "reply is not in"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_reply_with_a_single_fault_is_refused(server: FakeVllm, name: str, stream: bool) -> None:
    tamper, message = WRONG[name]
    with pytest.raises(EngineContractError, match=message) as caught:
        open_and_sample(server, stream=stream, answer=tampered(tamper))
    assert caught.value.retry is False


def test_more_tokens_than_requested_are_refused(server: FakeVllm) -> None:
    with pytest.raises(EngineContractError, match="sampled 4 tokens; expected at most 3"):
        open_and_sample(server, answer=tampered(lambda events: events.insert(0, events[0])))


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_id_that_is_not_the_last_id_is_refused(server: FakeVllm, stream: bool) -> None:
    def stopped(events: list[dict[str, Any]]) -> None:
        finishing(events).update(finish_reason="stop", stop_reason=99)

    with pytest.raises(EngineContractError, match="without a requested stop"):
        open_and_sample(server, replace(PARAMS, stop_token_ids=(99,)), stream=stream, answer=tampered(stopped))


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_id_before_the_last_id_is_refused(server: FakeVllm, stream: bool) -> None:
    with pytest.raises(EngineContractError, match="continued after id 12"):
        open_and_sample(server, replace(PARAMS, stop_token_ids=(12,)), stream=stream)


@pytest.mark.parametrize("stream", [True, False])
def test_without_the_prompts_echo_ids_in_text_form_are_still_refused(server: FakeVllm, stream: bool) -> None:
    with pytest.raises(EngineContractError, match="a token as text"):
        open_and_sample(server, stream=stream, verify_prompt=False, answer=tampered(WRONG["text for ids"][0]))


@pytest.mark.parametrize("value", [[], [{}], [None], [{"hello": -1.0}], [{"token_id:1": 4.0}]])
def test_alternatives_that_are_missing_or_named_by_text_are_refused(server: FakeVllm, value: list[Any]) -> None:
    with pytest.raises(EngineContractError):
        open_and_sample(
            server,
            replace(PARAMS, top_logprobs=2),
            answer=tampered(lambda events: first(events)["logprobs"].update(top_logprobs=value)),
        )


def cut_after(events: int, then: str) -> Callable[[dict[str, Any]], Response]:
    def answer(body: dict[str, Any]) -> Response:
        pieces = sse(fake_vllm.sampled_events(body)).split(b"\n\n")[:events]
        return streaming(*(piece + b"\n\n" for piece in pieces), then=then)

    return answer


@pytest.mark.parametrize("events", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("then", ["end", "break"])
def test_a_stream_that_ends_early_never_gives_a_finish(server: FakeVllm, events: int, then: str) -> None:
    with pytest.raises(EngineError) as caught:
        open_and_sample(server, answer=cut_after(events, then))
    assert caught.value.retry is True


def test_a_finish_is_held_back_until_the_reply_is_complete(server: FakeVllm) -> None:
    async def main() -> list[SampleDelta]:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE, timeouts=Timeouts(between_tokens=0.2))
        server.answer = cut_after(3, "stall")  # the finish has come, usage and [DONE] have not
        seen = []
        try:
            async for delta in engine.sample(PROMPT, PARAMS, stream=True, request_id="call"):
                seen.append(delta)
        except EngineTimeout:
            return seen
        finally:
            await engine.close()
        raise AssertionError("the call ended")

    seen = asyncio.run(main())
    assert joined(seen)[0] == (11, 12)
    assert seen[-1].finish_reason is None


def test_data_after_the_end_of_a_stream_is_refused(server: FakeVllm) -> None:
    def answer(body: dict[str, Any]) -> Response:
        stream = sse(fake_vllm.sampled_events(body))
        return streaming(stream + b"data: {}\n\n")

    with pytest.raises(EngineContractError, match="continues after its end"):
        open_and_sample(server, answer=answer)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"<html>busy</html>\n\n", "not a stream of server-sent events"),
        (b"data: {not json}\n\n", "reply is not in"),
        (b"data: [1]\n\n", "reply is not in"),
        (b"data: \xff\n\n", "not UTF-8"),
    ],
)
def test_stream_of_another_format_is_refused(server: FakeVllm, stream: bytes, message: str) -> None:
    with pytest.raises(EngineContractError, match=message):
        open_and_sample(server, answer=lambda body: streaming(stream))


def test_an_event_of_any_size_is_not_buffered(server: FakeVllm) -> None:
    def endless(body: dict[str, Any]) -> Response:
        return streaming(b"data: ", *[b"1" * (1 << 20)] * 18)

    with pytest.raises(EngineContractError, match="event that exceeds"):
        open_and_sample(server, answer=endless)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, InvalidRequest), (500, EngineError), (503, EngineUnavailable)],
)
def test_an_error_status_is_its_error(server: FakeVllm, status: int, error: type[TokentapeError], stream: bool) -> None:
    def answer(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "m", "type": "t", "code": status}}, status)

    with pytest.raises(TokentapeError) as caught:
        open_and_sample(server, stream=stream, answer=answer)
    assert type(caught.value) is error


@pytest.mark.parametrize(("code", "error"), [(400, InvalidRequest), (500, EngineError)])
def test_error_within_a_stream_has_the_type_of_its_code(
    server: FakeVllm, code: int, error: type[TokentapeError]
) -> None:
    event = {"error": {"message": "m", "type": "BadRequestError", "param": None, "code": code}}
    with pytest.raises(TokentapeError, match="BadRequestError") as caught:
        open_and_sample(server, answer=lambda body: streaming(sse([event])))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([3, VOCAB_SIZE], "prompt id 100 at position 1"),
        ([-1], "prompt id -1"),
        ([3] * MAX_CONTEXT, "context holds 64"),
    ],
)
def test_a_prompt_that_can_not_be_sampled_from_is_not_sent(server: FakeVllm, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        open_and_sample(server, prompt=np.array(prompt, np.int32))
    assert server.bodies == []


@pytest.mark.parametrize("change", [{"max_tokens": 0}, {"top_p": 0.0}, {"temperature": 0.009}])
def test_a_parameter_out_of_range_is_not_sent(server: FakeVllm, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_and_sample(server, replace(PARAMS, **change))
    assert caught.value.param in change
    assert server.bodies == []


def test_opening_identifies_the_server(server: FakeVllm) -> None:
    async def main() -> None:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        info = engine.info
        assert (info.name, info.version, info.model, info.max_context) == ("vllm", "0.32.0", MODEL, MAX_CONTEXT)
        constraints = {"json_schema", "structural_tag"}
        assert info.sampling == DISTRIBUTION | {"min_tokens", "cache_salt", "session_id"} | constraints
        assert str(info) == "vllm 0.32.0 raw_logprobs completions"
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("alternatives", "mode"),
    [
        ({"token_id:11": -0.5, "token_id:1": -1.0, "token_id:2": -3.0}, "raw_logprobs"),
        ({"token_id:11": -0.0, "token_id:1": -9999.0, "token_id:2": -9999.0}, "processed_logprobs"),
    ],
)
def test_logprobs_mode_is_determined_with_top_k_1(server: FakeVllm, alternatives: dict[str, float], mode: str) -> None:
    logprobs = {"top_logprobs": [alternatives], "token_logprobs": [alternatives["token_id:11"]]}
    server.answer = tampered(lambda e: first(e)["logprobs"].update(logprobs))

    async def main() -> str:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        await engine.close()
        return engine.info.logprobs_mode

    assert asyncio.run(main()) == mode


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_other_tokens_are_refused_if_alternatives_show_them(server: FakeVllm, stream: bool) -> None:
    def shift(events: list[dict[str, Any]]) -> None:
        reports = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
        logprobs = [logprob for report in reports for logprob in report["token_logprobs"]]
        shifted = iter([*logprobs[1:], logprobs[0]])
        for report in reports:
            report["token_logprobs"] = [next(shifted) for _ in report["token_logprobs"]]

    with pytest.raises(EngineContractError, match=r"-0\.5000 for it among the alternatives"):
        open_and_sample(server, replace(PARAMS, top_logprobs=2), stream=stream, answer=tampered(shift))


def test_a_contradiction_below_the_requested_alternatives_is_refused(server: FakeVllm) -> None:
    """VLLM reports one alternative more, so that the sampled id is among them."""

    def contradict(events: list[dict[str, Any]]) -> None:
        report = finishing(events)["logprobs"]
        report["top_logprobs"] = [{"token_id:99": -0.6, name: -1.0} for name in report["tokens"]]
        report["token_logprobs"] = [-2.0 for _ in report["tokens"]]

    with pytest.raises(EngineContractError, match=r"-2\.0000 for sampled id .*, and -1\.0000 for it"):
        open_and_sample(server, replace(PARAMS, top_logprobs=1), stream=False, answer=tampered(contradict))


@pytest.mark.parametrize("stream", [True, False])
def test_alternatives_without_the_sampled_id_are_refused(server: FakeVllm, stream: bool) -> None:
    def other(events: list[dict[str, Any]]) -> None:
        for row in finishing(events)["logprobs"]["top_logprobs"]:
            row.clear()
            row["token_id:99"] = -0.5

    with pytest.raises(EngineContractError, match="which is not among the 1 alternatives"):
        open_and_sample(server, replace(PARAMS, top_logprobs=2), stream=stream, answer=tampered(other))


def test_a_server_that_reports_logits_below_zero_is_refused(server: FakeVllm) -> None:
    alternatives = {"token_id:11": -0.2, "token_id:1": -0.4, "token_id:2": -0.6}
    server.answer = tampered(lambda e: first(e)["logprobs"].update(top_logprobs=[alternatives]))
    with pytest.raises(EngineContractError, match="logits"):
        open_and_sample(server)


@pytest.mark.parametrize(
    ("path", "response", "error"),
    [
        ("/version", JSONResponse({"detail": "Not Found"}, 404), EngineError),
        ("/version", JSONResponse({"name": "other"}), EngineContractError),
        ("/v1/models", JSONResponse({"data": []}), EngineContractError),
        ("/v1/models", JSONResponse({"data": [{"id": "m"}]}), EngineContractError),
    ],
)
def test_a_server_that_is_not_vllm_is_refused(
    server: FakeVllm, path: str, response: Response, error: type[EngineError]
) -> None:
    server.routes[path] = response
    with pytest.raises(EngineError) as caught:
        open_and_sample(server)
    assert type(caught.value) is error


def test_unknown_model_is_refused_with_the_served_names(server: FakeVllm) -> None:
    with pytest.raises(InvalidRequest, match=MODEL) as caught:
        open_and_sample(server, model="other")
    assert caught.value.param == "model"


def test_a_model_is_chosen_by_name(server: FakeVllm) -> None:
    cards = [{"id": "base", "max_model_len": 64}, {"id": "adapter", "max_model_len": 64}]
    server.routes["/v1/models"] = JSONResponse({"data": cards})
    open_and_sample(server, model="adapter")
    assert server.bodies[0]["model"] == "adapter"
    open_and_sample(server)
    assert server.bodies[-1]["model"] == "base"


@pytest.mark.parametrize("status", [200, 500, 503])
def test_check_reports_whether_the_server_is_healthy(server: FakeVllm, status: int) -> None:
    async def main() -> None:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.routes["/health"] = Response(status_code=status)
        try:
            await engine.check()
        finally:
            await engine.close()
        with pytest.raises(EngineUnavailable, match="closed"):
            await engine.check()

    if status == 200:
        asyncio.run(main())
    else:
        with pytest.raises(EngineUnavailable):
            asyncio.run(main())


@pytest.mark.parametrize("leave", ["aclose", "cancel"])
def test_abandoning_a_call_closes_the_connection(server: FakeVllm, leave: str) -> None:
    async def main() -> None:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answer = cut_after(1, "stall")
        server.client_left.clear()
        started = asyncio.Event()

        async def consume() -> None:
            async with aclosing(engine.sample(PROMPT, PARAMS, stream=True, request_id="call")) as deltas:
                async for _ in deltas:
                    started.set()
                    if leave == "aclose":
                        return

        task = asyncio.create_task(consume())
        await started.wait()
        if leave == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await asyncio.to_thread(server.client_left.wait, PATIENCE)
        await engine.close()

    asyncio.run(main())


def test_request_id_invalid_in_headers_is_refused(server: FakeVllm) -> None:
    async def main() -> None:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        try:
            await anext(engine.sample(PROMPT, PARAMS, stream=True, request_id="a\nb"))
        finally:
            await engine.close()

    with pytest.raises(InvalidRequest, match="request_id"):
        asyncio.run(main())


def test_a_schema_is_sent_as_structured_outputs(server: FakeVllm) -> None:
    open_and_sample(server, replace(PARAMS, json_schema='{"type":"object"}'))
    assert server.bodies[0]["structured_outputs"] == {"json": {"type": "object"}}


def test_a_structural_tag_is_sent_as_text(server: FakeVllm) -> None:
    open_and_sample(server, replace(PARAMS, structural_tag='{"type":"structural_tag"}'))
    assert server.bodies[0]["structured_outputs"] == {"structural_tag": '{"type":"structural_tag"}'}


@pytest.mark.parametrize("scale_out", [False, True])
def test_an_adapter_is_the_model_of_the_call(server: FakeVllm, scale_out: bool) -> None:
    card = {"id": MODEL, "max_model_len": MAX_CONTEXT}
    server.scale_out = scale_out
    with pytest.raises(UnsupportedParameter, match="adapter"):
        open_and_sample(server, replace(PARAMS, adapter="a"))
    server.routes["/v1/models"] = JSONResponse({"data": [card, {"id": "a", "parent": MODEL}]})
    for adapter in ("a", None):
        server.bodies.clear()
        open_and_sample(server, replace(PARAMS, adapter=adapter))
        assert server.bodies[-1]["model"] == (adapter or MODEL)


@pytest.mark.parametrize("name", [MODEL, "other-name"])
def test_a_name_of_the_model_is_no_adapter(server: FakeVllm, name: str) -> None:
    cards = [{"id": MODEL, "max_model_len": MAX_CONTEXT}, {"id": "other-name"}, {"id": "a", "parent": MODEL}]
    server.routes["/v1/models"] = JSONResponse({"data": cards})
    with pytest.raises(InvalidRequest, match="is the model, not a LoRA adapter"):
        open_and_sample(server, replace(PARAMS, adapter=name))


def test_version_that_would_ignore_a_schema_is_refused(server: FakeVllm) -> None:
    server.version = "0.10.2"
    with pytest.raises(UnsupportedParameter, match="json_schema"):
        open_and_sample(server, replace(PARAMS, json_schema="{}"))


@pytest.mark.parametrize("stream", [True, False])
def test_cached_tokens_are_reported_with_the_last_delta(server: FakeVllm, stream: bool) -> None:
    cached = tampered(lambda events: usage(events).update(prompt_tokens_details={"cached_tokens": 2}))
    *_, last = open_and_sample(server, stream=stream, answer=cached)
    assert last.cached_tokens == 2


def test_facts_of_a_restarted_server_are_read_again(server: FakeVllm) -> None:
    async def main() -> EngineInfo:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.version = "0.34.0"
        server.routes["/v1/models"] = JSONResponse({"data": [{"id": MODEL, "max_model_len": 32}]})
        try:
            assert await engine.find_logprobs_mode() == "raw_logprobs"
            return engine.info
        finally:
            await engine.close()

    info = asyncio.run(main())
    assert (info.version, info.max_context) == ("0.34.0", 32)
