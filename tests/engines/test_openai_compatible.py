"""The engine for servers with an OpenAI-style completions API: one table row per kind of server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response
from tests.engines import fake_server
from tests.engines.fake_server import Answer, Body, FakeServer, sampled_before_the_error
from tests.engines.fake_vllm import (
    LOGPROBS,
    MAX_CONTEXT,
    PARAMS,
    PROMPT,
    SAMPLED,
    VOCAB_SIZE,
    joined,
    sse,
    streaming,
    whole,
)
from tests.engines.fake_vllm import sampled_events as vllm_events
from tests.engines.vllm_schemas import each_schema, schema
from tests.searching import examples

from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._openai_compatible import APIS, OpenAiEngine
from tokentape.errors import (
    EngineContractError,
    EngineError,
    InvalidRequest,
    UnsupportedParameter,
)

_COMMON = {
    *("model", "prompt", "echo", "n", "stream", "stream_options", "logprobs", "max_tokens", "temperature", "top_p"),
    *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "stop"),
    *("min_tokens", "ignore_eos", "skip_special_tokens", "seed"),
}
# Used fields of each server's CompletionRequest, copied from its source.
FIELDS = {
    "vllm": _COMMON
    | {
        *("add_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "return_token_ids"),
        "return_tokens_as_token_ids",
    },
    "sglang": _COMMON | {"no_stop_trim", "return_token_ids"},
}
ROWS = pytest.mark.parametrize("kind", [row.owned_by for row in APIS])

Events = list[dict[str, Any]]


def events(kind: str, body: Body) -> Events:
    """Return a stream's events in the format of a kind of server."""
    sent = vllm_events({"logprobs": 0, "return_token_ids": True, "stop_token_ids": [], **body})
    for event in sent:
        for choice in event["choices"] if kind != "vllm" else ():
            choice["logprobs"]["tokens"] = ["x"]
            choice["matched_stop"] = choice.pop("stop_reason")
    return sent


def answering(kind: str, change: Callable[[Events], object] = lambda sent: None) -> Callable[[Body], Response]:
    def answer(body: Body) -> Response:
        assert set(body) <= FIELDS[kind]
        sent = events(kind, body)
        change(sent)
        return streaming(sse(sent)) if body["stream"] else JSONResponse(whole(sent))

    return answer


def answers(kind: str) -> dict[str, Answer]:
    card = {"id": "tiny", "owned_by": kind, "max_model_len": MAX_CONTEXT}
    return {"/v1/models": JSONResponse({"data": [card]}), "/v1/completions": answering(kind)}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server.running() as fake:
        yield fake


def sample(
    server: FakeServer,
    kind: str,
    params: SamplingParams = PARAMS,
    *,
    stream: bool = True,
    change: Callable[[Events], object] | None = None,
    answer: Callable[[Body], Response] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> list[SampleDelta]:
    async def main() -> list[SampleDelta]:
        engine = await OpenAiEngine.open(server.url + "/v1", vocab_size=vocab_size)
        server.asked.clear()
        if change is not None:
            server.answers["/v1/completions"] = answering(kind, change)
        if answer is not None:
            server.answers["/v1/completions"] = answer
        try:
            return [d async for d in engine.sample(PROMPT, params, stream=stream, request_id="call-1")]
        finally:
            await engine.close()

    return asyncio.run(main())


@ROWS
@pytest.mark.parametrize("stream", [True, False])
def test_ids_and_logprobs_are_read_unchanged(server: FakeServer, kind: str, stream: bool) -> None:
    server.reset(answers(kind))
    deltas = sample(server, kind, stream=stream)
    assert joined(deltas) == (tuple(SAMPLED), tuple(LOGPROBS))
    assert deltas[-1].finish_reason == "length"
    # Tokens that arrive together are a single delta; the last waits for the usage.
    assert len(deltas) == (2 if stream else 1)
    assert server.headers["x-request-id"].startswith("call-1-")


@ROWS
def test_tokens_that_arrive_singly_are_a_delta_each(server: FakeServer, kind: str) -> None:
    server.reset(answers(kind))

    def answer(body: Body) -> Response:
        stream = sse(events(kind, body))
        return streaming(*(event + b"\n\n" for event in stream.split(b"\n\n")[:-1]), pause=0.05)

    deltas = sample(server, kind, answer=answer)
    assert [delta.token_ids for delta in deltas] == [(token_id,) for token_id in SAMPLED]


@ROWS
@settings(max_examples=examples(15))
@given(cuts=st.lists(st.integers(min_value=1, max_value=1500), max_size=12))
def test_deltas_do_not_depend_on_stream_chunking(server: FakeServer, kind: str, cuts: list[int]) -> None:
    def answer(body: Body) -> Response:
        stream = sse(events(kind, body))
        ends = sorted({cut for cut in cuts if cut < len(stream)} | {len(stream)})
        return streaming(*(stream[start:end] for start, end in zip([0, *ends], ends, strict=False)))

    server.reset(answers(kind))
    deltas = sample(server, kind, answer=answer)
    assert joined(deltas) == (tuple(SAMPLED), tuple(LOGPROBS))
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


@ROWS
def test_tokens_before_an_error_count_however_they_arrive(server: FakeServer, kind: str) -> None:
    server.reset(answers(kind))

    async def main() -> list[SampleDelta]:
        engine = await OpenAiEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answers["/v1/completions"] = answering(
            kind, lambda sent: sent.__setitem__(slice(2, None), [{"choices": [], "error": {"code": 503}}])
        )
        return await sampled_before_the_error(engine, engine.sample(PROMPT, PARAMS, stream=True, request_id="call"))

    assert asyncio.run(main()) == [SampleDelta((11, 12), (-0.5, -1.5))]


@ROWS
def test_honored_parameters_are_sent_under_the_server_s_names(server: FakeServer, kind: str) -> None:
    server.reset(answers(kind))
    sample(server, kind)
    (body,) = server.bodies("/v1/completions")
    (row,) = [row for row in APIS if row.owned_by == kind]
    assert set(row.fields.values()) <= set(body) <= FIELDS[kind]
    assert body["prompt"] == PROMPT.tolist()
    assert (body["logprobs"], body["top_k"]) == (0, -1 if kind == "sglang" else 0)


def test_a_negative_seed_is_sent_to_vllm_as_a_positive_one(server: FakeServer) -> None:
    server.reset(answers("vllm"))
    sample(server, "vllm", replace(PARAMS, seed=-1))
    assert server.bodies("/v1/completions")[-1]["seed"] == 2**63 - 1


@ROWS
def test_temperature_that_vllm_would_raise_is_refused(server: FakeServer, kind: str) -> None:
    server.reset(answers(kind))
    with pytest.raises(InvalidRequest, match="temperature"):
        sample(server, kind, replace(PARAMS, temperature=0.009))
    assert not server.asked


@pytest.mark.parametrize(("kind", "sent"), [("vllm", (1, 1.0)), ("sglang", (2, 1e-9))])
def test_top_k_of_one_is_sent_so_that_sglangs_logprobs_include_the_temperature(
    server: FakeServer, kind: str, sent: tuple[int, float]
) -> None:
    server.reset(answers(kind))
    sample(server, kind, replace(PARAMS, top_k=1, temperature=0.5))
    (body,) = server.bodies("/v1/completions")
    assert (body["top_k"], body["top_p"]) == sent


@each_schema
def test_the_fields_of_vllms_row_are_in_its_schema(schemas: str) -> None:
    assert FIELDS["vllm"] <= set(schema("CompletionRequest", schemas)["properties"])


@ROWS
def test_a_stop_id_is_kept_in_the_ids_and_named(server: FakeServer, kind: str) -> None:
    server.reset(answers(kind))
    last = sample(server, kind, replace(PARAMS, stop_token_ids=(50, 13)))[-1]
    assert (last.token_ids[-1], last.finish_reason, last.stop) == (13, "stop", 13)


@pytest.mark.parametrize(("kind", "field"), [("vllm", "stop_reason"), ("sglang", "matched_stop")])
def test_stop_string_is_reported_as_the_server_names_it(server: FakeServer, kind: str, field: str) -> None:
    server.reset(answers(kind))

    def stop(sent: Events) -> None:
        sent[-2]["choices"][0] |= {"finish_reason": "stop", field: "b"}

    last = sample(server, kind, replace(PARAMS, stop_strings=("a", "b")), change=stop)[-1]
    assert (last.finish_reason, last.stop) == ("stop", "b")


def test_alternatives_are_reported_if_they_have_ids(server: FakeServer) -> None:
    server.reset(answers("vllm"))
    deltas = sample(server, "vllm", replace(PARAMS, top_logprobs=2))
    assert [row for delta in deltas for row in delta.top_logprobs] == [
        ((11, -0.5), (1, -1.25)),
        ((1, -1.25), (12, -1.5)),
        ((1, -1.25), (13, -2.5)),
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sglang", "seed"), ("sglang", "top_logprobs"), ("vllm", "priority")],
)
def test_parameters_that_the_server_ignores_are_refused(server: FakeServer, kind: str, name: str) -> None:
    server.reset(answers(kind))
    with pytest.raises(UnsupportedParameter, match=name):
        sample(server, kind, replace(PARAMS, **{name: 1}))
    assert not server.bodies("/v1/completions")


def test_another_kind_of_server_is_refused(server: FakeServer) -> None:
    server.reset(answers("sglang") | {"/v1/models": JSONResponse({"data": [{"id": "tiny", "owned_by": "mine"}]})})
    with pytest.raises(InvalidRequest, match="owned_by mine; expected one of vllm, sglang"):
        sample(server, "sglang")


def _drop_ids(sent: Events) -> None:
    for event in sent:
        for choice in event["choices"]:
            choice["token_ids"] = None


def _set(name: str, value: object) -> Callable[[Events], None]:
    def change(sent: Events) -> None:
        sent[-2]["choices"][0][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_drop_ids, "no token_ids"),
        (_set("token_ids", [200]), "sampled id 200"),
        (_set("token_ids", [13, 14]), "1 log-probabilities for 2 ids"),
        (_set("token_ids", ["13"]), "reply is not in"),
        (_set("finish_reason", "tired"), "tired"),
        (lambda sent: sent[-1]["usage"].update(completion_tokens=4), "counts 3 prompt and 4"),
        (lambda sent: sent[-1].update(usage=None), "no usage"),
        (lambda sent: sent[-2]["choices"].append(sent[-2]["choices"][0]), "more than the one"),
    ],
)
def test_inconsistent_reply_is_refused(server: FakeServer, change: Callable[[Events], object], says: str) -> None:
    server.reset(answers("sglang"))
    with pytest.raises(EngineContractError, match=says):
        sample(server, "sglang", change=change)


def test_unrequested_stop_is_refused(server: FakeServer) -> None:
    server.reset(answers("vllm"))
    with pytest.raises(EngineContractError, match="without a requested stop"):
        sample(server, "vllm", change=_set("finish_reason", "stop"))


def test_ids_that_differ_from_the_names_of_the_logprobs_are_refused(server: FakeServer) -> None:
    server.reset(answers("vllm"))
    with pytest.raises(EngineContractError, match="are not the same"):
        sample(server, "vllm", change=_set("token_ids", [14]))


def test_a_stream_that_ends_early_is_an_error(server: FakeServer) -> None:
    server.reset(answers("vllm"))
    with pytest.raises(EngineError):
        sample(server, "vllm", change=lambda sent: sent.__delitem__(slice(1, 3)))


def test_server_with_unknown_context_length_is_refused(server: FakeServer) -> None:
    server.reset(answers("vllm") | {"/v1/models": JSONResponse({"data": [{"id": "tiny", "owned_by": "vllm"}]})})
    with pytest.raises(EngineContractError, match="max_model_len"):
        sample(server, "vllm")


def test_server_without_ids_is_detected_when_opening(server: FakeServer) -> None:
    server.reset(answers("sglang") | {"/v1/completions": answering("sglang", _drop_ids)})
    with pytest.raises(EngineContractError, match="no token_ids"):
        sample(server, "sglang")


def test_id_outside_the_vocabulary_is_never_sent(server: FakeServer) -> None:
    server.reset(answers("vllm"))

    async def main() -> None:
        engine = await OpenAiEngine.open(server.url, vocab_size=4)
        server.asked.clear()
        try:
            async for _ in engine.sample(np.array([4], np.int32), PARAMS, stream=True, request_id="a"):
                pass
        finally:
            await engine.close()

    with pytest.raises(InvalidRequest, match="not in this model's vocabulary"):
        asyncio.run(main())
    assert not server.asked
