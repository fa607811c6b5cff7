"""Completions through the official client and through our own vLLM engine, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI

import tokentape.demo
from tests.conftest import SharedEngine
from tests.gateway.request_context import FakeContext
from tests.gateway.scripted import ScriptedEngine
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._vllm import VllmEngine
from tokentape.errors import EngineError, InvalidRequest, UnsupportedParameter
from tokentape.gateway._app import create_app
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.gateway._wire.completions import Completions, CompletionsBody, CompletionsStreamOptions
from tokentape.store import SqliteStore
from tokentape.types import FinishReason, Provenance

PROMPT = "<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def client(gateway_url: str) -> Iterator[OpenAI]:
    """The official client, for session `s`."""
    with OpenAI(base_url=f"{gateway_url}/sessions/s/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(renderer: Renderer, store: SqliteStore) -> Iterator[Any]:
    """A client of a gateway with scripted replies."""
    with ExitStack() as opened:

        def start(*replies: str, **more: Any) -> OpenAI:
            app = create_app(Turns(ScriptedEngine(renderer, replies, **more), renderer, store), model_id="script")
            url = opened.enter_context(running(app))
            return opened.enter_context(OpenAI(base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0))

        yield start


def ask(client: OpenAI, prompt: Any, **more: Any) -> Any:
    extra = {"return_token_ids": True, **more.pop("extra", {})}
    return client.completions.create(**{"model": "any", "prompt": prompt, **more, "extra_body": extra})


def gather(chunks: list[Any], choice: int = 0) -> dict[str, Any]:
    """What a client makes of the chunks of one choice."""
    parts = [part for chunk in chunks for part in chunk.choices if part.index == choice]
    logprobs = [part.logprobs for part in parts if part.logprobs]
    return {
        "text": "".join(part.text for part in parts),
        "token_ids": [i for part in parts for i in (part.model_extra or {}).get("token_ids", [])],
        "finish_reason": [part.finish_reason for part in parts if part.finish_reason],
        "tokens": [token for logprobs_of_choice in logprobs for token in logprobs_of_choice.tokens],
        "offsets": [offset for logprobs_of_choice in logprobs for offset in logprobs_of_choice.text_offset],
        "top": [top for logprobs_of_choice in logprobs for top in logprobs_of_choice.top_logprobs],
    }


DIALECT = Completions("m", Renderer.load(Path(tokentape.demo.__file__).parent / "model").tokenizer)


def decode(**body: Any) -> TurnRequest:
    return asyncio.run(DIALECT.decode({"prompt": [1], **body}, FakeContext())).turn


def test_ids_are_sent_and_returned_unchanged(client: OpenAI, engine: SharedEngine, store: SqliteStore) -> None:
    reply = ask(client, [5, 6, 7], temperature=0, max_tokens=8)
    (sampled,) = engine.finished
    turn = store.load_session("s").turns[0]
    assert list(sampled.prompt_ids) == reply.choices[0].prompt_token_ids == turn.added_ids.tolist() == [5, 6, 7]
    assert list(sampled.token_ids) == reply.choices[0].token_ids == turn.completion_ids.tolist()
    assert set(turn.added_provenance.tolist()) == {Provenance.USER}
    assert reply.object == "text_completion"
    assert reply.choices[0].tokentape == {"session_id": "s", "turn": 0}
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, len(turn.completion_ids))


def test_text_prompt_keeps_its_control_tokens(client: OpenAI, renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    reply = ask(client, PROMPT, max_tokens=4)
    start = tokenizer.control("<|im_start|>")
    assert start is not None
    assert reply.choices[0].prompt_token_ids == tokenizer.encode_plain(PROMPT, add_special_tokens=True)
    assert reply.choices[0].prompt_token_ids[0] == start.id


@pytest.mark.parametrize("wrap", [lambda prompt: [prompt], lambda prompt: prompt])
def test_list_of_one_prompt_is_accepted(client: OpenAI, wrap: Any) -> None:
    assert ask(client, wrap("hello"), max_tokens=2, seed=1).choices[0].prompt_token_ids
    assert ask(client, wrap([5, 6]), max_tokens=2, seed=1).choices[0].prompt_token_ids == [5, 6]


def test_default_is_sixteen_tokens() -> None:
    assert decode().sampling.max_tokens == decode(max_tokens=None).sampling.max_tokens == 16


def test_stream_equals_non_stream(client: OpenAI) -> None:
    more: dict[str, Any] = {"temperature": 1, "seed": 4, "logprobs": 2, "max_tokens": 32}
    whole = ask(client, PROMPT, **more)
    chunks = list(ask(client, PROMPT, stream=True, stream_options={"include_usage": True}, **more))
    streamed, choice = gather(chunks), whole.choices[0]
    assert streamed["text"] == choice.text
    assert streamed["token_ids"] == choice.token_ids
    assert streamed["finish_reason"] == [choice.finish_reason]
    assert streamed["tokens"] == choice.logprobs.tokens
    assert streamed["offsets"] == choice.logprobs.text_offset
    # A call of another test may have been in the batch of one of the two, and other batches round differently.
    assert streamed["top"] == [pytest.approx(alternatives, abs=1e-3) for alternatives in choice.logprobs.top_logprobs]
    assert chunks[-1].usage == whole.usage
    assert [bool(((c.choices and c.choices[0].model_extra) or {}).get("prompt_token_ids")) for c in chunks][:2] == [
        True,
        False,
    ]


def test_client_that_appends_its_own_bridge_continues_without_a_fork(client: OpenAI, store: SqliteStore) -> None:
    bridge, context = [11, 12], [5, 6, 7]
    for seed in range(4):
        reply = ask(client, context, max_tokens=6, seed=seed)
        context = context + reply.choices[0].token_ids + bridge
    stored = store.load_session("s")
    assert [(turn.parent, turn.fork) for turn in stored.turns] == [(None, None), (0, None), (1, None), (2, None)]
    assert all(turn.added_ids.tolist() == bridge for turn in stored.turns[1:])
    (trajectory,) = trajectories(Session(stored.info, stored.turns))
    assert trajectory.token_ids.tolist() == context[: -len(bridge)]
    assert trajectory.verdict == "exact"


def test_prompt_that_extends_a_chat_turn_continues_it(client: OpenAI, store: SqliteStore) -> None:
    chat = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=6,
        extra_body={"return_token_ids": True},
    )
    context = chat.prompt_token_ids + chat.choices[0].token_ids  # type: ignore[attr-defined]
    ask(client, [*context, 11], max_tokens=4)
    turn = store.load_session("s").turns[1]
    assert (turn.parent, turn.fork, turn.added_ids.tolist()) == (0, None, [11])


def test_ids_of_a_prompt_decide_the_cause_of_a_fork(client: OpenAI, store: SqliteStore) -> None:
    context = [5, 6, 7, *ask(client, [5, 6, 7], max_tokens=2).choices[0].token_ids]
    for prompt in ([5, 6, 8], [5, 6, 7], [*context, 11], [*context, 12], [*context, 11]):
        ask(client, prompt, max_tokens=2)
    forks = [turn.fork for turn in store.load_session("s").turns[1:]]
    assert forks == ["edited_history", "sibling", None, "branched", "sibling"]


def test_choices_are_siblings(client: OpenAI, store: SqliteStore) -> None:
    reply = ask(client, PROMPT, n=3, seed=2, max_tokens=12)
    turns = store.load_session("s").turns
    assert [turns[c.tokentape["turn"]].completion_ids.tolist() for c in reply.choices] == [
        choice.token_ids for choice in reply.choices
    ]
    chunks = list(ask(client, PROMPT, n=3, seed=2, max_tokens=12, stream=True))
    assert [gather(chunks, n)["token_ids"] for n in range(3)] == [choice.token_ids for choice in reply.choices]


def test_logprobs_are_parallel_lists_over_all_sampled_ids(client: OpenAI, store: SqliteStore) -> None:
    report = ask(client, PROMPT, logprobs=2, max_tokens=8, seed=1).choices[0].logprobs
    turn = store.load_session("s").turns[0]
    np.testing.assert_array_equal(np.array(report.token_logprobs, np.float32), turn.logprobs)
    assert len(report.tokens) == len(report.text_offset) == len(report.top_logprobs) == len(turn.logprobs)
    for token, logprob, top in zip(report.tokens, report.token_logprobs, report.top_logprobs, strict=True):
        assert top[token] == logprob
        assert len(top) in (2, 3)
    assert report.text_offset == [sum(map(len, report.tokens[:at])) for at in range(len(report.tokens))]


@pytest.mark.parametrize("stream", [False, True])
def test_text_omits_control_tokens_unless_requested(scripted: Any, renderer: Renderer, stream: bool) -> None:
    text = "one<|im_start|>two<|im_end|>"
    client = scripted(text, text)
    everything = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    texts = []
    for extra in ({}, everything):
        reply = ask(client, [5], stream=stream, extra=extra)
        texts.append(gather(list(reply))["text"] if stream else reply.choices[0].text)
    assert texts == ["onetwo", text]


@pytest.mark.parametrize("stream", [False, True])
def test_included_stop_string_ends_the_text(client: OpenAI, stream: bool) -> None:
    everything = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    whole = ask(client, PROMPT, seed=1, max_tokens=24, extra=everything).choices[0].text
    stop = whole[6:9]
    reply = ask(client, PROMPT, seed=1, max_tokens=24, stop=stop, extra=everything, stream=stream)
    text = gather(list(reply))["text"] if stream else reply.choices[0].text
    assert text == whole[: whole.index(stop) + len(stop)]


def test_stop_reason_names_the_requested_stop(scripted: Any, renderer: Renderer) -> None:
    end = renderer.tokenizer.control("<|im_end|>")
    assert end is not None
    client = scripted("x<|im_end|>", "x<|im_end|>", "x<|im_end|>")
    reasons = [ask(client, [5], extra=extra).choices[0].stop_reason for extra in ({}, {"stop_token_ids": [end.id]})]
    assert reasons == [None, end.id]
    # The model's end token does not end a call that ignores it.
    assert ask(client, [5], extra={"ignore_eos": True}).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_engine_error_has_its_status_and_shape(scripted: Any, stream: bool) -> None:
    client = scripted("hello there", fail_after=0, error=EngineError("connection reset"))
    with pytest.raises(openai.APIStatusError, match="connection reset") as caught:
        ask(client, [5], stream=stream)
    assert (caught.value.status_code, caught.value.code) == (502, "engine_error")


def test_engine_error_in_a_stream_is_an_event(scripted: Any, store: SqliteStore) -> None:
    client = scripted("hello there you", fail_after=2, error=EngineError("connection reset"))
    with pytest.raises(openai.APIError, match="connection reset"):
        list(ask(client, [5], stream=True))
    assert [turn.finish_reason for turn in store.load_session("s").turns] == ["abort"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
        ("echo", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("prompt_logprobs", 1),
        ("stream_options", {"continuous_usage_stats": True}),
        ("skip_special_tokens", False),
        ("seed", 1),
        ("min_tokens", 2),
        ("messages", []),
    ],
)
def test_unsupported_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter, match=name) as caught:
        decode(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", [1.5]),
        ("prompt", [-1]),
        ("prompt", [100]),
        ("prompt", [2**63]),
        ("prompt", {}),
        ("prompt", None),
        ("max_tokens", 0),
        ("n", 0),
        ("logprobs", 21),
        ("logprobs", True),
        ("stop_token_ids", [100]),
    ],
)
def test_wrong_type_or_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(**{name: value})
    assert caught.value.param == name


def test_null_equals_an_omitted_field() -> None:
    sent = dict.fromkeys(set(CompletionsBody.__struct_fields__) - {"prompt"})
    with_null, other = decode(**sent), decode()
    assert (with_null.sampling, with_null.n, with_null.stream, with_null.ignore_eos) == (
        other.sampling,
        other.n,
        other.stream,
        False,
    )


def test_null_stream_options_are_ignored() -> None:
    decode(stream_options=dict.fromkeys(CompletionsStreamOptions.__struct_fields__))


def test_prompt_longer_than_the_context_is_refused_by_name(client: OpenAI, engine: SharedEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [5] * engine.info.max_context)
    assert caught.value.param == "prompt"


async def sample(engine: VllmEngine, prompt: list[int], params: SamplingParams, stream: bool) -> SampleDelta:
    """The whole completion as one delta."""
    deltas = engine.sample(np.array(prompt, np.int32), params, stream=stream, request_id="test")
    async with aclosing(deltas) as opened:
        parts = [part async for part in opened]
    finish: FinishReason | None = parts[-1].finish_reason
    return SampleDelta(
        tuple(i for part in parts for i in part.token_ids),
        tuple(i for part in parts for i in part.logprobs),
        finish,
        parts[-1].stop,
        tuple(i for part in parts for i in part.top_logprobs),
    )


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_client_works_with_the_gateway(
    gateway_url: str, engine: SharedEngine, store: SqliteStore, renderer: Renderer, stream: bool
) -> None:
    end = renderer.tokenizer.control("<|im_end|>")
    assert end is not None

    async def work() -> None:
        vocab_size = renderer.tokenizer.vocab_size
        vllm = await VllmEngine.open(f"{gateway_url}/sessions/s/v1", vocab_size=vocab_size)
        try:
            await vllm.check()
            assert vllm.info.version.startswith("tokentape-")
            assert vllm.info.logprobs_mode == engine.info.logprobs_mode
            assert vllm.info.max_context == engine.info.max_context
            context = renderer.tokenizer.encode_plain(PROMPT)
            for params in (
                SamplingParams(max_tokens=12, temperature=0, top_logprobs=3),
                SamplingParams(max_tokens=400, seed=3, stop_token_ids=(end.id,)),
                SamplingParams(max_tokens=400, seed=5, stop_strings=("a", "e", "1")),
            ):
                got = await sample(vllm, context, params, stream)
                finished = engine.finished[-1]
                assert (list(got.token_ids), list(finished.prompt_ids)) == (list(finished.token_ids), context)
                np.testing.assert_array_equal(
                    np.array(got.logprobs, np.float32), np.array(finished.logprobs, np.float32)
                )
                assert got.finish_reason == finished.finish_reason
                context += [*got.token_ids, end.id]
        finally:
            await vllm.close()

    asyncio.run(work())
    turns = store.load_session("s").turns
    # The first turn is the probe that the engine is opened with.
    assert [turn.parent for turn in turns] == [None, None, 1, 2]
    assert [turn.fork for turn in turns[2:]] == [None, None]


def test_tokenize_and_detokenize_are_inverse(gateway_url: str, renderer: Renderer) -> None:
    answer = httpx2.post(f"{gateway_url}/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["tokens"] == renderer.tokenizer.encode_plain(PROMPT)
    assert (answer["count"], "".join(answer["token_strs"])) == (len(answer["tokens"]), PROMPT)
    again = httpx2.post(f"{gateway_url}/sessions/s/detokenize", json={"tokens": answer["tokens"]})
    assert again.json() == {"prompt": PROMPT}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"prompt": [1]}, "prompt"),
        ("tokenize", {}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("detokenize", {"tokens": [10**9]}, "tokens"),
        ("detokenize", {"tokens": [2**40]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_tokenizing_an_invalid_body_is_a_400(gateway_url: str, path: str, body: Any, param: str) -> None:
    answer = httpx2.post(f"{gateway_url}/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
