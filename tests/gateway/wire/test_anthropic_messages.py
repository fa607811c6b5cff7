"""Anthropic's Messages through the official client, on a real socket, against the real embedded engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx2
import numpy as np
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from openai import OpenAI

from tests.conftest import SharedEngine
from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Task, call_tool, sample_tasks
from tokentape.engines._base import Engine
from tokentape.errors import EngineError, EngineTimeout, EngineUnavailable
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Trajectory

HELLO = {"role": "user", "content": "Hello, I am Ada."}
QUESTION = {"role": "user", "content": "What is 3 plus 4?"}
CALLS = (
    '<think>\nlook it up\n</think>\n\nOne moment.\n<tool_call>\n{"name": "lookup", "arguments": {"item": "pears"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "lookup", "arguments": {"item": "plums"}}\n</tool_call><|im_end|>'
)
BAD_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"item": pears}}\n</tool_call><|im_end|>'
ANSWER = "Pears are 12, plums 7.<|im_end|>"
ANTHROPIC_TOOLS: list[Any] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]

GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
"""The client has no sampling parameters of its own, but sends those it gets."""

Serve = Callable[[Engine], str]
Connect = Callable[[str], Anthropic]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as opened:
        yield lambda base_url: opened.enter_context(Anthropic(base_url=base_url, api_key="none", max_retries=0))


@pytest.fixture
def client(gateway_url: str, connect: Connect) -> Anthropic:
    """The official client, for session `s`."""
    return connect(f"{gateway_url}/sessions/s")


@pytest.fixture
def serve(renderer: Renderer, store: SqliteStore) -> Iterator[Serve]:
    """Start a gateway over an engine and return the base URL of its session `s`."""
    with ExitStack() as served:

        def start(engine: Engine) -> str:
            app = create_app(Turns(engine, renderer, store), model_id="script")
            return served.enter_context(running(app)) + "/sessions/s"

        yield start


def ask(client: Anthropic, messages: list[Any], **more: Any) -> Any:
    return client.messages.create(**{"model": "any", "messages": messages, "max_tokens": 24, **more})


def say(client: Anthropic, messages: list[Any], *, stream: bool, **more: Any) -> Any:
    """The message that a client makes of a reply, streamed or not."""
    sent: dict[str, Any] = {"model": "any", "messages": messages, "max_tokens": 128, **more}
    if not stream:
        return client.messages.create(**sent)
    with client.messages.stream(**sent) as streaming:
        return streaming.get_final_message()


def plain(message: Any) -> dict[str, Any]:
    """A message without what differs between two replies with the same content: signatures and the ids of calls."""
    written: dict[str, Any] = message.to_dict()
    for block in written["content"]:
        block.pop("signature", None)
        block.pop("id", None)
    return {name: written[name] for name in ("content", "stop_reason", "stop_sequence", "usage", "role", "type")}


def results_of(task: Task, reply: Any) -> list[Any]:
    return [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": [{"type": "text", "text": call_tool(task, block.name, json.dumps(block.input))}],
        }
        for block in reply.content
        if block.type == "tool_use"
    ]


def only_trajectory(store: SqliteStore) -> Trajectory:
    stored = store.load_session("s")
    (trajectory,) = trajectories(Session(stored.info, stored.turns))
    return trajectory


def test_reply_is_what_was_sampled_and_recorded(client: Anthropic, engine: SharedEngine, store: SqliteStore) -> None:
    options = {"return_token_ids": True, "logprobs": True, "temperature": 0}
    reply = ask(client, [QUESTION], tools=ANTHROPIC_TOOLS, extra_body=options)
    turn = store.load_session("s").turns[0]
    (sampled,) = engine.finished
    assert turn.completion_ids.tolist() == reply.token_ids == list(sampled.token_ids)
    assert turn.added_ids.tolist() == reply.prompt_token_ids == list(sampled.prompt_ids)
    np.testing.assert_array_equal(turn.logprobs, np.array(reply.logprobs, np.float32))
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "tiny")
    assert reply.id.startswith("msg_")
    assert reply.usage.input_tokens == len(turn.added_ids)
    assert reply.usage.output_tokens == len(turn.completion_ids)
    assert reply.tokentape == {"session_id": "s", "turn": 0}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 11}])
def test_stream_equals_non_stream(client: Anthropic, sampling: dict[str, Any]) -> None:
    more = {"tools": ANTHROPIC_TOOLS, "extra_body": {"return_token_ids": True, "logprobs": True, **sampling}}
    whole = say(client, [QUESTION], stream=False, **more)
    with client.messages.stream(model="any", messages=[QUESTION], max_tokens=128, **more) as stream:  # type: ignore[list-item, arg-type]
        events = list(stream)
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    assert streamed.prompt_token_ids == whole.prompt_token_ids  # type: ignore[attr-defined]
    (last,) = [event for event in events if event.type == "message_delta"]
    assert (last.token_ids, last.logprobs) == (whole.token_ids, whole.logprobs)  # type: ignore[attr-defined]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
def test_real_model_completes_tasks_with_tools(
    client: Anthropic, engine: SharedEngine, store: SqliteStore, stream: bool
) -> None:
    (task,) = sample_tasks(seed=3, n=1, split="heldout")
    messages: list[Any] = []
    for prompt in task.prompts:
        messages.append({"role": "user", "content": prompt})
        for _ in range(6):
            reply = say(client, messages, stream=stream, system=SYSTEM_PROMPT, tools=ANTHROPIC_TOOLS, **GREEDY)
            messages.append({"role": "assistant", "content": reply.content})
            if reply.stop_reason != "tool_use":
                break
            messages.append({"role": "user", "content": results_of(task, reply)})
    trajectory = only_trajectory(store)
    assert trajectory.verdict == "exact, other logprobs"  # greedy
    for start, end, sampled in zip(
        trajectory.completion_starts, trajectory.completion_ends, engine.finished, strict=True
    ):
        assert trajectory.token_ids[:start].tolist() == list(sampled.prompt_ids)
        assert trajectory.token_ids[start:end].tolist() == list(sampled.token_ids)
        np.testing.assert_array_equal(trajectory.logprobs[start:end], np.array(sampled.logprobs, np.float32))
    assert any(isinstance(message["content"], list) and message["role"] == "user" for message in messages)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_of_the_client_completes_a_task(client: Anthropic, store: SqliteStore, stream: bool) -> None:
    (task,) = sample_tasks(seed=4, n=1, split="heldout")

    def runnable(definition: dict[str, Any]) -> Any:
        def run(**arguments: Any) -> str:
            return call_tool(task, definition["name"], json.dumps(arguments))

        return beta_tool(run, **definition)

    runner = client.beta.messages.tool_runner(
        model="any",
        max_tokens=128,
        max_iterations=8,
        system=SYSTEM_PROMPT,
        messages=[{"role": "user", "content": task.prompts[0]}],
        tools=[runnable(definition) for definition in ANTHROPIC_TOOLS],
        **GREEDY,
        stream=stream,
    )
    replies = [turn.get_final_message() if stream else turn for turn in runner]
    assert len(replies) > 2
    assert only_trajectory(store).verdict == "exact, other logprobs"  # greedy
    assert len(only_trajectory(store).turns) == len(replies)


def test_session_alternates_with_chat_completions(
    serve: Serve, renderer: Renderer, store: SqliteStore, connect: Connect
) -> None:
    url = serve(ScriptedEngine(renderer, [CALLS, ANSWER, CALLS, ANSWER]))
    ours = connect(url)
    blocks: list[Any] = [QUESTION]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as theirs:
        chat: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, QUESTION]
        for turn in range(4):
            if turn % 2:
                answer = theirs.chat.completions.create(model="any", messages=chat, tools=TOOLS)  # type: ignore[call-overload]
                message = answer.choices[0].message.model_dump(exclude_none=True)
                text, calls = message.get("content", ""), message.get("tool_calls", [])
            else:
                reply = ask(ours, blocks, system=SYSTEM_PROMPT, tools=ANTHROPIC_TOOLS)
                text = "".join(block.text for block in reply.content if block.type == "text")
                calls = [
                    {
                        "id": block.id,
                        "type": "function",
                        "function": {"name": block.name, "arguments": json.dumps(block.input)},
                    }
                    for block in reply.content
                    if block.type == "tool_use"
                ]
            chat.append({"role": "assistant", "content": text, "tool_calls": calls})
            chat += [{"role": "tool", "tool_call_id": call["id"], "content": "12"} for call in calls]
            chat.append({"role": "user", "content": "and then?"})
            uses = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in calls
            ]
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "12"} for call in calls]
            blocks.append({"role": "assistant", "content": [{"type": "text", "text": text}, *uses]})
            blocks.append({"role": "user", "content": [*results, {"type": "text", "text": "and then?"}]})
    turns = store.load_session("s").turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None), (1, None), (2, None)]


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_are_thinking_text_and_calls(serve: Serve, renderer: Renderer, connect: Connect, stream: bool) -> None:
    client = connect(serve(ScriptedEngine(renderer, [CALLS])))
    reply = say(client, [QUESTION], stream=stream, tools=ANTHROPIC_TOOLS)
    thinking, text, first, second = reply.content
    assert (thinking.type, thinking.thinking) == ("thinking", "look it up")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "One moment.")
    assert [(call.type, call.name, call.input) for call in (first, second)] == [
        ("tool_use", "lookup", {"item": "pears"}),
        ("tool_use", "lookup", {"item": "plums"}),
    ]
    assert first.id != second.id
    assert (reply.stop_reason, reply.stop_sequence) == ("tool_use", None)


def test_stream_has_the_order_that_clients_expect(serve: Serve, renderer: Renderer) -> None:
    url = serve(ScriptedEngine(renderer, [CALLS]))
    body = {"model": "any", "messages": [QUESTION], "max_tokens": 99, "stream": True, "tools": ANTHROPIC_TOOLS}
    answer = httpx2.post(f"{url}/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in answer.text.split("\n\n")[:-1]]
    payloads = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name for name, _ in events] == [f"event: {payload['type']}" for payload in payloads]
    order: list[str] = []
    for payload in payloads:
        step = payload["type"] + (
            f" {payload['index']} {payload['delta']['type']}" if "delta" in payload and "index" in payload else ""
        )
        order += [step] if order[-1:] != [step] else []
    assert order == [
        "message_start",
        "content_block_start",
        "content_block_delta 0 thinking_delta",
        "content_block_delta 0 signature_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta 1 text_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta 2 input_json_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta 3 input_json_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [payload["index"] for payload in payloads if payload["type"] == "content_block_stop"] == [0, 1, 2, 3]
    start, delta = payloads[0]["message"], payloads[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] > 20
    assert delta["tokentape"] == {"session_id": "s", "turn": 0}


def test_stream_arrives_as_it_is_sampled(serve: Serve, renderer: Renderer, connect: Connect) -> None:
    engine = ScriptedEngine(renderer, [ANSWER], stall_after=4)
    received = ""
    with connect(serve(engine)).messages.stream(model="any", messages=[QUESTION], max_tokens=99) as stream:  # type: ignore[list-item]
        for text in stream.text_stream:
            received += text
            if received.startswith("Pear"):
                break
        assert not engine.aborted.is_set()
    assert engine.aborted.wait(PATIENCE), "the engine went on sampling for nobody"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [CALLS, BAD_CALL, "<think>\nhm\n</think>\n\n<|im_end|>", "<|im_end|>"])
def test_reply_that_comes_back_continues_the_session(
    serve: Serve, renderer: Renderer, store: SqliteStore, connect: Connect, stream: bool, first: str
) -> None:
    engine = ScriptedEngine(renderer, [first, ANSWER])
    client = connect(serve(engine))
    reply = say(client, [QUESTION], stream=stream, tools=ANTHROPIC_TOOLS)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12"}
        for block in reply.content
        if block.type == "tool_use"
    ]
    go_on = [*results, {"type": "text", "text": "go on"}]
    history = [QUESTION, {"role": "assistant", "content": reply.content}, {"role": "user", "content": go_on}]
    ask(client, history, tools=ANTHROPIC_TOOLS)
    parent, child = store.load_session("s").turns
    assert (child.parent, child.fork) == (0, None)
    (before, _), (sent, _) = engine.requests
    assert sent[: len(before) + len(parent.completion_ids)] == before + parent.completion_ids.tolist()
    assert [message["role"] for message in child.messages] == ["tool"] * len(results) + ["user"]


@pytest.mark.parametrize("stream", [False, True])
def test_call_without_an_object_still_has_an_object_as_input(
    serve: Serve, renderer: Renderer, store: SqliteStore, connect: Connect, stream: bool
) -> None:
    (call,) = say(
        connect(serve(ScriptedEngine(renderer, [BAD_CALL]))), [QUESTION], stream=stream, tools=ANTHROPIC_TOOLS
    ).content
    assert call.input == {"unparsed_arguments": '{"item": pears}'}
    (recorded,) = store.load_session("s").turns[0].reply["tool_calls"]
    assert recorded["function"]["arguments"] == '{"item": pears}'


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(client: Anthropic, stream: bool) -> None:
    cut = say(client, [HELLO], stream=stream, max_tokens=3)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)
    whole = say(client, [HELLO], stream=stream, **GREEDY)
    assert whole.stop_reason == "end_turn"
    thought, text = whole.content[0].thinking, whole.content[1].text
    stop = next(text[at : at + 3] for at in range(1, len(text)) if text[at : at + 3] not in thought)
    stopped = say(client, [HELLO], stream=stream, **GREEDY, stop_sequences=["never said", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[1].text == text[: text.index(stop)]


def test_stop_reason_tells_that_the_context_is_full(client: Anthropic, engine: SharedEngine) -> None:
    room = engine.info.max_context
    counted = client.messages.count_tokens(model="any", messages=[{"role": "user", "content": "a"}]).input_tokens
    message: Any = {"role": "user", "content": "a" + " a" * (room - counted - 2)}
    counted = client.messages.count_tokens(model="any", messages=[message]).input_tokens
    reply = ask(client, [message], max_tokens=9999)
    assert reply.usage.output_tokens == room - counted
    assert reply.stop_reason == "model_context_window_exceeded"


def test_too_long_prompt_error_has_the_text_that_harnesses_expect(client: Anthropic, engine: SharedEngine) -> None:
    message: Any = {"role": "user", "content": "word " * 4000}
    counted = client.messages.count_tokens(model="any", messages=[message]).input_tokens
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {counted} tokens > "):
        ask(client, [message])


def test_token_count_equals_the_prompt_of_the_turn(client: Anthropic, store: SqliteStore) -> None:
    options: Any = {"system": [{"type": "text", "text": SYSTEM_PROMPT}], "tools": ANTHROPIC_TOOLS, "model": "any"}
    messages: list[Any] = [QUESTION]
    for _ in range(2):
        counted = client.messages.count_tokens(messages=messages, **options).input_tokens
        reply = ask(client, messages, **options)
        assert reply.usage.input_tokens == counted
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "and?"}]
    assert len(store.load_session("s").turns) == 2


def test_token_count_needs_and_creates_no_session(
    gateway_url: str, connect: Connect, engine: SharedEngine, turns: Turns
) -> None:
    client = connect(gateway_url)
    messages: Any = [{"role": "user", "content": "word " * 4000}]
    assert client.messages.count_tokens(model="any", messages=messages).input_tokens > engine.info.max_context
    assert len(turns.sessions) == 0


def test_async_client_takes_concurrent_turns(gateway_url: str, store: SqliteStore) -> None:
    async def run_session(client: AsyncAnthropic, index: int) -> list[int]:
        sent: Any = {"model": "any", "messages": [QUESTION], "max_tokens": 16}
        sent["extra_body"] = {"return_token_ids": True, "seed": index}
        if index % 2:
            whole: Any = await client.messages.create(**sent)
            return list(whole.token_ids)
        ids: list[int] = []
        async with client.messages.stream(**sent) as stream:
            async for event in stream:
                if event.type == "message_delta":
                    ids = event.token_ids  # type: ignore[attr-defined]
        return ids

    async def all_of_them() -> list[list[int]]:
        async with AsyncAnthropic(base_url=f"{gateway_url}/sessions/s", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(run_session(client, index) for index in range(6)))

    replies = asyncio.run(all_of_them())
    recorded = store.load_session("s").turns
    assert sorted(turn.completion_ids.tolist() for turn in recorded) == sorted(replies)


def test_header_names_what_is_not_enforced(client: Anthropic) -> None:
    reply = client.messages.with_raw_response.create(
        model="any",
        messages=[QUESTION],  # type: ignore[list-item]
        max_tokens=2048,
        tools=ANTHROPIC_TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    )
    assert reply.headers["x-tokentape-ignored-params"].split(", ") == [
        "tool_choice",
        "tool_choice.disable_parallel_tool_use",
        "thinking.budget_tokens",
        "context_management",
    ]


@pytest.mark.parametrize(
    ("error", "status", "kind", "raised"),
    [
        (EngineTimeout("no first token in 10 s"), 504, "timeout_error", anthropic.GatewayTimeoutError),
        (EngineUnavailable("paused"), 503, "overloaded_error", anthropic.ServiceUnavailableError),
        (EngineError("connection reset"), 502, "api_error", anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_error_before_the_first_token_has_its_own_status(
    serve: Serve, renderer: Renderer, connect: Connect, stream: bool, error: Any, status: int, kind: str, raised: Any
) -> None:
    engine = ScriptedEngine(renderer, [ANSWER], fail_after=0, error=error)
    with pytest.raises(raised, match=str(error)) as caught:
        say(connect(serve(engine)), [QUESTION], stream=stream)
    assert caught.value.status_code == status
    assert caught.value.type == kind
    assert caught.value.error_code == error.code
    assert caught.value.response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("error", [EngineError("connection reset"), RuntimeError("SECRET")])
def test_engine_error_in_a_stream_is_the_last_event(
    serve: Serve, renderer: Renderer, store: SqliteStore, connect: Connect, error: Exception
) -> None:
    engine = ScriptedEngine(renderer, [ANSWER, ANSWER], fail_after=3, error=error)
    url = serve(engine)
    body = {"model": "any", "messages": [QUESTION], "max_tokens": 99, "stream": True}
    *_, last, empty = httpx2.post(f"{url}/v1/messages", json=body).text.split("\n\n")
    assert last.startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')
    assert empty == ""
    assert "SECRET" not in last
    engine.error = engine.fail_after = None
    assert ask(connect(url), [QUESTION]).content[0].text == "Pears are 12, plums 7."
    assert [turn.finish_reason for turn in store.load_session("s").turns].count("stop") == 1


def test_client_sees_an_error_in_a_stream(serve: Serve, renderer: Renderer, connect: Connect) -> None:
    engine = ScriptedEngine(renderer, [ANSWER], fail_after=3, error=EngineError("connection reset"))
    with pytest.raises(anthropic.APIStatusError, match="connection reset"):
        say(connect(serve(engine)), [QUESTION], stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_the_engine(
    serve: Serve, renderer: Renderer, store: SqliteStore, connect: Connect, stream: bool
) -> None:
    engine = ScriptedEngine(renderer, [ANSWER, ANSWER], stall_after=3)
    url = serve(engine)

    async def leave() -> None:
        body = {"model": "any", "messages": [QUESTION], "max_tokens": 99, "stream": stream}
        async with httpx2.AsyncClient() as client:
            request = asyncio.create_task(client.post(f"{url}/v1/messages", json=body))
            assert await asyncio.to_thread(engine.stalled.wait, PATIENCE)
            request.cancel()
            await asyncio.wait([request])

    asyncio.run(leave())
    assert engine.aborted.wait(PATIENCE), "the engine went on sampling for nobody"
    engine.stall_after = None
    ask(connect(url), [QUESTION])
    assert only_trajectory(store).verdict == "exact"
