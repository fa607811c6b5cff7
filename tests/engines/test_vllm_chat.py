"""vLLM's chat API: request bodies, ids of prompt and completion, and replies without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response
from test_vllm_generate import EVERYTHING, PARAMS
from tests.engines import fake_vllm
from tests.engines.fake_vllm import VOCAB_SIZE, FakeVllm, plain_answer, sse, streaming
from tests.engines.vllm_schemas import SCHEMAS, schema
from tests.json_schemas import validate
from tests.waiting import PATIENCE

from tokentape.engines._base import SampleDelta, SamplingParams, StartedCompletion
from tokentape.engines._vllm_chat import VllmChatServer
from tokentape.errors import EngineContractError, InvalidRequest, TokentapeError

RENDERED = [3, 4, 5, 6]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "so",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": {"at": "é"}}}],
    },
    {"role": "tool", "tool_call_id": "x", "content": "1"},
]

Tamper = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def running() -> Iterator[FakeVllm]:
    with fake_vllm.running() as fake:
        yield fake


@pytest.fixture
def server(running: FakeVllm) -> FakeVllm:
    running.reset()
    running.answer = lambda body: chat_answer()(body) if "messages" in body else plain_answer(body)
    return running


def chat_events(body: dict[str, Any], finish: str = "stop") -> list[dict[str, Any]]:
    """Return a stream of two tokens, ended by the last, as vLLM 0.32.0 writes it."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": fake_vllm.MODEL}
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events: list[dict[str, Any]] = [{**head, "choices": [opening], "prompt_token_ids": RENDERED}]
    for token_id, logprob in ((11, -0.5), (12, -1.5)):
        top = [{"token": f"token_id:{token_id}", "logprob": logprob, "bytes": [1]}][: body["top_logprobs"]]
        entry = {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": [1], "top_logprobs": top}
        choice = {"index": 0, "delta": {}, "logprobs": {"content": [entry]}, "finish_reason": None}
        events.append({**head, "choices": [{**choice, "token_ids": [token_id]}]})
    events[-1]["choices"][0].update(finish_reason=finish, stop_reason=None)
    if body["max_completion_tokens"] == 1:
        del events[-1]
        events[-1]["choices"][0].update(finish_reason="length")
    sampled = len(events) - 1
    usage = {"prompt_tokens": 4, "completion_tokens": sampled, "total_tokens": 4 + sampled}
    return [*events, {**head, "choices": [], "usage": usage}]


def chat_answer(tamper: Tamper = lambda _: None, finish: str = "stop") -> Callable[[dict[str, Any]], Response]:
    def answer(body: dict[str, Any]) -> Response:
        events = chat_events(body, finish)
        tamper(events)
        return streaming(sse(events))

    return answer


def ask(
    server: FakeVllm,
    params: SamplingParams = PARAMS,
    answer: Callable[[dict[str, Any]], Response] | None = None,
) -> tuple[StartedCompletion, list[SampleDelta]]:
    async def main() -> tuple[StartedCompletion, list[SampleDelta]]:
        chats = await VllmChatServer.open(server.url, vocab_size=VOCAB_SIZE)
        server.bodies.clear()
        server.answer = answer or server.answer
        try:
            call = await chats.begin(MESSAGES, [TOOL], {"enable_thinking": True}, params, request_id="call-1")
            async with aclosing(call.deltas) as deltas:
                return call, [delta async for delta in deltas]
        finally:
            await chats.close()

    return asyncio.run(main())


needs_schemas = pytest.mark.skipif(not SCHEMAS.is_dir(), reason="needs the schemas of vLLM's chats: TOKENTAPE_SHARED")


@needs_schemas
@pytest.mark.parametrize("params", [PARAMS, EVERYTHING], ids=["plain", "everything"])
def test_bodies_match_vllm_s_schema_without_extra_fields(server: FakeVllm, params: SamplingParams) -> None:
    request = schema("ChatCompletionRequest", "full")
    ask(server, params)
    (body,) = server.bodies
    validate(body, request)
    assert set(body) <= set(request["properties"])


@needs_schemas
def test_fake_server_replies_match_the_schema() -> None:
    for event in chat_events({"top_logprobs": 1, "max_completion_tokens": 5}):
        validate(event, schema("ChatCompletionStreamResponse", "full"))


def test_messages_are_sent_with_arguments_as_text_and_reasoning_by_its_newer_name(server: FakeVllm) -> None:
    ask(server)
    (body,) = server.bodies
    sent = body["messages"][1]
    assert sent["tool_calls"][0]["function"]["arguments"] == '{"at": "é"}'
    assert (sent["reasoning"], "reasoning_content" in sent) == ("so", False)
    assert body["tools"] == [TOOL]
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert json.dumps(body).count("include_reasoning") == 0


@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
def test_prompt_and_completion_are_returned_as_ids(server: FakeVllm, finish: str) -> None:
    call, deltas = ask(server, answer=chat_answer(finish=finish))
    np.testing.assert_array_equal(call.prompt_ids, np.array(RENDERED, np.int32))
    name = "vllm 0.32.0 raw_logprobs completions captured"
    assert deltas == [
        SampleDelta((11,), (-0.5,), engine=name),
        # Ended by the model's EOS, which the server does not name.
        SampleDelta((12,), (-1.5,), "stop", 12, engine=name),
    ]


WRONG: dict[str, tuple[Tamper, str]] = {
    "no prompt": (lambda e: e[0].pop("prompt_token_ids"), "prompt_token_ids"),
    "no list of ids": (lambda e: e[0].update(prompt_token_ids="abc"), "not a list of token ids"),
    "no ids": (lambda e: e[1]["choices"][0].update(token_ids=None), "are not the same"),
    "another id": (lambda e: e[1]["choices"][0].update(token_ids=[9]), "are not the same"),
    "a token's text": (
        lambda e: e[1]["choices"][0]["logprobs"]["content"][0].update(token="hello"),
        "a token as text",
    ),
    "a token lost": (lambda e: e.pop(1), "4 prompt and 2 completion tokens"),
    "another count": (lambda e: e[-1]["usage"].update(prompt_tokens=5), "5 prompt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_reply_with_a_single_fault_is_refused(server: FakeVllm, name: str) -> None:
    tamper, message = WRONG[name]
    with pytest.raises(EngineContractError, match=message):
        ask(server, answer=chat_answer(tamper))


def test_server_without_ids_in_chats_is_refused_when_opening(server: FakeVllm) -> None:
    plain = chat_answer(WRONG["no prompt"][0])
    server.answer = lambda body: plain(body) if "messages" in body else plain_answer(body)
    with pytest.raises(EngineContractError, match="no prompt_token_ids"):
        ask(server)


def test_messages_that_the_server_refuses_are_an_invalid_request(server: FakeVllm) -> None:
    refusal = JSONResponse({"error": {"message": "m", "type": "BadRequestError", "code": 400}}, 400)
    with pytest.raises(TokentapeError) as caught:
        ask(server, answer=lambda _: refusal)
    assert type(caught.value) is InvalidRequest


def test_unread_call_is_closed(server: FakeVllm) -> None:
    def stalling(body: dict[str, Any]) -> Response:
        return streaming(sse(chat_events(body)[:2]).replace(b"data: [DONE]\n\n", b""), then="stall")

    async def main() -> None:
        chats = await VllmChatServer.open(server.url, vocab_size=VOCAB_SIZE)
        server.answer = stalling
        call = await chats.begin(MESSAGES, (), {}, PARAMS, request_id="call")
        server.client_left.clear()
        assert not await asyncio.to_thread(server.client_left.wait, 0.2)
        await call.deltas.aclose()
        assert await asyncio.to_thread(server.client_left.wait, PATIENCE)
        await chats.close()

    asyncio.run(main())
