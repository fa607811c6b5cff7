"""Chat completions through the official client, on a real socket, against the real embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.conftest import SharedEngine
from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE, until
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, call_tool, sample_tasks
from tokentape.engines._base import Engine
from tokentape.errors import EngineError, EngineTimeout
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

QUESTION = {"role": "user", "content": "What is 3 plus 4?"}
CALLS = (
    '<think>\nlook it up\n</think>\n\nOne moment.\n<tool_call>\n{"name": "lookup", "arguments": {"item": "pears"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "lookup", "arguments": {"item": "plums"}}\n</tool_call><|im_end|>'
)
ANSWER = "Pears are 12, plums 7.<|im_end|>"

Serve = Callable[[Engine], str]


@pytest.fixture
def openai_client() -> Iterator[Callable[[str], OpenAI]]:
    with ExitStack() as opened:
        yield lambda base_url: opened.enter_context(OpenAI(base_url=base_url, api_key="none", max_retries=0))


@pytest.fixture
def client(gateway_url: str, openai_client: Callable[[str], OpenAI]) -> OpenAI:
    """The official client, for session `s`."""
    return openai_client(f"{gateway_url}/sessions/s/v1")


@pytest.fixture
def serve(renderer: Renderer, store: SqliteStore) -> Iterator[Serve]:
    """Start a gateway over an engine and return the base URL of its session `s`."""
    with ExitStack() as served:

        def start(engine: Engine) -> str:
            app = create_app(Turns(engine, renderer, store, limits=Limits(retry_grace=0.1)), model_id="script")
            return served.enter_context(running(app)) + "/sessions/s/v1"

        yield start


def ask(client: OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "any", "messages": messages, "max_tokens": 24, **more})


def gather(chunks: list[ChatCompletionChunk], choice: int = 0) -> dict[str, Any]:
    """What a client makes of the chunks of one choice."""
    parts = [part for chunk in chunks for part in chunk.choices if part.index == choice]
    calls: dict[int, list[Any]] = {}
    for part in parts:
        for call in part.delta.tool_calls or ():
            assert call.function is not None
            calls.setdefault(call.index, []).append((call.id, call.function.name, call.function.arguments))
    return {
        "content": "".join(part.delta.content or "" for part in parts),
        "reasoning": "".join((part.delta.model_extra or {}).get("reasoning_content", "") for part in parts),
        "calls": calls,
        "finish_reason": [part.finish_reason for part in parts if part.finish_reason],
        "logprobs": [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()],
        "token_ids": [i for part in parts for i in (part.model_extra or {}).get("token_ids", [])],
    }


def say(client: OpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    """The assistant message that an agent keeps of a reply, streamed or not."""
    reply = ask(client, messages, **more)
    if more.get("stream"):
        got = gather(list(reply))
        content, calls = got["content"], [call for [call] in got["calls"].values()]
    else:
        message = reply.choices[0].message
        content = message.content
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    functions = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def test_reply_is_what_was_sampled_and_recorded(
    client: OpenAI, engine: SharedEngine, store: SqliteStore, renderer: Renderer
) -> None:
    reply = ask(client, [QUESTION], tools=TOOLS, temperature=0, extra_body={"return_token_ids": True})
    turn = store.load_session("s").turns[0]
    (sampled,) = engine.finished
    assert turn.completion_ids.tolist() == reply.choices[0].token_ids == list(sampled.token_ids)
    assert turn.added_ids.tolist() == reply.prompt_token_ids == list(sampled.prompt_ids)
    np.testing.assert_array_equal(turn.logprobs, np.array(sampled.logprobs, np.float32))
    assert reply.object == "chat.completion"
    assert reply.model == "tiny"
    assert reply.usage.prompt_tokens == len(turn.added_ids)
    assert reply.usage.completion_tokens == len(turn.completion_ids)
    assert reply.usage.total_tokens == len(turn.added_ids) + len(turn.completion_ids)
    assert reply.choices[0].tokentape == {"session_id": "s", "turn": 0}


def test_later_turns_append_to_the_context(client: OpenAI, store: SqliteStore) -> None:
    messages: list[Any] = [{"role": "system", "content": "You help in a shop."}]
    context: list[int] = []
    for seq in range(4):
        messages.append({"role": "user", "content": f"question {seq}"})
        reply = ask(client, messages, tools=TOOLS, temperature=1, seed=seq, extra_body={"return_token_ids": True})
        turn = store.load_session("s").turns[seq]
        assert turn.fork is None
        assert reply.prompt_token_ids == context + turn.added_ids.tolist()
        context = reply.prompt_token_ids + reply.choices[0].token_ids
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 11}])
def test_stream_equals_non_stream(client: OpenAI, sampling: dict[str, Any]) -> None:
    more = {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}, **sampling}
    whole = ask(client, [QUESTION], **more)
    chunks = list(ask(client, [QUESTION], stream=True, stream_options={"include_usage": True}, **more))
    streamed = gather(chunks)
    choice = whole.choices[0]
    assert streamed["content"] == (choice.message.content or "")
    assert streamed["token_ids"] == choice.token_ids
    assert [entry.model_dump() for entry in streamed["logprobs"]] == [e.model_dump() for e in choice.logprobs.content]
    assert streamed["finish_reason"] == [choice.finish_reason]
    assert chunks[-1].usage == whole.usage


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
def test_real_model_completes_tasks_with_tools(
    client: OpenAI, engine: SharedEngine, store: SqliteStore, stream: bool
) -> None:
    (task,) = sample_tasks(seed=3, n=1, split="heldout")
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for prompt in task.prompts:
        messages.append({"role": "user", "content": prompt})
        for _ in range(6):
            message = say(client, messages, tools=TOOLS, temperature=0, max_tokens=128, stream=stream)
            messages.append(message)
            for call in message["tool_calls"]:
                result = call_tool(task, call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not message["tool_calls"]:
                break
    stored = store.load_session("s")
    (trajectory,) = trajectories(Session(stored.info, stored.turns))
    assert trajectory.verdict == "exact, other logprobs"  # greedy
    for start, end, sampled in zip(
        trajectory.completion_starts, trajectory.completion_ends, engine.finished, strict=True
    ):
        assert trajectory.token_ids[:start].tolist() == list(sampled.prompt_ids)
        assert trajectory.token_ids[start:end].tolist() == list(sampled.token_ids)
        np.testing.assert_array_equal(trajectory.logprobs[start:end], np.array(sampled.logprobs, np.float32))
    assert any(message["role"] == "tool" for message in messages)


def test_stream_has_the_order_that_clients_expect(client: OpenAI) -> None:
    chunks = list(ask(client, [QUESTION], stream=True, extra_body={"return_token_ids": True}))
    first, *between, last = [chunk.choices[0] for chunk in chunks]
    assert first.delta.role == "assistant"
    assert all(part.delta.role is None and part.finish_reason is None for part in between)
    assert last.finish_reason in ("stop", "length")
    assert last.delta.content is None
    assert last.tokentape == {"session_id": "s", "turn": 0}  # type: ignore[attr-defined]
    assert ["prompt_token_ids" in (chunk.model_extra or {}) for chunk in chunks] == [True] + [False] * len(chunks[1:])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_arrives_as_it_is_sampled(serve: Serve, renderer: Renderer, openai_client: Any) -> None:
    engine = ScriptedEngine(renderer, [ANSWER], stall_after=4)
    stream = ask(openai_client(serve(engine)), [QUESTION], stream=True)
    text = ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text.startswith("Pear"):
            break
    assert not engine.aborted.is_set()
    stream.close()


def test_stream_helper_of_the_client_puts_the_completion_together(serve: Serve, renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer, [CALLS])
    with (
        OpenAI(base_url=serve(engine), api_key="none") as client,
        client.chat.completions.stream(model="any", messages=[QUESTION], tools=TOOLS) as stream,  # type: ignore[list-item, arg-type]
    ):
        final = stream.get_final_completion().choices[0]
    assert [call.function.name for call in final.message.tool_calls or ()] == ["lookup", "lookup"]
    assert final.message.content == "One moment."


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_reasoning_reach_the_client(
    serve: Serve, renderer: Renderer, openai_client: Any, stream: bool
) -> None:
    reply = ask(openai_client(serve(ScriptedEngine(renderer, [CALLS]))), [QUESTION], tools=TOOLS, stream=stream)
    if stream:
        got = gather(list(reply))
        assert list(got["calls"]) == [0, 1]
        calls = [tool_call for [tool_call] in got["calls"].values()]
        content, reasoning, [finish] = got["content"], got["reasoning"], got["finish_reason"]
    else:
        message = reply.choices[0].message
        assert [call.type for call in message.tool_calls] == ["function", "function"]
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
        content, reasoning, finish = message.content, message.reasoning_content, reply.choices[0].finish_reason
    assert [call[1:] for call in calls] == [("lookup", '{"item": "pears"}'), ("lookup", '{"item": "plums"}')]
    assert len({call[0] for call in calls}) == 2
    assert (content, reasoning, finish) == ("One moment.", "look it up", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_results_continue_the_session(
    serve: Serve, renderer: Renderer, store: SqliteStore, openai_client: Any, stream: bool
) -> None:
    engine = ScriptedEngine(renderer, [CALLS, ANSWER])
    client = openai_client(serve(engine))
    message = say(client, [QUESTION], tools=TOOLS, stream=stream)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": price}
        for call, price in zip(message["tool_calls"], ("12", "7"), strict=True)
    ]
    ask(client, [QUESTION, message, *results], tools=TOOLS)
    first, second = store.load_session("s").turns
    assert (second.parent, second.fork) == (0, None)
    (before, _), (sent, _) = engine.requests
    assert sent[: len(before) + len(first.completion_ids)] == before + first.completion_ids.tolist()


def test_three_choices_are_three_siblings(client: OpenAI, store: SqliteStore) -> None:
    reply = ask(client, [QUESTION], n=3, seed=5, extra_body={"return_token_ids": True})
    turns = store.load_session("s").turns
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert sorted(choice.tokentape["turn"] for choice in reply.choices) == [0, 1, 2]
    for choice in reply.choices:
        assert turns[choice.tokentape["turn"]].completion_ids.tolist() == choice.token_ids
    assert len({tuple(choice.token_ids) for choice in reply.choices}) == 3
    assert reply.usage.completion_tokens == sum(len(choice.token_ids) for choice in reply.choices)


def test_three_choices_stream_interleaved_and_equal(client: OpenAI) -> None:
    more = {"n": 3, "seed": 5, "extra_body": {"return_token_ids": True}}
    whole = ask(client, [QUESTION], **more)
    chunks = list(ask(client, [QUESTION], stream=True, **more))
    assert [gather(chunks, i)["token_ids"] for i in range(3)] == [choice.token_ids for choice in whole.choices]
    finishes = [chunk.choices[0].finish_reason is not None for chunk in chunks]
    assert finishes == sorted(finishes), "a finish chunk left before the turns of all choices were durable"


def test_logprobs_cover_every_sampled_token(client: OpenAI, store: SqliteStore, renderer: Renderer) -> None:
    reply = ask(client, [QUESTION], temperature=0, logprobs=True, top_logprobs=3)
    turn = store.load_session("s").turns[0]
    entries = reply.choices[0].logprobs.content
    tokens = [renderer.tokenizer.token_bytes(i) for i in turn.completion_ids.tolist()]
    assert [bytes(entry.bytes) for entry in entries] == tokens
    assert [entry.token for entry in entries] == [token.decode("utf-8", "replace") for token in tokens]
    np.testing.assert_array_equal(np.array([entry.logprob for entry in entries], np.float32), turn.logprobs)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].bytes, entry.top_logprobs[0].logprob) == (entry.bytes, entry.logprob)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_returned_as_ids_on_request_as_in_vllm(client: OpenAI, stream: bool) -> None:
    options = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    reply = ask(client, [QUESTION], logprobs=True, top_logprobs=0, extra_body=options, stream=stream)
    parts = [part.choices[0] for part in (reply if stream else [reply]) if part.choices]
    named = [entry.token for part in parts if part.logprobs for entry in part.logprobs.content]
    assert named == [f"token_id:{token_id}" for part in parts for token_id in getattr(part, "token_ids", None) or ()]
    assert named


def test_stop_string_ends_the_reply_before_it(client: OpenAI, store: SqliteStore) -> None:
    whole = ask(client, [QUESTION], seed=1).choices[0].message.content
    stop = whole[whole.rfind(">") + 1 :][2:5]
    reply = ask(client, [QUESTION], seed=1, stop=["never said", stop]).choices[0]
    assert reply.message.content == whole[: whole.index(stop)]
    assert reply.finish_reason == "stop"
    assert store.load_session("s").turns[1].stop == stop


def test_same_seed_same_ids(client: OpenAI) -> None:
    def sample(seed: int) -> list[int]:
        ids: list[int] = ask(client, [QUESTION], seed=seed, extra_body={"return_token_ids": True}).choices[0].token_ids
        return ids

    assert sample(3) == sample(3) != sample(4)


def test_sampling_parameters_reach_the_engine(serve: Serve, renderer: Renderer, openai_client: Any) -> None:
    engine = ScriptedEngine(
        renderer,
        [ANSWER],
        sampling=frozenset({"stop_strings", "stop_token_ids", "top_k", "min_p", "seed", "min_tokens"}),
    )
    ask(
        openai_client(serve(engine)),
        [QUESTION],
        max_completion_tokens=9,
        seed=-4,
        stop="\n\n",
        extra_body={"top_k": -1, "min_p": 0.1, "stop_token_ids": [5], "min_tokens": 2},
    )
    params = engine.requests[0][1]
    assert params.min_tokens == 2
    assert (params.max_tokens, params.seed, params.stop_strings) == (9, -4, ("\n\n",))
    assert (params.top_k, params.min_p) == (0, 0.1)
    assert 5 in params.stop_token_ids


def test_tool_choice_none_removes_the_tools_from_the_prompt(client: OpenAI, store: SqliteStore) -> None:
    ask(client, [QUESTION], tools=TOOLS, tool_choice="none")
    ask(client, [QUESTION])
    first, second = store.load_session("s").turns
    assert first.added_ids.tolist() == second.added_ids.tolist()


def test_header_names_the_session(gateway_url: str, openai_client: Any) -> None:
    client = openai_client(f"{gateway_url}/v1")
    raw = client.chat.completions.with_raw_response
    first = raw.create(model="any", messages=[QUESTION], max_tokens=4, extra_headers={"X-Session-Id": "mine"})
    again = raw.create(model="any", messages=[QUESTION], max_tokens=4, extra_headers={"X-Session-Id": "mine"})
    assert [r.headers["x-session-id"] for r in (first, again)] == ["mine", "mine"]
    assert [r.headers["x-tokentape-turn"] for r in (first, again)] == ["0", "1"]


def test_calls_without_a_header_get_separate_sessions(gateway_url: str, openai_client: Any) -> None:
    raw = openai_client(f"{gateway_url}/v1").chat.completions.with_raw_response
    ids = [raw.create(model="any", messages=[QUESTION], max_tokens=4).headers["x-session-id"] for _ in range(2)]
    assert len({*ids}) == 2
    assert all(len(session_id) == 32 for session_id in ids)


def test_async_client_takes_concurrent_turns(gateway_url: str, store: SqliteStore) -> None:
    async def run_session(client: AsyncOpenAI, index: int) -> list[int]:
        sent: Any = {"model": "any", "messages": [QUESTION], "seed": index, "max_tokens": 16}
        sent["extra_body"] = {"return_token_ids": True}
        if index % 2:
            whole = await client.chat.completions.create(**sent)
            return list(whole.choices[0].token_ids)
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **sent)]
        return list(gather(chunks)["token_ids"])

    async def all_of_them() -> list[list[int]]:
        async with AsyncOpenAI(base_url=f"{gateway_url}/sessions/s/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(run_session(client, index) for index in range(8)))

    replies = asyncio.run(all_of_them())
    turns = store.load_session("s").turns
    assert sorted(turn.completion_ids.tolist() for turn in turns) == sorted(replies)
    assert all(turn.parent is None for turn in turns)


@pytest.mark.parametrize("stream", [False, True])
def test_engine_error_before_the_first_token_has_its_own_status(
    serve: Serve, renderer: Renderer, openai_client: Any, stream: bool
) -> None:
    engine = ScriptedEngine(renderer, [ANSWER], fail_after=0, error=EngineTimeout("no first token in 10 s"))
    with pytest.raises(openai.APIStatusError) as caught:
        ask(openai_client(serve(engine)), [QUESTION], stream=stream)
    assert caught.value.status_code == 504
    assert caught.value.code == "engine_timeout"
    assert caught.value.response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("error", [EngineError("connection reset"), RuntimeError("SECRET")])
def test_engine_error_in_a_stream_is_an_event_and_no_done(
    serve: Serve, renderer: Renderer, store: SqliteStore, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(renderer, [ANSWER, ANSWER], fail_after=3, error=error)
    base_url = serve(engine)
    body = {"messages": [QUESTION], "stream": True}
    answer = httpx2.post(f"{base_url}/chat/completions", json=body)
    assert answer.status_code == 200
    *_, last, empty = answer.text.split("\n\n")
    assert last.startswith('data: {"error":')
    assert empty == ""
    assert "[DONE]" not in answer.text
    assert 'finish_reason":"' not in answer.text
    assert "SECRET" not in answer.text + caplog.text
    engine.error = engine.fail_after = None
    assert httpx2.post(f"{base_url}/chat/completions", json={"messages": [QUESTION]}).status_code == 200
    *failed, answered = store.load_session("s").turns
    assert answered.parent is None
    assert [turn.finish_reason for turn in failed] == (["abort"] if isinstance(error, EngineError) else [])


def test_client_sees_an_error_in_a_stream(serve: Serve, renderer: Renderer, openai_client: Any) -> None:
    engine = ScriptedEngine(renderer, [ANSWER], fail_after=3, error=EngineError("connection reset"))
    with pytest.raises(openai.APIError, match="connection reset"):
        list(ask(openai_client(serve(engine)), [QUESTION], stream=True))


def wait_for_turns(store: SqliteStore, count: int) -> None:
    """Wait until the session has that many turns: aborted ones are recorded after the client disconnects."""
    until(lambda: store.sessions(limit=1) and len(store.load_session("s").turns) >= count)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stall_after", [0, 3])
def test_disconnect_aborts_the_engine_and_records_an_aborted_turn(
    serve: Serve, renderer: Renderer, store: SqliteStore, stream: bool, stall_after: int
) -> None:
    engine = ScriptedEngine(renderer, [ANSWER, ANSWER], stall_after=stall_after)
    base_url = serve(engine)

    async def leave() -> None:
        body = {"messages": [QUESTION], "stream": stream}
        async with httpx2.AsyncClient() as client:
            request = asyncio.create_task(client.post(f"{base_url}/chat/completions", json=body))
            assert await asyncio.to_thread(engine.stalled.wait, PATIENCE)
            request.cancel()
            await asyncio.wait([request])

    asyncio.run(leave())
    assert engine.aborted.wait(PATIENCE), "the engine went on sampling for nobody"
    engine.stall_after = None
    wait_for_turns(store, 1)
    answer = httpx2.post(f"{base_url}/chat/completions", json={"messages": [QUESTION]})
    assert answer.json()["choices"][0]["tokentape"]["turn"] == 1
    orphan, answered = store.load_session("s").turns
    assert (orphan.finish_reason, orphan.abort_cause, len(orphan.completion_ids)) == (
        "abort",
        "client_left",
        stall_after,
    )
    assert (answered.parent, answered.fork) == (None, None)


def test_disconnect_mid_stream_aborts_the_real_engine(client: OpenAI, engine: SharedEngine, store: SqliteStore) -> None:
    stream = ask(client, [QUESTION], stream=True, max_tokens=1500, temperature=1, seed=1)
    next(stream)
    stream.close()
    ask(client, [QUESTION], max_tokens=4)
    ends = [sample.finish_reason for sample in engine.finished]
    turns = store.load_session("s").turns
    # The tiny model may stop before the abort; then the turn was complete, and either outcome is allowed.
    if "abort" in ends:
        assert [turn.finish_reason for turn in turns if turn.fork is None][:1] == ["abort"]
        assert turns[-1].fork is None
