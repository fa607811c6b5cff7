"""The SGLang engine: request bodies, reading replies, and refusal of wrong replies."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response
from tests.engines import fake_server
from tests.engines.fake_server import FakeServer, sampled_before_the_error
from tests.engines.fake_sglang import (
    LOGPROBS,
    MAX_CONTEXT,
    OVER_MASKS,
    PARAMS,
    PROMPT,
    SAMPLED,
    VOCAB_SIZE,
    Events,
    answers,
    events,
    generate,
    sample,
    tampered,
)
from tests.engines.fake_vllm import joined, sse, streaming
from tests.searching import examples
from tests.waiting import PATIENCE

from tokentape._supports import kept_ids
from tokentape.engines._base import DISTRIBUTION, SampleDelta, SamplingParams, Timeouts, WeightSpan
from tokentape.engines._remote import unique_id
from tokentape.engines._replies import DONE
from tokentape.engines._sglang import SglangEngine
from tokentape.engines._sglang_reply import SglangReply
from tokentape.errors import (
    EngineContractError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    TokentapeError,
    UnsupportedParameter,
)

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
    priority=2,
    cache_salt="salt",
    session_id="session",
    adapter="policy",
    payloads_from=1,
    supports=2,
    json_schema='{"type":"object"}',
)
OFFERS_EVERYTHING = {
    "enable_deterministic_inference": True,
    "enable_return_routed_experts": True,
    "enable_priority_scheduling": True,
    "enable_lora": True,
    "sampling_mask_max_tokens": 50,
}

# Used fields of 0.5.23's GenerateReqInput and SamplingParams, copied from its source.
# It ignores a field of the body that it does not know and refuses one of the sampling parameters.
BODY_FIELDS = frozenset(
    {
        *("rid", "input_ids", "sampling_params", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num"),
        *("return_text_in_logprobs", "return_prompt_token_ids", "return_routed_experts", "routed_experts_start_len"),
        *(
            "priority",
            "cache_salt",
            "extra_key",
            "session_id",
            "lora_path",
            "return_sampling_mask",
        ),
    }
)
SAMPLING_FIELDS = frozenset(
    {
        *("max_new_tokens", "min_new_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
        *(
            "spaces_between_special_tokens",
            "no_stop_trim",
            "sampling_seed",
            "json_schema",
        ),
    }
)
API_TYPES = os.environ.get("TOKENTAPE_SGLANG_API_TYPES")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server.running() as fake:
        yield fake


@pytest.fixture(autouse=True)
def _forget(server: FakeServer) -> None:
    server.reset(answers())


def sent_bodies(server: FakeServer) -> list[dict[str, Any]]:
    """Return bodies for minimal and maximal requests, streamed and not, for a server with all features."""
    bodies = []
    experts = base64.b64encode(np.zeros(4 * 6, "<i4").tobytes()).decode()

    def with_experts(body: dict[str, Any]) -> Any:
        return tampered(lambda sent: sent[-1]["meta_info"].update(routed_experts=experts))(body)

    for params in (PARAMS, EVERYTHING):
        for stream in (True, False):
            server.reset(answers(**OFFERS_EVERYTHING))
            sample(server, params, stream=stream, verify_prompt=True, answer=with_experts)
            bodies += server.bodies("/generate")
    return bodies


def test_bodies_hold_only_fields_that_the_server_knows(server: FakeServer) -> None:
    bodies = sent_bodies(server)
    assert len(bodies) == 4
    for body in bodies:
        assert set(body) <= BODY_FIELDS
        assert set(body["sampling_params"]) <= SAMPLING_FIELDS
    assert set().union(*bodies) == BODY_FIELDS - {"extra_key"}
    assert set().union(*(body["sampling_params"] for body in bodies)) == SAMPLING_FIELDS


@pytest.mark.skipif(API_TYPES is None, reason="needs sglang/api/v1/api_types.py of a wheel: TOKENTAPE_SGLANG_API_TYPES")
def test_bodies_pass_the_server_s_decoder(server: FakeServer) -> None:
    assert API_TYPES is not None
    types = load(Path(API_TYPES))
    for body in sent_bodies(server):
        read = types.GenerateRequest.from_json_value(body)
        assert read.input_ids == body["input_ids"]
        assert read.sampling_params.stop_token_ids == body["sampling_params"]["stop_token_ids"]
        with pytest.raises(types.JsonContractError):
            types.GenerateRequest.from_json_value({**body, "sampling_params": {"max_tokens": 3}})
    # The lists above are of this file and of GenerateReqInput, which has a few more fields.
    assert set(types.SamplingParams.__struct_fields__) >= SAMPLING_FIELDS
    beyond = {"return_routed_experts"}
    assert set(types.GenerateRequest.__struct_fields__) >= BODY_FIELDS - beyond


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sglang_api_types", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_sampling_parameter_is_sent_including_defaults(server: FakeServer) -> None:
    server.reset(answers(enable_deterministic_inference=True))
    sample(server, replace(PARAMS, seed=5))
    (body,) = server.bodies("/generate")
    renamed = {"max_tokens": "max_new_tokens", "stop_strings": "stop", "seed": "sampling_seed"}
    for name in DISTRIBUTION - {"top_logprobs", "top_k", "seed"}:
        sent = body["sampling_params"][renamed.get(name, name)]
        assert sent == (list(value) if isinstance(value := getattr(PARAMS, name), tuple) else value), name
    assert body["sampling_params"]["top_k"] == -1
    assert body["sampling_params"]["sampling_seed"] == 5
    assert body["top_logprobs_num"] == 0


def test_deterministic_server_gets_a_new_seed_for_each_call(server: FakeServer) -> None:
    server.reset(answers(enable_deterministic_inference=True))
    seeds = set()
    for _ in range(2):
        sample(server)
        seeds.add(server.bodies("/generate")[0]["sampling_params"]["sampling_seed"])
    assert len(seeds) == 2


def test_end_of_sequence_ids_are_ignored_only_without_stop_ids(server: FakeServer) -> None:
    sample(server)
    assert server.bodies("/generate")[0]["sampling_params"]["ignore_eos"] is True
    sample(server, replace(PARAMS, stop_token_ids=(90,)))
    assert server.bodies("/generate")[0]["sampling_params"]["ignore_eos"] is False


@pytest.mark.parametrize(
    ("version", "field"), [("0.5.17", "extra_key"), ("0.5.18", "cache_salt"), ("main", "cache_salt")]
)
def test_cache_salt_has_the_name_of_the_server_version(server: FakeServer, version: str, field: str) -> None:
    server.reset(answers(version))
    sample(server, replace(PARAMS, cache_salt="s"))
    (body,) = server.bodies("/generate")
    assert {name: body.get(name) for name in ("extra_key", "cache_salt")} == {"extra_key": None, "cache_salt": None} | {
        field: "s"
    }


@pytest.mark.parametrize("params", [{"seed": 1}, {"priority": 1}, {"payloads_from": 0}])
def test_parameters_that_this_server_ignores_are_refused(server: FakeServer, params: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter, match=next(iter(params))):
        sample(server, replace(PARAMS, **params))
    assert not server.bodies("/generate")


def test_old_routes_are_used_if_the_new_ones_are_missing(server: FakeServer) -> None:
    for name in ("server_info", "model_info"):
        server.answers[f"/get_{name}"] = server.answers.pop(f"/{name}")
    assert joined(sample(server)) == (tuple(SAMPLED), tuple(LOGPROBS))


@pytest.mark.parametrize("incremental", [False, True])
def test_both_kinds_of_streams_yield_each_token_once(server: FakeServer, incremental: bool) -> None:
    def answer(body: dict[str, Any]) -> Response:
        stream = sse(events(body, incremental=incremental))
        return streaming(*(event + b"\n\n" for event in stream.split(b"\n\n")[:-1]), pause=0.05)

    spans = (WeightSpan("v1", 0, 3),)
    last = SampleDelta((13,), (-2.5,), "length", weight_version="v1", weight_spans=spans, cached_tokens=0)
    assert sample(server, answer=answer) == [
        SampleDelta((11,), (-0.5,), weight_version="v1"),
        SampleDelta((11,), (-1.5,), weight_version="v1"),
        last,
    ]
    together = tampered(lambda sent: None, incremental=incremental)
    assert sample(server, answer=together) == [SampleDelta((11, 11), (-0.5, -1.5), weight_version="v1"), last]


@settings(max_examples=examples(25))
@given(cuts=st.lists(st.integers(min_value=1, max_value=1500), max_size=12), incremental=st.booleans())
def test_deltas_do_not_depend_on_stream_chunking(server: FakeServer, cuts: list[int], incremental: bool) -> None:
    def answer(body: dict[str, Any]) -> Response:
        stream = sse(events(body, incremental=incremental))
        ends = sorted({cut for cut in cuts if cut < len(stream)} | {len(stream)})
        return streaming(*(stream[start:end] for start, end in zip([0, *ends], ends, strict=False)))

    server.reset(answers())
    deltas = sample(server, answer=answer)
    assert joined(deltas) == (tuple(SAMPLED), tuple(LOGPROBS))
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_tokens_of_different_weights_are_separate_deltas(server: FakeServer) -> None:
    change = _set(1, "meta_info.weight_version", "v2")
    deltas = sample(server, answer=tampered(change))
    assert [(delta.token_ids, delta.weight_version) for delta in deltas[:2]] == [((11,), "v1"), ((11,), "v2")]


def test_default_version_of_a_server_is_no_name(server: FakeServer) -> None:
    spans = [{"version": "default", "start": 0, "end": 3}]

    def unnamed(sent: list[Any]) -> None:
        for event in sent:
            event["meta_info"]["weight_version"] = "default"
        sent[-1]["meta_info"]["weight_versions"] = spans

    deltas = sample(server, answer=tampered(unnamed))
    assert [(delta.weight_version, delta.weight_spans) for delta in deltas] == [(None, ())] * len(deltas)


def test_adapter_is_named_with_its_version_instead_of_the_server_s(server: FakeServer) -> None:
    with pytest.raises(UnsupportedParameter, match="adapter"):
        sample(server, replace(PARAMS, adapter="policy"))
    for adapter in ("policy", None):
        server.reset(answers(enable_lora=True))
        deltas = sample(server, replace(PARAMS, adapter=adapter))
        assert server.bodies("/generate")[-1].get("lora_path") == adapter
        assert {delta.weight_version for delta in deltas} == ({"v1"} if adapter is None else {None})
        assert bool(deltas[-1].weight_spans) == (adapter is None)


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_before_an_error_count_however_they_arrive(server: FakeServer, incremental: bool) -> None:
    def answer(body: dict[str, Any]) -> Response:
        sent = events(body, incremental=incremental)[:2]
        return streaming(sse([*sent, {"error": {"code": 503}}]))

    async def main() -> list[SampleDelta]:
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answers["/generate"] = answer
        return await sampled_before_the_error(engine, engine.sample(PROMPT, PARAMS, stream=True, request_id="call"))

    assert asyncio.run(main()) == [SampleDelta((11, 11), (-0.5, -1.5), weight_version="v1")]


def test_reply_without_streaming_gives_a_single_delta(server: FakeServer) -> None:
    (delta,) = sample(server, stream=False)
    assert (delta.token_ids, delta.logprobs, delta.finish_reason) == (tuple(SAMPLED), tuple(LOGPROBS), "length")


@settings(max_examples=examples(300), deadline=None)
@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 11)),
    incremental=st.booleans(),
    repeat=st.booleans(),
)
def test_stream_chunking_does_not_change_the_ids(
    ids: list[int], cuts: set[int], incremental: bool, repeat: bool
) -> None:
    ends = sorted({cut for cut in cuts if cut < len(ids)} | {len(ids)})
    sent: Events = []
    begin = 0
    for end in ends:
        entries = [[-0.5, token_id, None] for token_id in ids]
        first = begin if incremental else 0
        meta = {
            "finish_reason": {"type": "length", "length": len(ids)} if end == len(ids) else None,
            "prompt_tokens": 3,
            "completion_tokens": end,
            "output_token_logprobs": entries[first:end],
        }
        event = {"output_ids": ids[first:end], "meta_info": meta}
        # A cumulative stream may repeat an event.
        sent += [event] * (2 if repeat and not incremental and end < len(ids) else 1)
        begin = end
    reply = SglangReply(replace(PARAMS, max_tokens=12), VOCAB_SIZE, prompt=b"[3,4,5]", prompt_tokens=3)
    deltas = [delta for event in sent if (delta := reply.feed(json.dumps(event).encode()))]
    assert reply.feed(DONE) is None
    assert joined([*deltas, reply.last()])[0] == tuple(ids)


def test_longer_list_waits_for_the_shorter_one(server: FakeServer) -> None:
    def ahead(sent: Events) -> None:
        sent[1]["output_ids"] = SAMPLED[:3]

    deltas = sample(server, answer=tampered(ahead))
    assert joined(deltas) == (tuple(SAMPLED), tuple(LOGPROBS))


def test_a_stop_id_is_kept_in_the_ids_and_named(server: FakeServer) -> None:
    last = sample(server, replace(PARAMS, stop_token_ids=(50, 13)))[-1]
    assert (last.token_ids[-1], last.finish_reason, last.stop) == (13, "stop", 13)


def test_model_eos_is_a_stop_at_its_id(server: FakeServer) -> None:
    change: Callable[[Events], object] = lambda sent: sent[-1]["meta_info"].update(  # noqa: E731
        finish_reason={"type": "stop", "matched": 13}
    )
    last = sample(server, replace(PARAMS, stop_token_ids=(50,)), answer=tampered(change))[-1]
    assert (last.finish_reason, last.stop) == ("stop", 13)
    with pytest.raises(EngineContractError, match="without a requested stop"):
        sample(server, answer=tampered(change))


def test_weight_change_within_a_completion_gives_two_spans(server: FakeServer) -> None:
    spans = [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3}]
    last = sample(server, answer=tampered(lambda sent: sent[-1]["meta_info"].update(weight_versions=spans)))[-1]
    assert last.weight_spans == (WeightSpan("v1", 0, 2), WeightSpan("v2", 2, 3))


def test_routed_experts_are_rows_per_token_from_the_requested_offset(server: FakeServer) -> None:
    server.reset(answers(**OFFERS_EVERYTHING))
    rows = np.arange(4 * 6, dtype="<i4").reshape(4, 6)
    coded = base64.b64encode(rows.tobytes()).decode()
    answer = tampered(lambda sent: sent[-1]["meta_info"].update(routed_experts=coded))
    (payload,) = sample(server, replace(PARAMS, payloads_from=1), answer=answer)[-1].payloads
    assert (payload.name, payload.start) == ("routed_experts", 1)
    # Prompt 3 + sampled 3 - the last, which was never an input, - the 1 left out.
    np.testing.assert_array_equal(payload.rows, rows)


@pytest.mark.parametrize("stream", [False, True])
def test_mask_is_returned_with_logprobs_over_it(server: FakeServer, stream: bool) -> None:
    server.reset(answers(**OFFERS_EVERYTHING))
    deltas = sample(server, replace(PARAMS, top_k=40, supports=2), stream=stream)
    supports = [support for delta in deltas for support in delta.supports]
    assert [None if ids is None else ids.tolist() for ids in map(kept_ids, supports)] == [[4, 11], None, [13]]
    assert [value for delta in deltas for value in delta.logprobs] == OVER_MASKS


def test_alternatives_are_also_over_the_mask(server: FakeServer) -> None:
    model = np.random.default_rng(0).normal(size=(3, VOCAB_SIZE)) * 2
    model -= np.log(np.exp(model).sum(-1, keepdims=True))
    likeliest = np.argsort(-model)[:, :5].tolist()
    masks, sampled = (
        [row[:kept] for row, kept in zip(likeliest, (3, 1, 2), strict=True)],
        [likeliest[0][2], likeliest[1][0], likeliest[2][1]],
    )
    over = [
        {token_id: float(model[at, token_id] - np.log(np.exp(model[at, mask]).sum())) for token_id in mask}
        for at, mask in enumerate(masks)
    ]
    server.reset(answers(**OFFERS_EVERYTHING))

    def change(sent: Events) -> None:
        sent[-1]["output_ids"] = sampled
        sent[-1]["meta_info"] |= {
            "output_token_logprobs": [[model[at, token_id], token_id, None] for at, token_id in enumerate(sampled)],
            "output_top_logprobs": [
                [[model[at, token_id], token_id, None] for token_id in row] for at, row in enumerate(likeliest)
            ],
            "output_token_sampling_mask": masks,
            "output_token_sampling_logprobs": [row[token_id] for row, token_id in zip(over, sampled, strict=True)],
        }

    asked = replace(PARAMS, top_k=40, supports=64, top_logprobs=5)
    (delta,) = sample(server, asked, answer=tampered(change), stream=False)
    for top, expected in zip(delta.top_logprobs, over, strict=True):
        assert dict(top) == pytest.approx(expected)
    assert [list(dict(top)) for top in delta.top_logprobs] == masks


def test_masks_exclude_alternatives_from_before_temperature(server: FakeServer) -> None:
    plain = {
        **answers(**OFFERS_EVERYTHING),
        "/generate": lambda body: generate(body | {"sampling_params": body["sampling_params"] | {"temperature": 1.0}}),
    }
    server.reset(plain)
    deltas = sample(server, replace(PARAMS, top_k=40, supports=64, top_logprobs=2))
    assert server.asked[-1][1]["top_logprobs_num"] == 0
    assert not any(delta.top_logprobs for delta in deltas)
    sample(server, replace(PARAMS, top_k=40, top_logprobs=2))
    assert server.asked[-1][1]["top_logprobs_num"] == 2


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 51}, {"top_k": 40, "temperature": 0.0}])
def test_no_mask_is_requested_if_the_server_would_refuse_the_call(server: FakeServer, params: Any) -> None:
    server.reset(answers(**OFFERS_EVERYTHING))
    deltas = sample(server, replace(PARAMS, supports=64, **params))
    assert "return_sampling_mask" not in server.asked[-1][1]
    assert [value for delta in deltas for value in delta.logprobs] == LOGPROBS
    assert not any(delta.supports for delta in deltas)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("mask", [[11, 4], [90, 7], [13]], "id 11, which is not among the 2 ids"),
        ("mask", [[4], [11, 4], [90, 11]], "is not among"),
        ("mask", [[11, 4], [11, VOCAB_SIZE], [13]], "the vocabulary has ids"),
        ("mask", [[11, 4], [11]], "2 sampling masks for 3 ids"),
        ("logprobs", [-0.25, -1.25], "2 log-probabilities for 3 ids"),
    ],
)
def test_mask_without_the_sampled_id_is_refused(server: FakeServer, field: str, value: Any, says: str) -> None:
    server.reset(answers(**OFFERS_EVERYTHING))
    answer = tampered(_set(-1, f"meta_info.output_token_sampling_{field}", value))
    with pytest.raises(EngineContractError, match=says):
        sample(server, replace(PARAMS, top_k=40, supports=64), answer=answer, stream=False)


def _set(event: int, path: str, value: object) -> Callable[[Events], None]:
    """Return a change of a field of an event; `path` is dotted."""

    def change(sent: Events) -> None:
        at: Any = sent[event]
        *parents, last = path.split(".")
        for name in parents:
            at = at[name]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set(-1, "meta_info.output_token_logprobs", [[-0.5, 11, None]]), "expected the same ids"),
        (_set(1, "meta_info.output_token_logprobs", [[-0.5, 11, None], [-1.5, 12, None]]), "expected the same ids"),
        (_set(-1, "meta_info.output_token_logprobs", []), "expected the same ids"),
        (_set(-1, "meta_info.completion_tokens", 4), "stream is inconsistent|counts"),
        (_set(-1, "meta_info.prompt_tokens", 2), "counts 2 prompt"),
        (_set(-1, "output_ids", [11, 12, 13]), "stream is inconsistent"),
        (_set(-1, "output_ids", [11]), "stream is inconsistent|fewer ids than"),
        (_set(-1, "output_ids", None), "an event without output_ids"),
        (_set(-1, "meta_info.finish_reason", {"type": "tired"}), "tired"),
        (_set(-1, "meta_info.finish_reason", {"type": "stop", "matched": "NaN happened"}), "without a requested stop"),
        (_set(-1, "meta_info.weight_versions", [{"version": "v", "start": 0, "end": 2}]), "do not cover"),
        (_set(-1, "prompt_token_ids", [3, 4, 6]), "a different prompt"),
        (lambda sent: sent.append(sent[-1]), "an event after the final one"),
        (_set(0, "meta_info.output_token_logprobs", [[None, 11, None]]), "no usable log-probability"),
        (_set(0, "meta_info.output_token_logprobs", [[7.5, 11, None]]), "logits"),
        (_set(0, "output_ids", ["11"]), "reply is not in"),
    ],
)
def test_inconsistent_reply_is_refused(server: FakeServer, change: Callable[[Events], None], says: str) -> None:
    with pytest.raises(EngineContractError, match=says):
        sample(server, answer=tampered(change))


@pytest.mark.parametrize("stream", [True, False])
def test_reply_to_another_call_is_refused(server: FakeServer, stream: bool) -> None:
    other = unique_id("call-1")
    with pytest.raises(EngineContractError, match="the id of another call"):
        sample(server, answer=lambda body: generate({**body, "rid": other}), stream=stream)


def test_an_id_outside_the_callers_vocabulary_is_refused(server: FakeServer) -> None:
    with pytest.raises(EngineContractError, match="sampled id 13; the vocabulary has ids 0 to 12"):
        sample(server, vocab_size=13)


def test_an_incremental_stream_that_lost_an_event_is_refused(server: FakeServer) -> None:
    def lose(sent: Events) -> None:
        del sent[1]

    with pytest.raises(EngineContractError):
        sample(server, answer=tampered(lose, incremental=True))


def test_wrong_count_does_not_make_a_stream_of_all_ids_incremental(server: FakeServer) -> None:
    def count_one_more(sent: Events) -> None:
        del sent[1]
        sent[0]["output_ids"], sent[1]["output_ids"] = [11], [11, 11]
        sent[1]["meta_info"].update(completion_tokens=3, output_token_logprobs=[[-0.5, 11, None], [-1.5, 11, None]])

    server.answers = answers(incremental_streaming_output=False)
    with pytest.raises(EngineContractError, match="counts 3 prompt and 3 completion tokens"):
        sample(server, answer=tampered(count_one_more))


def test_an_abort_in_the_server_ends_with_the_tokens_so_far(server: FakeServer) -> None:
    def abort(sent: Events) -> None:
        del sent[2]
        sent[1]["meta_info"].update(finish_reason={"type": "abort", "message": "Aborted"}, weight_versions=[])

    deltas = sample(server, answer=tampered(abort))
    assert joined(deltas)[0] == (11, 11)
    assert deltas[-1].finish_reason == "abort"


def test_an_incremental_stream_aborted_while_it_waits_repeats_its_last_id(server: FakeServer) -> None:
    def abort(sent: Events) -> None:
        sent[2]["output_ids"] = [11]
        sent[2]["meta_info"] = {
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 11, None], [-1.5, 11, None]],
        }

    deltas = sample(server, answer=tampered(abort, incremental=True))
    assert joined(deltas)[0] == (11, 11)
    assert deltas[-1].finish_reason == "abort"


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidRequest), (503, EngineUnavailable), (500, EngineError)])
def test_abort_with_a_status_raises_that_error(server: FakeServer, status: int, kind: type[TokentapeError]) -> None:
    finish = {"type": "abort", "message": "secret prompt text", "status_code": status}
    with pytest.raises(kind) as caught:
        sample(server, answer=tampered(_set(-1, "meta_info.finish_reason", finish)))
    assert "secret" not in str(caught.value)


def test_an_error_event_in_a_stream_is_raised(server: FakeServer) -> None:
    error = {"error": {"message": "secret prompt text", "type": "invalid_request_error", "code": 400}}
    with pytest.raises(InvalidRequest) as caught:
        sample(server, answer=lambda body: streaming(sse([error])))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("then", ["end", "break"])
def test_a_stream_that_ends_early_is_an_error(server: FakeServer, then: str) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return streaming(sse(events(body)[:2]).removesuffix(b"data: [DONE]\n\n"), then=then)

    with pytest.raises(EngineError):
        sample(server, answer=answer)


def test_a_silent_server_is_a_timeout(server: FakeServer) -> None:
    with pytest.raises(EngineTimeout):
        sample(
            server,
            answer=lambda body: streaming(sse(events(body)[:1])[:-14], then="stall"),
            timeouts=Timeouts(between_tokens=0.2),
        )


def test_abandoning_a_call_aborts_exactly_that_call_in_the_server(server: FakeServer) -> None:
    async def main() -> None:
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answers["/generate"] = lambda body: streaming(sse(events(body)[:1])[:-14], then="stall")
        server.asked.clear()
        async with aclosing(engine.sample(PROMPT, PARAMS, stream=True, request_id="a")) as deltas:
            await anext(deltas)
        await engine.close()

    asyncio.run(main())
    (asked,) = server.bodies("/generate")
    assert server.bodies("/abort_request") == [{"rid": asked["rid"], "abort_all": False}]
    assert asked["rid"].startswith("a-")
    assert server.client_left.wait(PATIENCE)


def test_call_is_interrupted_by_its_id_alone(server: FakeServer) -> None:
    async def main() -> None:
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.answers["/generate"] = lambda body: streaming(sse(events(body)[:1])[:-14], then="stall")
        async with aclosing(engine.sample(PROMPT, PARAMS, stream=True, request_id="a-1")) as deltas:
            await anext(deltas)
            server.asked.clear()
            assert not engine.interrupt("a")
            assert engine.interrupt("a-1")
            await asyncio.gather(*engine._background)
            assert [body["rid"].rpartition("-")[0] for body in server.bodies("/abort_request")] == ["a-1"]
        assert not engine.interrupt("a-1")
        await engine.close()

    asyncio.run(main())


def test_a_call_that_ended_is_not_aborted(server: FakeServer) -> None:
    sample(server)
    assert not server.bodies("/abort_request")


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1])
def test_id_outside_the_vocabulary_is_never_sent(server: FakeServer, bad: int) -> None:
    with pytest.raises(InvalidRequest, match="not in this model's vocabulary"):
        sample(server, prompt=np.array([1, bad], np.int32))
    assert not server.asked


def test_the_context_ends_with_the_longest_prompt_that_the_server_takes(server: FakeServer) -> None:
    async def context(**facts: int) -> int:
        server.reset(answers(**facts))
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        await engine.close()
        return engine.info.max_context

    longest = MAX_CONTEXT - 6
    assert asyncio.run(context(max_req_input_len=longest)) == longest
    assert asyncio.run(context()) == MAX_CONTEXT


def test_max_tokens_beyond_the_context_is_reduced(server: FakeServer) -> None:
    prompt = np.ones(MAX_CONTEXT - 2, np.int32)
    deltas = sample(server, replace(PARAMS, max_tokens=50), prompt=prompt)
    assert server.bodies("/generate")[0]["sampling_params"]["max_new_tokens"] == 2
    assert len(joined(deltas)[0]) == 2


@pytest.mark.parametrize("scaled", [True, False])
def test_opening_detects_whether_logprobs_include_temperature(server: FakeServer, scaled: bool) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if not scaled:
            body["sampling_params"]["temperature"] = 1.0
        return generate(body)

    server.answers["/generate"] = answer

    async def main() -> str:
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        await engine.check()
        await engine.close()
        return str(engine.info)

    assert asyncio.run(main()) == f"sglang 0.5.23 {'scaled' if scaled else 'penalised'}_logprobs"


def test_a_server_that_adds_its_own_sampling_parameters_is_refused(server: FakeServer) -> None:
    preferred = {"temperature": 0.5, "regex": "[ab]+"}
    server.answers["/model_info"] = JSONResponse({"preferred_sampling_params": preferred})
    with pytest.raises(EngineContractError, match="preferred-sampling-params for regex,"):
        sample(server)
    server.answers["/model_info"] = JSONResponse({"preferred_sampling_params": '{"temperature": 0.5}'})
    assert sample(server)


@pytest.mark.parametrize("option", ["watermark_default_enabled", "watermark_enforce_all"])
def test_a_server_that_watermarks_all_samples_is_refused(server: FakeServer, option: str) -> None:
    """Its logprobs are those of the distribution without the watermark (`layers/sampler.py` of 0.5.23)."""
    server.reset(answers(**{option: True}))
    with pytest.raises(EngineContractError, match="watermark"):
        sample(server)


@pytest.mark.parametrize(("algorithm", "late"), [(None, 0), ("EAGLE", 64)])
def test_a_server_that_speculates_may_look_for_stops_late(server: FakeServer, algorithm: str | None, late: int) -> None:
    async def late_stops() -> int:
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        await engine.close()
        return engine.info.late_stops

    server.reset(answers(speculative_algorithm=algorithm))
    assert asyncio.run(late_stops()) == late


def test_temperature_that_counts_as_greedy_elsewhere_is_refused(server: FakeServer) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        sample(server, replace(PARAMS, temperature=5e-6))
    assert not server.asked


@pytest.mark.parametrize(
    ("asked", "sent"), [((1, 0.5), (2, 1e-9)), ((1, 0.0), (1, 1.0)), ((2, 0.5), (2, 1.0)), ((0, 0.5), (-1, 1.0))]
)
def test_top_k_of_one_is_sent_so_that_logprobs_include_the_temperature(
    server: FakeServer, asked: tuple[int, float], sent: tuple[int, float]
) -> None:
    top_k, temperature = asked
    sample(server, replace(PARAMS, top_k=top_k, temperature=temperature))
    (body,) = server.bodies("/generate")
    assert (body["sampling_params"]["top_k"], body["sampling_params"]["top_p"]) == sent


@pytest.mark.parametrize("stream", [True, False])
def test_finished_grammar_ends_a_call_without_stop_ids(server: FakeServer, stream: bool) -> None:
    def finish(sent: Events) -> None:
        sent[-1]["meta_info"]["finish_reason"] = {"type": "stop", "matched": SAMPLED[-1]}

    constrained = replace(PARAMS, json_schema="{}")
    deltas = sample(server, constrained, answer=tampered(finish), stream=stream)
    assert server.bodies("/generate")[-1]["sampling_params"]["ignore_eos"] is False
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", SAMPLED[-1])
    with pytest.raises(EngineContractError, match="without a requested stop"):
        sample(server, answer=tampered(finish), stream=stream)


@pytest.mark.parametrize("changed", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"min_tokens": 2}])
@pytest.mark.parametrize("stream", [True, False])
def test_retracted_call_whose_tokens_the_server_forgot_is_refused(
    server: FakeServer, stream: bool, changed: dict[str, Any]
) -> None:
    def retract(sent: Events) -> None:
        sent[-1]["meta_info"]["num_retractions"] = 1

    with pytest.raises(EngineError, match="retracted this call"):
        sample(server, replace(PARAMS, **changed), answer=tampered(retract), stream=stream)
    assert sample(server, answer=tampered(retract), stream=stream)


def test_facts_of_a_restarted_server_are_read_again(server: FakeServer) -> None:
    async def main() -> list[SampleDelta]:
        engine = await SglangEngine.open(server.url, vocab_size=VOCAB_SIZE)
        server.reset(answers(enable_deterministic_inference=True, incremental_streaming_output=True))
        server.answers["/generate"] = lambda body: streaming(sse(events(body, incremental=True)))
        assert await engine.find_logprobs_mode() == "scaled_logprobs"
        server.answers["/model_info"] = JSONResponse({"preferred_sampling_params": {"regex": "a"}})
        with pytest.raises(EngineContractError, match="regex"):
            await engine.find_logprobs_mode()
        call = engine.sample(PROMPT, replace(PARAMS, seed=7), stream=True, request_id="call-1")
        try:
            return [delta async for delta in call]
        finally:
            await engine.close()

    assert joined(asyncio.run(main()))[0] == tuple(SAMPLED)
    assert server.bodies("/generate")[-1]["sampling_params"]["sampling_seed"] == 7


def test_another_server_is_not_taken_for_sglang(server: FakeServer) -> None:
    server.answers["/server_info"] = JSONResponse({"hello": "world"})
    with pytest.raises(EngineContractError, match="SGLang"):
        sample(server)


def test_a_schema_is_sent_as_text(server: FakeServer) -> None:
    sample(server, replace(PARAMS, json_schema='{"type":"object"}'))
    (body,) = server.bodies("/generate")
    assert body["sampling_params"]["json_schema"] == '{"type":"object"}'


def test_a_structural_tag_is_sent_as_text_where_xgrammar_reads_it(server: FakeServer) -> None:
    tagged = replace(PARAMS, structural_tag='{"type":"structural_tag"}')
    server.reset(answers(grammar_backend="xgrammar"))
    sample(server, tagged)
    (body,) = server.bodies("/generate")
    assert body["sampling_params"]["structural_tag"] == tagged.structural_tag
    server.reset(answers(grammar_backend="llguidance"))
    with pytest.raises(UnsupportedParameter, match="structural_tag"):
        sample(server, tagged)


def test_server_without_grammars_refuses_schemas(server: FakeServer) -> None:
    server.reset(answers(grammar_backend="none"))
    with pytest.raises(UnsupportedParameter, match="json_schema"):
        sample(server, replace(PARAMS, json_schema="{}"))


@pytest.mark.parametrize("stream", [True, False])
def test_cached_tokens_are_reported_with_the_last_delta(server: FakeServer, stream: bool) -> None:
    cached = tampered(lambda sent: sent[-1]["meta_info"].update(cached_tokens=2))
    *_, last = sample(server, stream=stream, answer=cached)
    assert last.cached_tokens == 2
