"""Bodies of Anthropic's Messages API: how they are decoded, and which are refused."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.request_context import FakeContext
from tokentape._session.matching import message_key
from tokentape.chat._template import ChatTemplate
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway._dialect import DecodedRequest
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._wire.anthropic_history import AnthropicMessage, Block, read_messages, tool_use
from tokentape.gateway._wire.anthropic_messages import IGNORED, AnthropicMessages

PLAIN = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools }}")
SWITCHED = ChatTemplate("{% if enable_thinking %}think{% endif %}")
STRICT = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
TOKENIZER: Any = None
"""Counts the tokens of replies; there are none here."""

DROPPING = ChatTemplate("{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}")
USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "hi"}
USE = {"type": "tool_use", "id": "a1", "name": "f", "input": {"x": 1}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def decode(template: ChatTemplate = PLAIN, **fields: Any) -> DecodedRequest:
    body = {"model": "any", "max_tokens": 8, "messages": [USER], **fields}
    return asyncio.run(AnthropicMessages("m", template, TOKENIZER).decode(body, FakeContext()))


def turn(template: ChatTemplate = PLAIN, **fields: Any) -> TurnRequest:
    return decode(template, **fields).turn


def messages_of(*messages: Any, template: ChatTemplate = PLAIN, **fields: Any) -> list[Any]:
    return list(turn(template, messages=list(messages), **fields).messages)


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a1", "content": content, **more}]}


def test_system_blocks_are_one_text() -> None:
    system = [
        {"type": "text", "text": "You ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "help."},
    ]
    assert messages_of(USER, system=system) == [{"role": "system", "content": "You help."}, USER]
    assert messages_of(USER, system="You help.") == messages_of(USER, system=system)
    assert messages_of(USER, system="") == [USER]


def test_billing_header_of_claude_code_is_left_out() -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}, {"type": "text", "text": "Help."}]
    assert messages_of(USER, system=system)[0] == {"role": "system", "content": "Help."}


def test_results_and_text_are_messages_of_their_own() -> None:
    blocks = [*result("12")["content"], {**TEXT, "text": "and "}, {**TEXT, "text": "now?"}]
    assert messages_of({"role": "user", "content": blocks}) == [
        {"role": "tool", "tool_call_id": "a1", "content": "12"},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("no such item", "Error: no such item"),
        ("", "Error: "),
        ([{"type": "text", "text": "Exit"}, {"type": "text", "text": "1"}], "Error: Exit\n1"),
        ("error: unknown", "error: unknown"),
        ("<tool_use_error>bad</tool_use_error>", "<tool_use_error>bad</tool_use_error>"),
        ("ValueError: bad", "ValueError: bad"),
    ],
)
def test_failed_tool_result_is_marked_as_failed(content: Any, expected: str) -> None:
    assert messages_of(result(content, is_error=True))[0]["content"] == expected
    assert not messages_of(result("12", is_error=False))[0]["content"].startswith("Error")


def test_result_without_content_is_empty() -> None:
    assert messages_of(result(None))[0]["content"] == ""


def test_assistant_blocks_are_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "One "},
        USE,
        {"type": "text", "text": "moment."},
    ]
    expected = {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "a1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert messages_of(USER, {"role": "assistant", "content": blocks}, result("1"))[1] == expected
    apart = [{"role": "assistant", "content": [block]} for block in blocks]
    assert messages_of(USER, *apart, result("1"))[1] == expected


def test_later_system_message_stays_if_the_template_supports_it() -> None:
    later = {"role": "system", "content": "be quick"}
    assert messages_of(USER, later, system="help") == [{"role": "system", "content": "help"}, USER, later]


@pytest.mark.parametrize("template", [STRICT, DROPPING])
def test_later_system_message_becomes_a_reminder_otherwise(template: ChatTemplate) -> None:
    later = {"role": "system", "content": [{"type": "text", "text": "be quick"}]}
    reminder = "<system-reminder>\nbe quick\n</system-reminder>"
    assert messages_of(later, USER, later, system="help", template=template) == [
        {"role": "system", "content": "help\n\nbe quick"},
        {"role": "user", "content": f"hi\n\n{reminder}"},
    ]
    assert messages_of(result("12"), later, template=template)[1] == {"role": "user", "content": reminder}


def test_tools_are_those_of_chat_completions() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"name": "f", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    (decoded,) = turn(tools=[tool]).tools
    assert json.dumps(decoded) == json.dumps(
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    )
    assert turn(tools=[{**tool, "type": "custom"}]).tools == (decoded,)
    assert turn(tools=[tool], tool_choice={"type": "none"}).tools == ()


def test_sampling_parameters() -> None:
    sampling = turn(max_tokens=9, temperature=0.5, top_k=3, stop_sequences=["a", "b"]).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (9, 0.5, 3)
    assert sampling.stop_strings == ("a", "b")


def test_thinking_is_disabled_only_on_request_with_a_supporting_template() -> None:
    disabled = {"type": "disabled"}
    assert turn(SWITCHED, thinking=disabled).template_kwargs == {"enable_thinking": False}
    assert turn(SWITCHED, thinking={"type": "adaptive"}).template_kwargs == {}
    assert turn(SWITCHED).template_kwargs == {}
    assert turn(PLAIN, thinking=disabled).template_kwargs == {}
    assert decode(PLAIN, thinking=disabled).ignored == ("thinking",)


def test_claude_code_request_is_accepted() -> None:
    request = decode(
        metadata={"user_id": "{}"},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        stream=True,
    )
    assert request.ignored == ("output_config.effort",)
    assert request.turn.stream


def test_an_unknown_field_of_the_output_config_is_named() -> None:
    assert decode(output_config={"fomat": {"type": "json_schema"}}).ignored == ("output_config.fomat",)


def test_fields_without_effect_are_accepted() -> None:
    assert decode(**dict.fromkeys(IGNORED, "x")).ignored == ()
    assert decode(container=None, mcp_servers=[]).ignored == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"container": "c1"}, "container"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, "messages"),
        ({"messages": [result([IMAGE])]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is ("}]}, "messages"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        decode(**fields)
    assert caught.value.param == param


def test_mistyped_parameter_error_suggests_the_right_name() -> None:
    with pytest.raises(
        UnsupportedParameter, match=re.escape("'temprature' is not supported; did you mean 'temperature'?")
    ):
        decode(temprature=1)


def test_search_results_are_refused_by_their_type() -> None:
    found = {"type": "search_result", "source": "https://x", "title": "t", "content": []}
    for message, where in [
        ({"role": "user", "content": [found]}, "content[0]"),
        (result([found]), "content[0].content[0]"),
    ]:
        with pytest.raises(UnsupportedParameter, match=re.escape(f"{where} has type 'search_result'")):
            decode(messages=[USER, message])


def test_refusal_names_the_place_and_the_type() -> None:
    with pytest.raises(UnsupportedParameter, match=re.escape("messages[1].content[0].content[0] has type 'image'")):
        decode(messages=[USER, result([IMAGE])])
    with pytest.raises(UnsupportedParameter, match="web_search_20250305"):
        decode(tools=[{"type": "web_search_20250305", "name": "web_search"}])


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"messages": [USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}, USER]},
        {"messages": [USER, {"role": "assistant", "content": [{**USE, "id": None}]}, USER]},
        {"tools": [{"name": "f"}]},
        {"tools": [{"input_schema": {}}]},
        {"tool_choice": {"type": "sometimes"}},
        {"stop_sequences": [""]},
        {"temperature": 3},
        {"system": [{"type": "text"}]},
    ],
)
def test_malformed_bodies_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        decode(**fields)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def test_deep_objects_are_refused() -> None:
    deep = nested(80)
    for fields in (
        {"tools": [{"name": "f", "input_schema": deep}]},
        {"chat_template_kwargs": deep},
        {"messages": [USER, {"role": "assistant", "content": [{**USE, "input": deep}]}, USER]},
    ):
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            decode(**fields)


@given(st.text(min_size=1), st.text(), st.text() | st.dictionaries(st.text(), st.integers()).map(json.dumps))
def test_call_comes_back_as_the_message_it_was(call_id: str, name: str, arguments: str) -> None:
    block, input_value = tool_use(call_id, name, arguments)
    assert re.fullmatch("[a-zA-Z0-9_-]+", block["id"])
    value = json.loads(input_value)
    assert isinstance(value, dict)
    blocks = [Block("tool_use", id=block["id"], name=name, input=value)]
    (message,) = read_messages("", [AnthropicMessage("assistant", blocks)], later_system=True)
    function = {"name": name, "arguments": arguments}
    original = {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    assert message_key(message) == message_key(original)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/sessions/s/v1/messages"])
def test_errors_have_the_shape_that_clients_read(gateway_url: str, path: str) -> None:
    answer = httpx2.post(f"{gateway_url}{path}", json={"messages": [USER], "max_tokens": 4, "frobnicate": 1})
    assert answer.status_code == 400
    assert answer.json() == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "parameter 'frobnicate' is not supported",
            "details": {"error_code": "unsupported_parameter", "param": "frobnicate"},
        },
    }
