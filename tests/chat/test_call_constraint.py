"""Constraints on replies with tool calls; `tests/differential` samples replies with XGrammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chat.conftest import ADD, load_renderer
from tokentape.chat._call_constraint import CallRule, structural_tag

OTHER: Any = {"type": "function", "function": {"name": "find", "description": "Find it."}}


def made(template: str, rule: CallRule) -> Any:
    """Return the format of the structural tag for a question; None without a tag."""
    renderer = load_renderer(template)
    setup = renderer.setup([ADD, OTHER])
    prompt = renderer.render([{"role": "user", "content": "?"}], setup).ids
    form = renderer.format_after(prompt, renderer.format(setup))
    tag = structural_tag(rule, form, renderer.tokenizer, setup.tools, renderer.stop_ids(setup))
    return None if tag is None else json.loads(tag)["format"]


def token(template: str, content: str) -> dict[str, Any]:
    control = load_renderer(template).tokenizer.control(content)
    assert control is not None
    return {"type": "token", "token": control.id}


def text(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def test_constraint_of_a_call_has_delimiters_name_and_schema() -> None:
    template = "qwen2_5/templates/Qwen2.5-Instruct.jinja"
    find = [text('{"name": "find", "arguments": '), schema({"type": "object"})]
    assert made(template, CallRule(("find",), parallel=False))["elements"] == [
        token(template, "<tool_call>"),
        text("\n"),
        {"type": "or", "elements": [{"type": "sequence", "elements": find}]},
        text("}\n"),
        token(template, "</tool_call>"),
    ]


def test_several_calls_may_follow_each_other() -> None:
    form = made("qwen2_5/templates/Qwen2.5-Instruct.jinja", CallRule(("add", "find")))
    (more,) = [element for element in form["elements"] if element["type"] == "star"]
    (either,) = [element for element in more["content"]["elements"] if element["type"] == "or"]
    assert [element["elements"][-1] for element in either["elements"]] == [
        schema(ADD["function"]["parameters"]),
        schema({"type": "object"}),
    ]


def test_reasoning_may_come_first_and_has_to_end_if_the_prompt_began_it() -> None:
    optional = made("qwen3/templates/Qwen3.jinja", CallRule(("find",)))["elements"][0]
    assert optional["type"] == "optional"
    template = "qwen3/templates/Qwen3-Thinking-2507.jinja"
    thought, close = made(template, CallRule(("find",)))["elements"][:2]
    assert close == token(template, "</think>")
    # A call's control token within reasoning would be read as a call.
    assert {close["token"], token(template, "<tool_call>")["token"]} < set(thought["exclude_tokens"])


def test_strict_tools_are_constrained_wherever_they_are_called() -> None:
    template = "qwen2_5/templates/Qwen2.5-Instruct.jinja"
    form = made(template, CallRule(strict=frozenset({"add"})))
    assert form["type"] == "token_dispatch"
    ((begin, rest),) = form["rules"]
    assert begin == token(template, "<tool_call>")["token"]
    either = next(element for element in rest["elements"] if element["type"] == "or")
    schemas = [element["elements"][-1] for element in either["elements"]]
    assert schemas == [schema(ADD["function"]["parameters"]), schema({"type": "object"})]


@pytest.mark.parametrize("template", ["glm4_5/templates/key-value.jinja", "gpt_oss/templates/gpt-oss.jinja"])
def test_call_syntax_without_name_and_json_object_has_no_constraint(template: str) -> None:
    assert made(template, CallRule(("find",))) is None


def test_strict_calls_without_a_leading_control_token_have_no_constraint() -> None:
    template = "llama3/templates/bare-json.jinja"
    assert made(template, CallRule(strict=frozenset({"add"}))) is None
    assert made(template, CallRule(("add",))) is not None
