"""The same agent over chat, Responses and Anthropic's Messages: the same ids go to the engine and into the record."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic import Anthropic
from msgspec.structs import replace
from openai import OpenAI

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

SYSTEM, QUESTION = ["You look things up.", "Answer in one line."], "How many pears and plums are there?"
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
LOOK = {"name": "look", "description": "Look something up."}

Agent = Callable[[str, bool], None]
"""Talks to a gateway's session at a URL; with True it sends texts as lists of parts."""


def call(item: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"item": "{item}"}}}}\n</tool_call>'


REPLIES = [
    f"<think>\nPears first.\n</think>\n\nOne moment.\n{call('pears')}<|im_end|>",
    f"<think>\nBoth at once.\n</think>\n\n{call('plums')}\n{call('figs')}<|im_end|>",
    "<think>\nThat is all.\n</think>\n\nThree pears, 14 plums.<|im_end|>",
    "Yes.<|im_end|>",
]
RESULTS = {"pears": "3", "plums": "14\n", "figs": "none: “sold out”"}
THANKS = "Sure?"


def texts(pieces: list[str], kind: str, *, parts: bool) -> Any:
    """The texts as one, or as the parts that an API has; a template writes parts one after the other."""
    return [{"type": kind, "text": piece} for piece in pieces] if parts else "".join(pieces)


def over_chat(url: str, parts: bool) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [
            {"role": "system", "content": texts(SYSTEM, "text", parts=parts)},
            {"role": "user", "content": texts([QUESTION], "text", parts=parts)},
        ]
        tools: list[Any] = [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}]
        for _ in REPLIES:
            reply = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            for tool_call in messages[-1].get("tool_calls", ()):
                result = texts([RESULTS[json.loads(tool_call["function"]["arguments"])["item"]]], "text", parts=parts)
                messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": result})
            if messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": THANKS})


def over_responses(url: str, parts: bool) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        items: list[Any] = [{"role": "user", "content": texts([QUESTION], "input_text", parts=parts)}]
        named: dict[str, Any] = {"instructions": "".join(SYSTEM)}
        if parts:
            items.insert(0, {"role": "system", "content": texts(SYSTEM, "input_text", parts=True)})
            named = {}
        tools: list[Any] = [{"type": "function", **LOOK, "parameters": SCHEMA}]
        for _ in REPLIES:
            reply = client.responses.create(model="m", input=items, tools=tools, **named)
            reply_items = [item.model_dump(exclude_none=True) for item in reply.output]
            items += reply_items
            for reply_item in reply_items:
                if reply_item["type"] == "function_call":
                    output = texts([RESULTS[json.loads(reply_item["arguments"])["item"]]], "input_text", parts=parts)
                    items.append({"type": "function_call_output", "call_id": reply_item["call_id"], "output": output})
            if reply_items[-1]["type"] == "message":
                items.append({"role": "user", "content": THANKS})


def over_messages(url: str, parts: bool) -> None:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": texts([QUESTION], "text", parts=parts)}]
        tools: list[Any] = [{**LOOK, "input_schema": SCHEMA}]
        system = "".join(SYSTEM)
        for _ in REPLIES:
            reply = client.messages.create(model="m", system=system, max_tokens=99, messages=messages, tools=tools)
            blocks = [block.model_dump(exclude_none=True) for block in reply.content]
            results: list[Any] = [
                {
                    "type": "tool_result",
                    "tool_use_id": block["id"],
                    "content": texts([RESULTS[block["input"]["item"]]], "text", parts=parts),
                }
                for block in blocks
                if block["type"] == "tool_use"
            ]
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results or THANKS}]


def compare(
    renderer: Renderer,
    store: SqliteStore,
    agent: Agent,
    *,
    parts: bool = False,
    plant: Callable[[TurnRequest], TurnRequest] = lambda request: request,
) -> None:
    """Assert that an agent has the ids of the one over chat. `plant` changes the requests of the former."""
    engine = ScriptedEngine(renderer, REPLIES * 2)
    engine.split_next = True
    turns = Turns(engine, renderer, store)
    begin = turns.begin
    turns.begin = lambda request: begin(plant(request) if request.session_id == "other" else request)  # type: ignore[method-assign]
    with running(create_app(turns, model_id="m")) as url:
        over_chat(f"{url}/sessions/chat", False)
        engine.split_next = True
        agent(f"{url}/sessions/other", parts)
        chat, other = store.load_session("chat").turns, store.load_session("other").turns
    assert [turn.parent for turn in chat] == [turn.parent for turn in other] == [None, 0, 1, 2]
    for at, (expected, actual) in enumerate(zip(chat, other, strict=True)):
        assert engine.requests[at][0] == engine.requests[at + len(REPLIES)][0]
        assert expected.added_ids.tolist() == actual.added_ids.tolist()
        assert expected.added_provenance.tolist() == actual.added_provenance.tolist()
        assert expected.completion_ids.tolist() == actual.completion_ids.tolist()
    canonical = renderer.tokenizer.encode_plain(REPLIES[0])
    assert chat[0].completion_ids.tolist() != canonical


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("agent", [over_chat, over_responses, over_messages])
def test_the_same_agent_has_the_same_ids_turn_by_turn(
    renderer: Renderer, store: SqliteStore, agent: Agent, parts: bool
) -> None:
    compare(renderer, store, agent, parts=parts)


def changed(of: str, **fields: Any) -> Callable[[TurnRequest], TurnRequest]:
    """Changes fields of the messages of a role: a value, or a function of the old one."""

    def message(old: Any) -> Any:
        new = {name: value(old.get(name) or "") if callable(value) else value for name, value in fields.items()}
        return {**old, **new} if old["role"] == of else old

    return lambda request: replace(request, messages=tuple(map(message, request.messages)))


def described(request: TurnRequest) -> TurnRequest:
    tools = [
        {**tool, "function": {**tool["function"], "description": tool["function"]["description"] + " "}}
        for tool in request.tools
    ]
    return replace(request, tools=tuple(tools))


def swapped(request: TurnRequest) -> TurnRequest:
    messages = list(request.messages)
    tools = [at for at, message in enumerate(messages) if message["role"] == "tool"]
    if len(tools) > 2:
        messages[tools[1]], messages[tools[2]] = messages[tools[2]], messages[tools[1]]
    return replace(request, messages=tuple(messages))


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(described, id="a space after a tool's description"),
        pytest.param(swapped, id="results of parallel calls the other way round"),
        pytest.param(changed("system", role="user"), id="the system prompt of another role"),
        pytest.param(changed("system", content=lambda text: text + "\n"), id="a line break after the system prompt"),
        pytest.param(changed("tool", content=lambda text: text.strip()), id="a result without its line break"),
        pytest.param(changed("assistant", content=lambda text: text + "!"), id="one sign more in a reply"),
        pytest.param(changed("assistant", tool_calls=None), id="replies without calls"),
        pytest.param(lambda request: replace(request, tools=()), id="no tools"),
    ],
)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("agent", [over_responses, over_messages])
def test_planted_difference_between_apis_is_found(
    renderer: Renderer, store: SqliteStore, agent: Agent, plant: Callable[[TurnRequest], TurnRequest]
) -> None:
    with pytest.raises(AssertionError):
        compare(renderer, store, agent, plant=plant)
