"""The same agent over chat, Responses and Anthropic's Messages: the same ids go to the engine and into the record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

SYSTEM, QUESTION = "You look things up.", "How many pears and plums are there?"
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
LOOK = {"name": "look", "description": "Look something up."}


def call(item: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"item": "{item}"}}}}\n</tool_call>'


REPLIES = [
    f"<think>\nPears first.\n</think>\n\nOne moment.\n{call('pears')}<|im_end|>",
    f"{call('plums')}\n{call('figs')}<|im_end|>",
    "<think>\nThat is all.\n</think>\n\nThree pears, 14 plums.<|im_end|>",
]
RESULTS = {"pears": "3", "plums": "14\n", "figs": "none: “sold out”"}


def over_chat(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        tools: list[Any] = [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}]
        for _ in REPLIES:
            reply = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            for one in messages[-1].get("tool_calls", ()):
                item = one["function"]["arguments"].split('"')[3]
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": RESULTS[item]})


def over_responses(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        given: list[Any] = [{"role": "user", "content": QUESTION}]
        tools: list[Any] = [{"type": "function", **LOOK, "parameters": SCHEMA}]
        for _ in REPLIES:
            reply = client.responses.create(model="m", instructions=SYSTEM, input=given, tools=tools)
            said = [item.model_dump(exclude_none=True) for item in reply.output]
            given += said
            for one in said:
                if one["type"] == "function_call":
                    output = RESULTS[one["arguments"].split('"')[3]]
                    given.append({"type": "function_call_output", "call_id": one["call_id"], "output": output})


def over_messages(url: str) -> None:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        tools: list[Any] = [{**LOOK, "input_schema": SCHEMA}]
        for _ in REPLIES:
            reply = client.messages.create(model="m", system=SYSTEM, max_tokens=99, messages=messages, tools=tools)
            said = [block.model_dump(exclude_none=True) for block in reply.content]
            results = [
                {"type": "tool_result", "tool_use_id": one["id"], "content": RESULTS[one["input"]["item"]]}
                for one in said
                if one["type"] == "tool_use"
            ]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]


@pytest.mark.parametrize("agent", [over_responses, over_messages])
def test_the_same_agent_has_the_same_ids_turn_by_turn(
    renderer: Renderer, store: SqliteStore, agent: Callable[[str], None]
) -> None:
    engine = ScriptedEngine(renderer, REPLIES * 2)
    engine.split_next = True
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        over_chat(f"{url}/sessions/chat")
        engine.split_next = True
        agent(f"{url}/sessions/other")
        chat, other = store.load_session("chat").turns, store.load_session("other").turns
    assert [turn.parent for turn in chat] == [turn.parent for turn in other] == [None, 0, 1]
    for at, (one, same) in enumerate(zip(chat, other, strict=True)):
        assert engine.asked[at][0] == engine.asked[at + 3][0]
        assert one.added_ids.tolist() == same.added_ids.tolist()
        assert one.added_provenance.tolist() == same.added_provenance.tolist()
        assert one.completion_ids.tolist() == same.completion_ids.tolist()
    canonical = renderer.tokenizer.encode_plain(REPLIES[0])
    assert chat[0].completion_ids.tolist() != canonical
