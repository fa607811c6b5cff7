"""vLLM's `/inference/v1/generate`: when it is used, request bodies, spans, payloads and wrong replies."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response
from tests.engines import fake_vllm
from tests.engines.fake_vllm import (
    LOGPROBS,
    PARAMS,
    PROMPT,
    SAMPLED,
    VOCAB_SIZE,
    FakeVllm,
    by_route,
    open_and_sample,
    plain_answer,
    sampled_events,
    sse,
    streaming,
    token_by_token,
    whole,
)
from tests.engines.vllm_schemas import each_schema, schema
from tests.json_schemas import validate
from tests.waiting import PATIENCE

from tokentape._supports import kept_ids
from tokentape.engines._base import (
    DISTRIBUTION,
    EngineInfo,
    Payload,
    PromptMedia,
    SampleDelta,
    SamplingParams,
    WeightSpan,
)
from tokentape.engines._pool import EnginePool
from tokentape.engines._remote import unique_id
from tokentape.engines._vllm import VllmEngine
from tokentape.errors import EngineContractError, EngineError, InvalidRequest, UnsupportedParameter

EVERYTHING = SamplingParams(
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
)
EXPERTS = np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2)
"""Routed experts of 3 prompt tokens and 3 sampled ones: the last token was never an input."""

Tamper = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def running() -> Iterator[FakeVllm]:
    with fake_vllm.running() as fake:
        yield fake


@pytest.fixture
def server(running: FakeVllm) -> FakeVllm:
    running.reset()
    running.scale_out = True
    return running


def npy(array: np.ndarray) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


def tampered(tamper: Tamper) -> Callable[[dict[str, Any]], Response]:
    """Return the plain reply after `tamper` has changed it, streamed or not."""

    def answer(body: dict[str, Any]) -> Response:
        events = sampled_events(body)
        if body["stream"]:
            tamper(events)
            return streaming(sse(events))
        reply = [whole(events)]
        tamper(reply)
        return JSONResponse(reply[0])

    return answer


def first(events: list[dict[str, Any]]) -> dict[str, Any]:
    choice: dict[str, Any] = events[0]["choices"][0]
    return choice


def finishing(events: list[dict[str, Any]]) -> dict[str, Any]:
    return next(e["choices"][0] for e in events if e["choices"] and e["choices"][0]["finish_reason"])


def entry(events: list[dict[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = first(events)["logprobs"]["content"][0]
    return entry


def with_experts(rows_of: Callable[[int], np.ndarray]) -> Callable[[dict[str, Any]], Response]:
    """Reply with rows from the requested offset, as a server with --enable-return-routed-experts."""

    def answer(body: dict[str, Any]) -> Response:
        start = body["sampling_params"]["routed_experts_prompt_start"]
        return tampered(lambda events: finishing(events).update(routed_experts=npy(rows_of(start))))(body)

    return answer


def opened(server: FakeVllm, kind: type[VllmEngine] = VllmEngine) -> EngineInfo:
    async def main() -> EngineInfo:
        engine = await kind.open(server.url, vocab_size=VOCAB_SIZE)
        await engine.close()
        return engine.info

    return asyncio.run(main())


@pytest.mark.sampled(6)
@each_schema
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("verify_prompt", [True, False])
@pytest.mark.parametrize("params", [PARAMS, EVERYTHING], ids=["plain", "everything"])
def test_bodies_match_vllm_s_schema_without_extra_fields(
    server: FakeVllm, params: SamplingParams, stream: bool, verify_prompt: bool, schemas: str
) -> None:
    request = schema("GenerateRequest", schemas)
    open_and_sample(server, params, stream=stream, verify_prompt=verify_prompt)
    (body,) = server.bodies
    validate(body, request)
    # The schema allows unknown fields, as the server does: it would ignore a misspelled field.
    assert set(body) <= set(request["properties"])
    assert set(body.get("stream_options", {})) <= set(request["$defs"]["StreamOptions"]["properties"])
    # In the schema, sampling parameters are any object; completions have the same parameters.
    known = set(schema("CompletionRequest", schemas)["properties"])
    assert set(body["sampling_params"]) <= known


@each_schema
def test_fake_generate_replies_match_the_schemas(schemas: str) -> None:
    body = {
        "request_id": "r",
        "token_ids": [3, 4, 5],
        "return_token_ids": True,
        "sampling_params": {"max_tokens": 3, "logprobs": 2, "stop_token_ids": []},
    }
    events = sampled_events(body)
    for event in events:
        validate(event, schema("GenerateTokensStreamResponse", schemas))
    validate(whole(events), schema("GenerateTokensResponse", schemas))


def test_every_sampling_parameter_is_sent_including_defaults(server: FakeVllm) -> None:
    open_and_sample(server)
    (body,) = server.bodies
    renamed = {"stop_strings": "stop", "top_logprobs": "logprobs"}
    for name in DISTRIBUTION:
        sent = body["sampling_params"][renamed.get(name, name)]
        assert sent == json.loads(json.dumps(getattr(PARAMS, name))), name
    assert body["sampling_params"]["ignore_eos"] is True
    assert body["token_ids"] == PROMPT.tolist()


def test_salt_session_and_request_id_reach_the_server(server: FakeVllm) -> None:
    open_and_sample(server, EVERYTHING)
    (body,) = server.bodies
    assert body["cache_salt"] == "salt"
    assert server.headers[-1]["x-session-id"] == server.headers[-1]["x-dynamo-session-id"] == "session"
    assert body["request_id"].startswith("call-1-")
    assert server.headers[-1]["x-request-id"] == body["request_id"]


@pytest.mark.parametrize("verify_prompt", [True, False])
def test_stream_yields_each_token_on_arrival_and_the_finish_with_the_last(
    server: FakeVllm, verify_prompt: bool
) -> None:
    assert open_and_sample(server, answer=token_by_token, verify_prompt=verify_prompt) == [
        SampleDelta((11,), (-0.5,)),
        SampleDelta((12,), (-1.5,)),
        SampleDelta((13,), (-2.5,), "length"),
    ]


def test_reply_without_streaming_gives_a_single_delta_with_alternatives(server: FakeVllm) -> None:
    tops = (((11, -0.5), (1, -1.25)), ((1, -1.25), (12, -1.5)), ((1, -1.25), (13, -2.5)))
    deltas = open_and_sample(server, replace(PARAMS, top_logprobs=2), stream=False)
    assert deltas == [SampleDelta(tuple(SAMPLED), tuple(LOGPROBS), "length", top_logprobs=tops)]


def test_sampled_id_listed_first_does_not_replace_an_alternative(server: FakeVllm) -> None:
    """The server limits the list to the requested number, with the sampled id first, likely or not."""
    last = open_and_sample(server, replace(PARAMS, top_logprobs=1))[-1]
    assert last.token_ids == (13,)
    assert last.top_logprobs == (((1, -1.25),),)


@pytest.mark.parametrize("stream", [True, False])
def test_spans_of_named_weights_are_passed_on(server: FakeVllm, stream: bool) -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "step-1", "start": 1, "end": 3}]
    answer = tampered(lambda events: finishing(events).update(weight_versions=spans))
    last = open_and_sample(server, stream=stream, answer=answer)[-1]
    assert last.weight_spans == (WeightSpan("default", 0, 1), WeightSpan("step-1", 1, 3))


def test_default_weight_names_are_not_reported(server: FakeVllm) -> None:
    assert open_and_sample(server)[-1].weight_spans == ()


def test_rows_of_the_prompt_are_requested_only_if_needed(server: FakeVllm) -> None:
    server.answer = with_experts(lambda start: EXPERTS[start:])
    assert open_and_sample(server)[-1].payloads == ()
    assert server.bodies[-1]["sampling_params"]["routed_experts_prompt_start"] == len(PROMPT)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("start", [0, 2, 3])
def test_routed_experts_start_at_the_requested_offset(server: FakeVllm, start: int, stream: bool) -> None:
    probed = np.zeros((1, 2, 2), np.uint8)
    server.answer = with_experts(lambda _: probed)
    (payload,) = open_and_sample(
        server,
        replace(PARAMS, payloads_from=start),
        stream=stream,
        answer=with_experts(lambda asked: EXPERTS[asked:]),
    )[-1].payloads
    assert isinstance(payload, Payload)
    assert (payload.name, payload.start) == ("routed_experts", start)
    np.testing.assert_array_equal(payload.rows, EXPERTS[start:])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (npy(EXPERTS[1:]), r"expected integers, \[5, layers"),
        (npy(EXPERTS.astype(np.float32)), "expected integers"),
        (npy(EXPERTS[:, 0]), "expected integers"),
        ("not base64!", "not base64"),
        (base64.b64encode(b"no npy").decode(), "not base64"),
        (None, "no routed_experts"),
    ],
)
def test_row_counts_unlike_the_tokens_are_refused(server: FakeVllm, rows: str | None, message: str) -> None:
    server.answer = with_experts(lambda _: np.zeros((1, 2, 2), np.uint8))
    answer = tampered(lambda events: finishing(events).update(routed_experts=rows))
    with pytest.raises(EngineContractError, match=message):
        open_and_sample(server, replace(PARAMS, payloads_from=0), answer=answer)


def test_payloads_are_supported_only_if_the_first_reply_had_some(server: FakeVllm) -> None:
    assert "payloads_from" not in opened(server).sampling
    with pytest.raises(UnsupportedParameter, match="payloads_from"):
        open_and_sample(server, replace(PARAMS, payloads_from=0))
    server.answer = with_experts(lambda _: np.zeros((1, 2, 2), np.uint8))
    info = opened(server)
    assert "payloads_from" in info.sampling
    assert str(info) == "vllm 0.32.0 raw_logprobs generate routed_experts weight_versions"


def with_masks(body: dict[str, Any]) -> Response:
    """Reply as a server with --return-sampling-mask: the sampled id and two others."""

    def tamper(events: list[dict[str, Any]]) -> None:
        for choice in (choice for event in events for choice in event["choices"]):
            choice["sampling_mask"] = [[token_id, 1, 90] for token_id in choice["token_ids"] or ()]

    return tampered(tamper)(body)


@pytest.mark.parametrize("stream", [True, False])
def test_masks_are_returned_with_each_id_if_the_first_reply_had_a_mask(server: FakeVllm, stream: bool) -> None:
    asked = replace(PARAMS, top_k=3, supports=64)
    with pytest.raises(UnsupportedParameter, match="supports"):
        open_and_sample(server, asked)
    server.answer = with_masks
    deltas = open_and_sample(server, asked, stream=stream, answer=with_masks)
    supports = [kept_ids(support) for delta in deltas for support in delta.supports]
    assert [ids.tolist() for ids in supports if ids is not None] == [[1, token_id, 90] for token_id in SAMPLED]
    assert not open_and_sample(server, answer=with_masks)[-1].supports


@pytest.mark.parametrize("masks", [None, [[1], [1]]])
def test_masks_unlike_the_ids_are_refused(server: FakeVllm, masks: object) -> None:
    server.answer = with_masks
    answer = tampered(lambda events: finishing(events).update(sampling_mask=masks))
    with pytest.raises(EngineContractError, match="sampling mask"):
        open_and_sample(server, replace(PARAMS, top_k=3, supports=64), answer=answer)


WRONG: dict[str, tuple[Tamper, str]] = {
    "ids missing": (lambda e: first(e).update(token_ids=None), r"token_ids \(0\)"),
    "another id": (lambda e: first(e)["token_ids"].__setitem__(0, 42), "are not the same"),
    "no logprobs": (lambda e: first(e).update(logprobs=None), r"ids of its log-probabilities \(0\)"),
    "null logprobs": (lambda e: first(e).update(logprobs={"content": None}), r"ids of its log-probabilities \(0\)"),
    "a logprob missing": (lambda e: first(e)["logprobs"]["content"].pop(), "are not the same"),
    "minus infinity": (lambda e: entry(e).update(logprob=-9999.0), "no usable log-prob"),
    "a null logprob": (lambda e: entry(e).update(logprob=None), "no usable log-prob"),
    "logits": (lambda e: entry(e).update(logprob=3.5), "logits"),
    "a name for an id": (lambda e: entry(e).update(token_id="token_id:11"), "reply is not in"),
    "another prompt": (lambda e: e[0].update(prompt_token_ids=[3, 4, 6]), "prompt_token_ids differ"),
    "prompt missing": (lambda e: e[0].pop("prompt_token_ids"), "no prompt_token_ids"),
    "two choices": (lambda e: e[0]["choices"].append(e[0]["choices"][0]), "more than the one completion"),
    "unknown finish": (lambda e: finishing(e).update(finish_reason="repetition"), "finished with repetition"),
    "stopped at nothing": (lambda e: finishing(e).update(finish_reason="stop"), "without a requested stop"),
    "fewer tokens counted": (lambda e: e[-1]["usage"].update(completion_tokens=2), "2 completion tokens"),
    "usage missing": (lambda e: e[-1].update(usage=None), "no usage"),
    "spans with a gap": (
        lambda e: finishing(e).update(weight_versions=[{"version": "a", "start": 1, "end": 3}]),
        "do not cover the 3 tokens",
    ),
    "spans too short": (
        lambda e: finishing(e).update(weight_versions=[{"version": "a", "start": 0, "end": 2}]),
        "do not cover the 3 tokens",
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_reply_with_a_single_fault_is_refused(server: FakeVllm, name: str, stream: bool) -> None:
    tamper, message = WRONG[name]
    with pytest.raises(EngineContractError, match=message):
        open_and_sample(server, stream=stream, answer=tampered(tamper))


@pytest.mark.parametrize("stream", [True, False])
def test_abort_by_the_server_is_reported_with_the_sampled_tokens(server: FakeVllm, stream: bool) -> None:
    answer = tampered(lambda events: finishing(events).update(finish_reason="abort"))
    last = open_and_sample(server, replace(PARAMS, max_tokens=9), stream=stream, answer=answer)[-1]
    assert (last.finish_reason, last.stop) == ("abort", None)


def test_an_abort_before_the_first_token_is_a_delta_without_tokens(server: FakeVllm) -> None:
    def answer(body: dict[str, Any]) -> Response:
        choice = {"index": 0, "finish_reason": "abort", "token_ids": [], "logprobs": {"content": []}}
        event = {"choices": [choice], "prompt_token_ids": body["token_ids"]}
        return streaming(sse([event, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}]))

    assert open_and_sample(server, answer=answer) == [SampleDelta((), (), "abort")]


def test_route_is_chosen_when_the_server_is_opened(server: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tokentape.engines")
    assert opened(server).capabilities[0] == "generate"
    assert not caplog.messages
    server.scale_out = False
    assert opened(server).capabilities == ("completions",)
    assert "without --enable-scale-out, so its /v1/completions is used" in caplog.text
    with pytest.raises(EngineError, match=r"403 .*whether the server still serves this path"):
        opened(server, by_route("generate"))
    server.scale_out = True
    assert opened(server, by_route("completions")).capabilities == ("completions",)


def test_route_with_unexpected_answers_is_not_used_and_logged(
    server: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    server.routes["/inference/v1/generate"] = JSONResponse({"error": {"type": "BadRequestError"}}, 400)
    assert opened(server).capabilities == ("completions",)
    assert "/v1/completions" in caplog.text


@pytest.mark.parametrize(("knows", "refuses"), [(True, False), (False, False), (False, True)])
def test_weight_versions_are_requested_from_completions_that_support_them(
    server: FakeVllm, knows: bool, refuses: bool
) -> None:
    server.scale_out = False
    server.refused = {"return_weight_versions"} if refuses else set()

    def answer(body: dict[str, Any]) -> Response:
        events = sampled_events(body)
        if knows and body.get("return_weight_versions"):
            tokens = events[-1]["usage"]["completion_tokens"]
            finishing(events)["weight_versions"] = [{"version": "step-1", "start": 0, "end": tokens}]
        return streaming(sse(events))

    server.answer = answer
    last = open_and_sample(server)[-1]
    assert ("return_weight_versions" in server.bodies[-1]) is knows
    assert last.weight_spans == ((WeightSpan("step-1", 0, 3),) if knows else ())


def test_field_refused_by_name_is_left_out(server: FakeVllm) -> None:
    server.scale_out, server.refused = False, {"spaces_between_special_tokens", "return_weight_versions"}
    assert open_and_sample(server)[-1].finish_reason == "length"
    assert not server.refused & server.bodies[-1].keys()
    assert "stop_strings" in opened(server).sampling


def test_route_that_refuses_a_field_does_not_support_its_parameter(server: FakeVllm) -> None:
    server.refused = {"include_stop_str_in_output"}
    info = opened(server, by_route("generate"))
    assert info.capabilities[0] == "generate"
    assert "stop_strings" not in info.sampling


def test_other_route_is_used_if_a_needed_field_is_refused(server: FakeVllm) -> None:
    def answer(body: dict[str, Any]) -> Response:
        if "include_stop_str_in_output" in body.get("sampling_params", ()):
            error = {"type": "BadRequestError", "param": "include_stop_str_in_output", "code": 400}
            return JSONResponse({"error": error}, 400)
        return plain_answer(body)

    server.answer = answer
    info = opened(server)
    assert info.capabilities[0] == "completions"
    assert "stop_strings" in info.sampling


def test_refusal_of_any_other_field_is_an_error(server: FakeVllm) -> None:
    server.scale_out, server.refused = False, {"temperature"}
    with pytest.raises(InvalidRequest, match="temperature"):
        opened(server)


def test_replies_with_usage_only_in_streams_are_streamed(server: FakeVllm) -> None:
    def answer(body: dict[str, Any]) -> Response:
        events = sampled_events(body)
        return streaming(sse(events)) if body["stream"] else JSONResponse(whole(events) | {"usage": None})

    server.answer = answer
    assert open_and_sample(server, stream=False)[-1].finish_reason == "length"
    assert server.bodies[-1]["stream"]


def test_unlisted_context_length_is_requested(server: FakeVllm) -> None:
    server.routes["/v1/models"] = JSONResponse({"data": [{"id": "tiny", "max_model_len": None}]})
    server.routes["/tokenize"] = JSONResponse({"count": 1, "max_model_len": 77, "tokens": [1]})
    assert opened(server).max_context == 77


@pytest.mark.parametrize("policy", ["fcfs", "priority", None])
def test_priority_needs_a_priority_scheduler(server: FakeVllm, policy: str | None) -> None:
    if policy is not None:
        config = {"vllm_config": {"scheduler_config": {"policy": policy}}}
        server.routes["/server_info"] = JSONResponse(config)
    params = replace(PARAMS, priority=5)
    if policy == "priority":
        open_and_sample(server, params)
        assert server.bodies[-1]["priority"] == 5
    else:
        with pytest.raises(UnsupportedParameter, match="priority"):
            open_and_sample(server, params)


@pytest.mark.parametrize("has_route", [True, False])
def test_abandoning_a_call_aborts_by_the_server_s_id_if_supported(server: FakeVllm, has_route: bool) -> None:
    if not has_route:
        server.routes["/inference/v1/abort_requests"] = Response(status_code=404)

    def stalling(body: dict[str, Any]) -> Response:
        return streaming(sse(sampled_events(body)[:1]).split(b"\n\n")[0] + b"\n\n", then="stall")

    async def main() -> None:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answer = stalling
        server.aborted.clear()
        server.client_left.clear()
        async with aclosing(engine.sample(PROMPT, PARAMS, stream=True, request_id="call")) as deltas:
            await anext(deltas)
        assert await asyncio.to_thread(server.client_left.wait, PATIENCE)
        await engine.close()

    asyncio.run(main())
    assert server.aborted == ([f"generate-tokens-{server.bodies[-1]['request_id']}"] if has_route else [])


@pytest.mark.parametrize("has_route", [True, False])
def test_call_is_interrupted_by_the_server_s_id_if_supported(server: FakeVllm, has_route: bool) -> None:
    if not has_route:
        server.routes["/inference/v1/abort_requests"] = Response(status_code=404)

    async def main() -> None:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answer = lambda body: streaming(sse(sampled_events(body)[:1]).split(b"\n\n")[0] + b"\n\n", then="stall")
        async with aclosing(engine.sample(PROMPT, PARAMS, stream=True, request_id="call")) as deltas:
            await anext(deltas)
            server.aborted.clear()
            assert engine.interrupt("call") is has_route
            await asyncio.gather(*engine._background)
            own = [f"generate-tokens-{server.bodies[-1]['request_id']}"]
            assert server.aborted == (own if has_route else [])
        await engine.close()

    asyncio.run(main())


def test_a_call_that_ended_is_not_aborted(server: FakeVllm) -> None:
    server.aborted.clear()
    open_and_sample(server)
    time.sleep(0.05)
    assert server.aborted == ["generate-tokens-tokentape-probe"]


def test_payload_offset_after_the_prompt_is_refused(server: FakeVllm) -> None:
    server.answer = with_experts(lambda _: np.zeros((1, 2, 2), np.uint8))
    with pytest.raises(InvalidRequest, match="payloads_from"):
        open_and_sample(server, replace(PARAMS, payloads_from=len(PROMPT) + 1))


IMAGES = (PromptMedia(1, 3, b"one"), PromptMedia(5, 2, b"two"))
WITH_IMAGES = np.array([3, 50, 50, 50, 4, 50, 50, 5], np.int32)


def expanding(lengths: Sequence[int]) -> Callable[[dict[str, Any]], Response]:
    """Return replies of a server that repeats the placeholder (50) of each image, as vLLM's processors do."""

    def answer(body: dict[str, Any]) -> Response:
        left = iter(lengths)
        ids = [
            repeated
            for token_id in body["token_ids"]
            for repeated in [token_id] * (next(left) if token_id == 50 else 1)
        ]
        return plain_answer({**body, "token_ids": ids})

    return answer


def sampled_with_images(server: FakeVllm, lengths: Sequence[int]) -> list[SampleDelta]:
    async def main() -> list[SampleDelta]:
        pool = await EnginePool.open({"one": lambda: VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)})
        assert pool.info.media == {"image"}
        server.bodies.clear()
        server.answer = expanding(lengths)
        try:
            call = pool.sample(WITH_IMAGES, PARAMS, stream=True, request_id="r", media=IMAGES)
            return [delta async for delta in call]
        finally:
            await pool.close()

    return asyncio.run(main())


@each_schema
def test_images_are_sent_with_a_placeholder_each(server: FakeVllm, schemas: str) -> None:
    deltas = sampled_with_images(server, [3, 2])
    assert [token_id for delta in deltas for token_id in delta.token_ids] == SAMPLED
    (body,) = server.bodies
    assert body["token_ids"] == [3, 50, 4, 50, 5]
    sent = [base64.b64decode(part["url"].partition(",")[2]) for part in body["content_parts"]]
    assert sent == [b"one", b"two"]
    assert {part["type"] for part in body["content_parts"]} == {"image_url"}
    validate(body, schema("GenerateRequest", schemas))
    assert body.keys() <= schema("GenerateRequest", schemas)["properties"].keys()


@pytest.mark.parametrize("lengths", [[3, 1], [1, 1], [2, 3]])
def test_image_with_another_token_count_in_the_server_fails_the_call(server: FakeVllm, lengths: list[int]) -> None:
    with pytest.raises(EngineContractError, match="prompt"):
        sampled_with_images(server, lengths)


def test_images_need_the_generate_route(server: FakeVllm) -> None:
    server.scale_out = False

    async def main() -> None:
        engine = await VllmEngine.open(server.url, vocab_size=VOCAB_SIZE)
        assert engine.info.media == set()
        try:
            with pytest.raises(InvalidRequest, match="enable-scale-out"):
                engine.sample(WITH_IMAGES, PARAMS, stream=True, request_id="r", media=IMAGES)
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_reply_to_another_call_is_refused(server: FakeVllm, stream: bool) -> None:
    other = unique_id("call-1")
    with pytest.raises(EngineContractError, match="the id of another call"):
        open_and_sample(server, answer=lambda body: plain_answer({**body, "request_id": other}), stream=stream)
