"""Replies that follow a schema: passed on to engines that rule tokens out, recorded, or refused with an alternative."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from pydantic import BaseModel

from tests.gateway.scripted import ScriptedEngine
from tests.gateway.wire.test_client_defaults import USER, Served
from tokentape.chat._renderer import Renderer
from tokentape.gateway._sampling import resume_obstacle
from tokentape.store import SqliteStore
from tokentape.types import TokenDistribution


class City(BaseModel):
    """The requested format."""

    name: str


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
REPLY = '{"name": "Rome"}<|im_end|>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def served(renderer: Renderer, store: SqliteStore, opened: ExitStack) -> Served:
    served = Served(renderer, store, opened)
    served.engine.info = replace(served.engine.info, sampling=ScriptedEngine.EVERYTHING)
    served.engine.replies = [REPLY] * 8
    return served


def held_to(served: Served) -> list[Any]:
    """The schema in each request to the engine."""
    return [params.json_schema and json.loads(params.json_schema) for _, params in served.engine.requests]


def test_the_schema_of_chat_s_parse_reaches_the_engine_and_is_recorded(served: Served) -> None:
    reply = served.openai().chat.completions.parse(model="m", messages=[USER], response_format=City)
    assert reply.choices[0].message.parsed == City(name="Rome")
    (schema,) = held_to(served)
    assert schema["properties"]["name"]["type"] == "string"
    (turn,) = served.store.load_session("s").turns
    assert json.loads(turn.sampling["json_schema"]) == schema
    assert turn.sampled_from == TokenDistribution(False, 1.0, False, True)
    assert turn.logprobs_of == turn.sampled_from


def test_the_schema_of_responses_parse_reaches_the_engine(served: Served) -> None:
    reply = served.openai().responses.parse(model="m", input="hi", text_format=City)
    assert reply.output_parsed == City(name="Rome")
    assert held_to(served)[0]["properties"]["name"]["type"] == "string"
    assert reply.text is not None
    assert reply.text.format is not None
    assert reply.text.format.type == "json_schema"


def test_the_schema_of_anthropic_s_output_config_reaches_the_engine(served: Served) -> None:
    form: Any = {"type": "json_schema", "schema": SCHEMA}
    served.anthropic().messages.create(model="m", max_tokens=20, messages=[USER], output_config={"format": form})
    assert held_to(served) == [SCHEMA]


def test_completions_take_a_schema_too(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    served.openai().completions.create(model="m", prompt="hi", extra_body={"response_format": form})
    assert held_to(served) == [SCHEMA]


def test_a_json_object_is_any_object_and_text_no_schema(served: Served) -> None:
    served.chat(response_format={"type": "json_object"})
    served.chat(response_format={"type": "text"})
    assert held_to(served) == [{"type": "object"}, None]
    assert "json_schema" not in served.store.load_session("s").turns[1].sampling


def schema_requests(served: Served) -> list[Callable[[], Any]]:
    """A schema in each API."""
    chat: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    flat: Any = {"type": "json_schema", "name": "city", "schema": SCHEMA}
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    return [
        lambda: served.chat(response_format=chat),
        lambda: served.openai().responses.create(model="m", input="hi", text={"format": flat}),
        lambda: served.anthropic().messages.create(model="m", max_tokens=8, messages=[USER], output_config=form),
    ]


def test_engine_without_schema_support_refuses_with_advice(served: Served) -> None:
    served.engine.info = replace(served.engine.info, sampling=ScriptedEngine.EVERYTHING - {"json_schema"})
    for send in schema_requests(served):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="function call"):
            send()
    assert served.engine.requests == []


def test_a_schema_and_tools_together_are_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="one or the other"):
        served.chat(response_format={"type": "json_object"}, tools=[TOOL])
    served.chat(response_format={"type": "json_object"}, tools=[TOOL], tool_choice="none")
    assert held_to(served) == [{"type": "object"}]


@pytest.mark.parametrize(
    "form",
    [
        "json_schema",
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": "oops"},
        {"type": "json_schema", "json_schema": {"schema": 1}},
    ],
)
def test_invalid_schema_is_refused(served: Served, form: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="expected a JSON Schema"):
        served.chat(response_format=form)


@pytest.mark.parametrize("form", [{"typ": "json_object"}, {"schema": SCHEMA}, {"type": None, "json_schema": {}}])
def test_a_format_without_a_type_is_refused(served: Served, form: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format has no type; expected text"):
        served.chat(response_format=form)
    with pytest.raises(openai.BadRequestError, match=r"text\.format has no type"):
        served.openai().responses.create(model="m", input="hi", text={"format": form})
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format has no type"):
        served.anthropic().messages.create(model="m", max_tokens=8, messages=[USER], output_config={"format": form})
    assert served.engine.requests == []


def test_schema_is_refused_if_the_prompt_ends_inside_reasoning(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = served.renderer.parser

    def thinking(setup: Any, stops: Any, prompt_ids: Any) -> Any:
        # As if the prompt ended within reasoning.
        begun = served.renderer.tokenizer.encode_plain("<|im_start|>assistant\n<think>\n")
        return parser(setup, stops, np.array(begun, np.int32))

    monkeypatch.setattr(served.renderer, "parser", thinking)
    with pytest.raises(openai.BadRequestError, match="turn reasoning off"):
        served.chat(response_format={"type": "json_object"})


def test_a_reply_that_follows_a_schema_is_not_resumed(served: Served) -> None:
    served.chat(response_format={"type": "json_object"})
    served.chat()
    (_, held), (_, free) = served.engine.requests
    assert resume_obstacle(held, served.engine.info) == "json_schema"
    assert resume_obstacle(free, served.engine.info) is None
