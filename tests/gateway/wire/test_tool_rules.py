"""Forced tool choices and strict tools: reported, or with `enforce_tools` enforced by the engine or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.gateway.wire.test_client_defaults import IGNORED, USER, Served
from tokentape.chat._renderer import Renderer
from tokentape.gateway._sampling import resume_obstacle
from tokentape.store import SqliteStore
from tokentape.types import TokenDistribution

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CALL = '<tool_call>\n{"name": "look", "arguments": {"name": "Rome"}}\n</tool_call><|im_end|>'
NAMED = {"type": "function", "function": {"name": "look"}}


def tools(*, strict: bool = False) -> list[Any]:
    named = [{"name": name, "parameters": SCHEMA, "strict": strict} for name in ("look", "see")]
    return [{"type": "function", "function": function} for function in named]


def flat(*, strict: bool = False) -> list[Any]:
    return [{"type": "function", **tool["function"]} for tool in tools(strict=strict)]


def messages_tools(*, strict: bool = False) -> list[Any]:
    return [{"name": name, "input_schema": SCHEMA, "strict": strict} for name in ("look", "see")]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def serve(renderer: Renderer, store: SqliteStore, opened: ExitStack) -> Callable[..., Served]:
    def serve(**settings: Any) -> Served:
        served = Served(renderer, store, opened, **settings)
        served.engine.info = replace(served.engine.info, sampling=ScriptedEngine.EVERYTHING - {"adapter"})
        served.engine.replies = [CALL] * 8
        return served

    return serve


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve(enforce_tools=True)


def constraints(served: Served) -> list[list[str] | None]:
    """Per call of the engine the tools that its first call may be of; None for no constraint."""
    tags = [params.structural_tag for _, params in served.engine.requests]
    return [
        None if tag is None else [name for name in ("look", "see") if f'"name\\": \\"{name}\\"' in tag] for tag in tags
    ]


def chat(served: Served, **more: Any) -> str | None:
    """Call chat completions, and return the fields that the reply reports as ignored."""
    found: str | None = served.chat(**{"tools": tools(), **more}).headers.get(IGNORED)
    return found


def test_forced_calls_are_only_reported_without_the_setting(serve: Callable[..., Served]) -> None:
    served = serve()
    assert chat(served, tools=tools(strict=True), tool_choice="required") == "tool_choice, tools.strict"
    assert constraints(served) == [None]


def test_required_choice_allows_any_tool_and_is_recorded(served: Served) -> None:
    assert chat(served, tool_choice="required", parallel_tool_calls=False) is None
    assert constraints(served) == [["look", "see"]]
    (turn,) = served.store.load_session("s").turns
    assert json.loads(turn.sampling["structural_tag"])["type"] == "structural_tag"
    assert turn.sampled_from == TokenDistribution(False, 1.0, False, True)
    assert turn.logprobs_of == turn.sampled_from
    ((_, held),) = served.engine.requests
    assert resume_obstacle(held, served.engine.info) == "structural_tag"


def test_named_tool_is_the_only_allowed_one(served: Served) -> None:
    chat(served, tool_choice=NAMED)
    chat(served, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}})
    served.openai().responses.create(
        model="m", input="hi", tools=flat(), tool_choice={"type": "function", "name": "look"}
    )
    served.anthropic().messages.create(
        model="m",
        max_tokens=40,
        messages=[USER],
        tools=messages_tools(),
        tool_choice={"type": "tool", "name": "look"},
    )
    assert constraints(served) == [["look"]] * 4


def test_any_tool_may_be_called_in_each_api(served: Served) -> None:
    served.openai().responses.create(model="m", input="hi", tools=flat(), tool_choice="required")
    choice: Any = {"type": "any"}
    served.anthropic().messages.create(
        model="m", max_tokens=40, messages=[USER], tools=messages_tools(), tool_choice=choice
    )
    assert constraints(served) == [["look", "see"]] * 2


def test_a_function_of_a_namespace_is_chosen_by_its_own_name(served: Served) -> None:
    group: Any = {"type": "namespace", "name": "files", "description": "", "tools": flat()}
    served.openai().responses.create(
        model="m", input="hi", tools=[group], tool_choice={"type": "function", "name": "look"}
    )
    ((_, params),) = served.engine.requests
    assert "files__look" in (params.structural_tag or "")
    assert "files__see" not in (params.structural_tag or "")


def strict_calls(served: Served) -> list[Callable[[], Any]]:
    return [
        lambda: served.chat(tools=tools(strict=True)),
        lambda: served.openai().responses.create(model="m", input="hi", tools=flat(strict=True)),
        lambda: served.anthropic().messages.create(
            model="m", max_tokens=40, messages=[USER], tools=messages_tools(strict=True)
        ),
    ]


def test_strict_tools_leave_the_choice_to_the_model(served: Served) -> None:
    for send in strict_calls(served):
        send()
    for _, params in served.engine.requests:
        assert json.loads(params.structural_tag or "")["format"]["type"] == "token_dispatch"


def test_tools_that_are_neither_forced_nor_strict_are_not_constrained(served: Served) -> None:
    chat(served)
    chat(served, tools=tools(strict=True), tool_choice="none")
    assert constraints(served) == [None, None]


def test_engine_without_structural_tags_refuses_with_advice(served: Served) -> None:
    served.engine.info = replace(served.engine.info, sampling=ScriptedEngine.EVERYTHING - {"structural_tag"})
    for send in (lambda: chat(served, tool_choice="required"), *strict_calls(served)):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="in a message"):
            send()
    assert served.engine.requests == []


def test_allowed_tools_that_need_not_be_called_are_refused(served: Served) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    with pytest.raises(openai.BadRequestError, match="only the tools that may be called"):
        chat(served, tool_choice=choice)
    assert served.engine.requests == []


@pytest.mark.parametrize(
    "choice", ["function", {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}]
)
def test_a_choice_that_names_no_function_is_refused(served: Served, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="can't be enforced"):
        served.openai().responses.create(model="m", input="hi", tools=flat(), tool_choice=choice)
    assert served.engine.requests == []


def test_template_without_json_calls_refuses_forced_calls(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    form = served.renderer.format

    def tagged(setup: Any) -> Any:
        found = form(setup)
        assert found.calls is not None
        return replace(found, calls=replace(found.calls, style="tagged"))

    monkeypatch.setattr(served.renderer, "format", tagged)
    with pytest.raises(openai.BadRequestError, match="template"):
        chat(served, tool_choice="required")
