"""Responses through the official client, on a real socket, against the real embedded engine and scripted replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from tokentape._session.matching import message_key
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, call_tool, sample_tasks
from tokentape.errors import EngineError, InvalidRequest, NotFound, UnsupportedParameter
from tokentape.gateway._app import create_app
from tokentape.gateway._dialect import DecodedRequest
from tokentape.gateway._keys import Keys
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.gateway._wire.responses import IGNORED, Responses, ResponsesBody
from tokentape.store import SqliteStore

FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CALLS = (
    '<think>\nlook it up\n</think>\n\nOne moment.\n<tool_call>\n{"name": "lookup", "arguments": {"item": "pears"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "lookup", "arguments": {"item": "plums"}}\n</tool_call><|im_end|>'
)
BARE_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"item": "pears"}}\n</tool_call><|im_end|>'
THOUGHTFUL = "<think>\ntwelve and seven\n</think>\n\nPears are 12, plums 7.<|im_end|>"
ANSWER = "Pears are 12, plums 7.<|im_end|>"

DIALECT = Responses("m", Renderer.load(Path(tokentape.demo.__file__).parent / "model").tokenizer)


def decode(**body: Any) -> DecodedRequest:
    return asyncio.run(DIALECT.decode({"input": "hi", **body}, FakeContext()))


def read_items(*items: Any) -> list[Any]:
    return list(decode(input=list(items)).turn.messages)


@pytest.fixture
def client(gateway_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(renderer: Renderer, store: SqliteStore) -> Iterator[Callable[..., OpenAI]]:
    """A client of session `s` of a gateway with scripted replies."""
    with ExitStack() as opened:

        def start(*replies: str, **more: Any) -> OpenAI:
            app = create_app(Turns(ScriptedEngine(renderer, replies, **more), renderer, store), model_id="script")
            url = opened.enter_context(running(app))
            return opened.enter_context(OpenAI(base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0))

        yield start


def ask(client: OpenAI, input_items: Any, *, stream: bool = False, **more: Any) -> Any:
    """The response, put together by the client's own stream helper if it is streamed."""
    sent = {"model": "any", "input": input_items, **more}
    if not stream:
        return client.responses.create(**sent)
    last: Any = list(client.responses.create(stream=True, **sent))[-1]
    assert last.type in ("response.completed", "response.incomplete"), last
    return last.response


def items_of(response: Any, *, reasoning: bool = True) -> list[Any]:
    """The output as an agent sends it back."""
    items = [item.model_dump(exclude_none=True) for item in response.output]
    return items if reasoning else [item for item in items if item["type"] != "reasoning"]


def results_for(response: Any, result: Callable[[str, str], str]) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": result(item.name, item.arguments)}
        for item in response.output
        if item.type == "function_call"
    ]


def test_reply_is_what_was_sampled_and_recorded(client: OpenAI, engine: SharedEngine, store: SqliteStore) -> None:
    reply = ask(client, "What is 3 plus 4?", temperature=0, max_output_tokens=64, extra_body={"return_token_ids": True})
    (sampled,) = engine.finished
    turn = store.load_session(reply.tokentape["session_id"]).turns[0]
    assert turn.completion_ids.tolist() == reply.token_ids == list(sampled.token_ids)
    assert turn.added_ids.tolist() == reply.prompt_token_ids == list(sampled.prompt_ids)
    assert reply.output_text == turn.reply["content"]
    assert (reply.object, reply.status, reply.model) == ("response", "completed", "tiny")
    assert reply.usage.total_tokens == len(reply.prompt_token_ids) + len(reply.token_ids)


def test_stream_equals_non_stream(client: OpenAI) -> None:
    more: dict[str, Any] = {
        "temperature": 0,
        "max_output_tokens": 64,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "extra_body": {"return_token_ids": True},
    }
    whole = ask(client, "What is 3 plus 4?", **more)
    streamed = ask(client, "What is 3 plus 4?", stream=True, **more)
    random = {"id": ..., "created_at": ..., "completed_at": ..., "tokentape": ..., "output": ...}
    assert {**streamed.model_dump(), **random} == {**whole.model_dump(), **random}
    for item, other in zip(streamed.output, whole.output, strict=True):
        assert alike({**item.model_dump(), "id": ...}, {**other.model_dump(), "id": ...})


def alike(item: Any, other: Any) -> bool:
    """Return whether two values are equal, logprobs up to rounding: in another batch their last digits differ."""
    if isinstance(item, float) and isinstance(other, float):
        return item == pytest.approx(other, abs=1e-4)
    if isinstance(item, dict) and isinstance(other, dict):
        return item.keys() == other.keys() and all(alike(item[key], other[key]) for key in item)
    if isinstance(item, list) and isinstance(other, list):
        return len(item) == len(other) and all(map(alike, item, other))
    return bool(item == other)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("stream", "reasoning"),
    [
        (True, True),
        (False, False),
        *(pytest.param(stream, not stream, marks=pytest.mark.slow) for stream in (True, False)),
    ],
)
def test_real_model_completes_tasks_with_tools(
    gateway_url: str, engine: SharedEngine, store: SqliteStore, stream: bool, reasoning: bool
) -> None:
    (task,) = sample_tasks(seed=3, n=1, split="heldout")
    items: list[Any] = []
    calls = 0
    with OpenAI(base_url=f"{gateway_url}/sessions/s/v1", api_key="none", max_retries=0) as client:
        for prompt in task.prompts:
            items.append({"role": "user", "content": prompt})
            for _ in range(6):
                reply = ask(
                    client,
                    items,
                    stream=stream,
                    instructions=SYSTEM_PROMPT,
                    tools=FLAT_TOOLS,
                    temperature=0,
                    store=False,
                    include=["reasoning.encrypted_content"],
                )
                items += items_of(reply, reasoning=reasoning)
                results = results_for(reply, lambda name, arguments: call_tool(task, name, arguments))
                items += results
                calls += len(results)
                if not results:
                    break
    assert calls
    stored = store.load_session("s")
    (trajectory,) = trajectories(Session(stored.info, stored.turns))
    assert trajectory.verdict == "exact, other logprobs"  # greedy
    assert all(turn.fork is None for turn in stored.turns)
    for start, end, sampled in zip(
        trajectory.completion_starts, trajectory.completion_ends, engine.finished, strict=True
    ):
        assert trajectory.token_ids[:start].tolist() == list(sampled.prompt_ids)
        assert trajectory.token_ids[start:end].tolist() == list(sampled.token_ids)


def test_response_echoes_metadata_store_and_user(scripted: Callable[..., OpenAI]) -> None:
    response = ask(scripted("hi<|im_end|>"), "hi", metadata={"a": "b"}, store=False, user="u")
    assert (response.metadata, response.store, response.user) == ({"a": "b"}, False, "u")


@pytest.mark.parametrize("stream", [False, True])
def test_previous_response_id_continues_the_session(client: OpenAI, store: SqliteStore, stream: bool) -> None:
    previous = None
    for seq in range(3):
        reply = ask(
            client,
            f"question {seq}",
            stream=stream,
            instructions="You help in a shop.",
            tools=FLAT_TOOLS,
            previous_response_id=previous,
            max_output_tokens=12,
        )
        assert reply.previous_response_id == previous
        previous = reply.id
    stored = store.load_session(reply.tokentape["session_id"])
    assert [(turn.parent, turn.fork) for turn in stored.turns] == [(None, None), (0, None), (1, None)]
    roles = [[message["role"] for message in turn.messages] for turn in stored.turns]
    assert roles == [["system", "user"], ["user"], ["user"]]


def test_previous_response_id_holds_after_a_restart(renderer: Renderer, engine: SharedEngine, tmp_path: Path) -> None:
    def gateway() -> Any:
        return running(create_app(Turns(engine, renderer, SqliteStore.open(tmp_path / "kept")), model_id="tiny"))

    more: dict[str, Any] = {"max_output_tokens": 12, "extra_body": {"return_token_ids": True}}
    with gateway() as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        first = ask(client, "hi", instructions="Be kind.", **more)
    with gateway() as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        second = ask(client, "again", instructions="Be kind.", previous_response_id=first.id, **more)
        assert second.prompt_token_ids[: len(first.prompt_token_ids) + len(first.token_ids)] == (
            first.prompt_token_ids + first.token_ids
        )
        assert client.responses.retrieve(first.id).output == first.output


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("Be kind.", ["Be kind.\n\nUse metric units."]),
        ("Be short.", ["Be short.\n\nUse metric units."]),
        (None, ["Use metric units."]),
    ],
)
def test_instructions_are_not_carried_over(
    scripted: Callable[..., OpenAI], store: SqliteStore, instructions: str | None, expected: list[str]
) -> None:
    client = scripted(ANSWER, ANSWER)
    developer = {"role": "developer", "content": "Use metric units."}
    first = ask(client, [developer, {"role": "user", "content": "hi"}], instructions="Be kind.")
    ask(client, "again", instructions=instructions, previous_response_id=first.id)
    stored = store.load_session("s")
    path = Session(stored.info, stored.turns).path(1)
    assert [m["content"] for turn in path for m in turn.messages if m["role"] == "system"] == expected
    assert (stored.turns[1].fork is None) == (instructions == "Be kind.")
    assert client.responses.retrieve(first.id).instructions == "Be kind."


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "scripted_reply", [CALLS, BARE_CALL, THOUGHTFUL, ANSWER, "<|im_end|>", "<think>\nhm<|im_end|>"]
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reasoning", [False, True])
def test_returned_items_equal_the_recorded_reply(
    scripted: Callable[..., OpenAI], store: SqliteStore, scripted_reply: str, stream: bool, reasoning: bool
) -> None:
    client = scripted(scripted_reply, ANSWER)
    question = {"role": "user", "content": "What do they cost?"}
    reply = ask(client, [question], tools=FLAT_TOOLS, stream=stream)
    sent = items_of(reply, reasoning=reasoning)
    (message,) = read_items(*sent)
    turn = store.load_session("s").turns[0]
    assert message_key(message) == message_key(turn.reply)
    rest = results_for(reply, lambda *_: "12") or [{"role": "user", "content": "thanks"}]
    ask(client, [question, *sent, *rest], tools=FLAT_TOOLS, stream=stream)
    assert [(turn.parent, turn.fork) for turn in store.load_session("s").turns] == [(None, None), (0, None)]


def test_text_that_is_sent_back_after_the_calls_is_the_same_reply(
    scripted: Callable[..., OpenAI], store: SqliteStore
) -> None:
    client = scripted(CALLS, ANSWER)
    response = client.responses.create(model="m", input="hi", tools=FLAT_TOOLS)  # type: ignore[arg-type]
    reasoning, message, *calls = [item.model_dump() for item in response.output]
    text = {"role": "assistant", "content": message["content"][0]["text"]}
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "12"} for call in calls]
    # In Haystack's order.
    items: Any = [{"role": "user", "content": "hi"}, reasoning, *calls, text, *results]
    client.responses.create(model="m", input=items, tools=FLAT_TOOLS)  # type: ignore[arg-type]
    (session,) = store.sessions()
    turns = store.load_session(session.info.session_id).turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None)]


def test_items_may_be_named_by_their_ids(scripted: Callable[..., OpenAI], store: SqliteStore) -> None:
    client = scripted(CALLS, ANSWER)
    question = {"role": "user", "content": "What do they cost?"}
    reply = ask(client, [question], tools=FLAT_TOOLS)
    named = [{"type": "item_reference", "id": item.id} for item in reply.output]
    ask(client, [question, *named, *results_for(reply, lambda *_: "12")], tools=FLAT_TOOLS)
    assert [(turn.parent, turn.fork) for turn in store.load_session("s").turns] == [(None, None), (0, None)]


def test_stream_has_all_events_in_order(scripted: Callable[..., OpenAI]) -> None:
    events = list(
        scripted(CALLS).responses.create(model="any", input="hi", tools=FLAT_TOOLS, stream=True)  # type: ignore[call-overload]
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "output_text.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "completed",
    ]
    assert kinds[-9:] == [*call, *call, "completed"]
    final = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    assert [item.type for item in done] == ["reasoning", "message", "function_call", "function_call"]
    for event in events:
        if hasattr(event, "output_index") and hasattr(event, "item_id"):
            assert final.output[event.output_index].id == event.item_id
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert (text, thought) == ("One moment.", "look it up")


def test_stream_helper_of_the_client_puts_the_response_together(scripted: Callable[..., OpenAI]) -> None:
    with scripted(CALLS).responses.stream(model="any", input="hi", tools=FLAT_TOOLS) as stream:  # type: ignore[arg-type]
        final = stream.get_final_response()
    assert final.output_text == "One moment."
    assert [item.arguments for item in final.output if item.type == "function_call"] == [
        '{"item": "pears"}',
        '{"item": "plums"}',
    ]


def test_reasoning_after_the_text_is_sent_last_and_continues_the_session(
    scripted: Callable[..., OpenAI], store: SqliteStore
) -> None:
    client = scripted("Hello. <think>\nmore to say\n</think>\n\nBye.<|im_end|>", ANSWER)
    reply = ask(client, "hi", stream=True)
    assert [item.type for item in reply.output] == ["message", "reasoning"]
    ask(client, [{"role": "user", "content": "hi"}, *items_of(reply), {"role": "user", "content": "so?"}])
    assert [turn.fork for turn in store.load_session("s").turns] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_cut_reply_is_incomplete(scripted: Callable[..., OpenAI], stream: bool) -> None:
    reply = ask(scripted("one two three"), "hi", stream=stream)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[-1].status == "incomplete"


def test_stream_ends_after_the_turn_is_durable(scripted: Callable[..., OpenAI], store: SqliteStore) -> None:
    for event in scripted(ANSWER).responses.create(model="any", input="hi", stream=True):
        if event.type == "response.completed":
            assert len(store.load_session("s").turns) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_function_namespaces_are_flattened_and_stay_distinct(
    scripted: Callable[..., OpenAI], store: SqliteStore, stream: bool
) -> None:
    client = scripted(BARE_CALL.replace('"lookup"', '"shop__lookup"'), ANSWER)
    tools: Any = [{"type": "namespace", "name": "shop", "description": "", "tools": FLAT_TOOLS}]
    question = {"role": "user", "content": "What do pears cost?"}
    reply = ask(client, [question], tools=tools, stream=stream)
    (call,) = reply.output
    assert (call.namespace, call.name) == ("shop", "lookup")
    ask(client, [question, *items_of(reply), *results_for(reply, lambda *_: "12")], tools=tools)
    assert [turn.fork for turn in store.load_session("s").turns] == [None, None]


def test_logprobs_cover_every_sampled_token(client: OpenAI, store: SqliteStore) -> None:
    reply = ask(client, "hi", temperature=0, top_logprobs=3, include=["message.output_text.logprobs"])
    entries = reply.output[-1].content[0].logprobs
    turn = store.load_session(reply.tokentape["session_id"]).turns[0]
    np.testing.assert_array_equal(np.array([entry.logprob for entry in entries], np.float32), turn.logprobs)
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_retrieved_response_is_the_recorded_one(scripted: Callable[..., OpenAI]) -> None:
    client = scripted(CALLS)
    more: dict[str, Any] = {"instructions": "Be kind.", "tools": FLAT_TOOLS, "temperature": 0.5}
    response, got = ask(client, "hi", **more), None
    got = client.responses.retrieve(response.id)
    assert got.model_dump(exclude={"tools"}) == response.model_dump(exclude={"tools"})
    assert [tool.name for tool in got.tools] == [tool["name"] for tool in FLAT_TOOLS]  # type: ignore[union-attr]


@pytest.mark.parametrize("response_id", ["resp_1", "x", "resp_s_000000000000000000000000_0"])
def test_unknown_response_is_a_404(client: OpenAI, response_id: str) -> None:
    with pytest.raises(openai.NotFoundError) as retrieved:
        client.responses.retrieve(response_id)
    with pytest.raises(openai.NotFoundError) as continued:
        ask(client, "hi", previous_response_id=response_id)
    assert retrieved.value.body == continued.value.body


def test_response_of_another_owner_is_a_404(renderer: Renderer, store: SqliteStore) -> None:
    keys = {"one": "key-of-one-0123456", "two": "key-of-two-0123456"}
    app = create_app(Turns(ScriptedEngine(renderer, [ANSWER]), renderer, store), model_id="m", keys=Keys(keys))
    with running(app) as url:
        owner, two = (OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in keys.values())
        with owner, two:
            theirs = ask(owner, "hi").id
            assert owner.responses.retrieve(theirs).id == theirs
            messages = []
            for response_id in (theirs, "resp_s_000000000000000000000000_0"):
                with pytest.raises(openai.NotFoundError) as retrieved:
                    two.responses.retrieve(response_id)
                with pytest.raises(openai.NotFoundError) as continued:
                    ask(two, "hi", previous_response_id=response_id)
                messages += [retrieved.value.message, continued.value.message]
            assert len(set(messages)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_engine_error_before_the_first_token_has_its_own_status(scripted: Callable[..., OpenAI], stream: bool) -> None:
    client = scripted(ANSWER, fail_after=0, error=EngineError("connection reset"))
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model="any", input="hi", stream=stream)
    assert (caught.value.status_code, caught.value.code) == (502, "engine_error")


def test_engine_error_in_a_stream_fails_the_response(scripted: Callable[..., OpenAI], store: SqliteStore) -> None:
    client = scripted(ANSWER, fail_after=3, error=EngineError("connection reset"))
    *_, error, failed = client.responses.create(model="any", input="hi", stream=True)
    assert error.type == "error"
    assert (error.code, error.message) == ("engine_error", "connection reset")
    assert failed.type == "response.failed"
    assert failed.sequence_number == error.sequence_number + 1
    assert failed.response.error is not None
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
    assert [turn.finish_reason for turn in store.load_session("s").turns] == ["abort"]


def test_bug_in_a_stream_is_an_error_event_without_details(scripted: Callable[..., OpenAI]) -> None:
    client = scripted(ANSWER, fail_after=3, error=RuntimeError("SECRET"))
    *_, last = client.responses.create(model="any", input="hi", stream=True)
    assert last.type == "error"
    assert last.code == "internal_error"
    assert "SECRET" not in last.message


def test_codex_request_is_accepted() -> None:
    developer = {"type": "message", "id": "msg_3b2fb127-938a", "role": "developer"}
    request = decode(
        model="tiny",
        stream=True,
        input=[
            {**developer, "content": [{"type": "input_text", "text": "You are a coding agent."}]},
            {
                **developer,
                "content": [{"type": "input_text", "text": "Sandbox."}, {"type": "input_text", "text": "x"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say hi"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a b"}]},
        ],
        tools=[
            {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
            {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
            {"type": "web_search", "external_web_access": False},
        ],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
    )
    assert request.turn.messages == (
        {"role": "system", "content": "You are a coding agent.\n\nSandbox.x"},
        {"role": "user", "content": "say hi"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "exec_command", "arguments": {"cmd": "ls"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a b"},
    )
    assert [tool["function"]["name"] for tool in request.turn.tools] == ["exec_command", "agents__spawn"]
    assert request.ignored == ("tools", "reasoning")


def test_consecutive_replies_stay_separate() -> None:
    def assistant_item(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    assert read_items(assistant_item("a"), assistant_item("b")) == [assistant_item("a"), assistant_item("b")]
    assert read_items(thought("x"), assistant_item("a"), thought("y"), assistant_item("b")) == [
        {**assistant_item("a"), "reasoning_content": "x"},
        {**assistant_item("b"), "reasoning_content": "y"},
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parallel_tool_calls", False),
        ("reasoning", {"effort": "high"}),
        ("text", {"verbosity": "low"}),
        ("truncation", "auto"),
        ("tools", [{"type": "web_search_preview"}]),
    ],
)
def test_unenforced_parameter_is_accepted_and_reported(name: str, value: Any) -> None:
    request = decode(**{name: value})
    assert request.ignored == (name,)
    assert request.turn == decode().turn


@pytest.mark.parametrize("value", ["required", {"type": "function", "name": "f"}])
def test_forced_call_of_a_known_tool_is_accepted_and_reported(value: Any) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    request = decode(tools=tools, tool_choice=value)
    assert (request.ignored, request.turn) == (("tool_choice",), decode(tools=tools).turn)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "allowed_tools", "tools": [{"type": "web_search"}]},
        {"type": "required"},
        "function",
        "allowed_tools",
    ],
)
def test_tool_choice_without_a_function_is_accepted_without_tools(value: Any) -> None:
    assert decode(tool_choice=value).ignored == ("tool_choice",)


@pytest.mark.parametrize(
    "value",
    ["required", {"type": "function", "name": "f"}, {"type": "function"}, {"type": "allowed_tools", "tools": []}],
)
def test_a_choice_that_needs_a_function_is_refused_without_tools(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(tool_choice=value)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("foo", 1),
        ("background", True),
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("text", {"format": {"type": "json_object"}}),
        ("tool_choice", {"type": "file_search"}),
        ("tools", [{"type": "custom", "name": "f"}]),
        ("tools", [{"type": "local_shell"}]),
        ("include", ["message.input_image.image_url"]),
        ("truncation", "some"),
        ("context_management", [{"type": "compaction"}]),
        ("input", [{"type": "image_generation_call"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.2/x.png"}]}]),
        ("input", [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_file"}]}]),
        ("seed", 1),
    ],
)
def test_unsupported_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        decode(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input", None),
        ("input", 3),
        ("input", []),
        ("input", ["x"]),
        ("input", [{"role": "robot", "content": "x"}]),
        ("input", [{"role": "user"}]),
        ("input", [{"role": "user", "content": None}]),
        ("input", [{"type": "function_call", "call_id": "1", "name": "f"}]),
        ("input", [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]),
        ("input", [{"type": "reasoning", "summary": "x"}]),
        ("max_output_tokens", 0),
        ("top_logprobs", 21),
        ("instructions", []),
        ("tools", [{"type": "function"}]),
        ("tools", {}),
        ("stream", "yes"),
    ],
)
def test_wrong_type_or_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(**{name: value})
    assert caught.value.param == name


def test_an_unknown_field_of_text_is_named() -> None:
    assert decode(text={"fromat": {"type": "json_object"}}).ignored == ("text.fromat",)


def test_reference_to_an_unknown_item_is_not_found() -> None:
    for item_id in ("x", "msg_" + "0" * 24):
        with pytest.raises(NotFound):
            read_items({"type": "item_reference", "id": item_id})


def test_null_equals_an_omitted_field() -> None:
    assert decode(**dict.fromkeys({*ResponsesBody.__struct_fields__, *IGNORED} - {"input"})).turn == decode().turn


def test_path_and_previous_response_of_different_sessions_are_refused(gateway_url: str) -> None:
    body = {"input": "hi", "previous_response_id": f"resp_a_{'0' * 24}_0"}
    answer = httpx2.post(f"{gateway_url}/sessions/b/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")


def test_events_are_named_as_their_types(gateway_url: str) -> None:
    body = {"input": "hi", "stream": True, "max_output_tokens": 4}
    events = httpx2.post(f"{gateway_url}/v1/responses", json=body).text.strip().split("\n\n")
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
