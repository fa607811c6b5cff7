"""Chat completions requests that can't be served: every one is a 400 that names the culprit, none a 500."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tokentape.demo
from tests.gateway.request_context import FakeContext
from tests.searching import examples
from tokentape.chat._renderer import Renderer
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway._dialect import DecodedRequest
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._http import parse_json
from tokentape.gateway._wire.chat_completions import IGNORED, ChatCompletions, ChatCompletionsBody

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


DIALECT = ChatCompletions("m", Renderer.load(Path(tokentape.demo.__file__).parent / "model").tokenizer)


def decode(body: Any) -> DecodedRequest:
    return asyncio.run(DIALECT.decode(body, FakeContext()))


def read(**body: Any) -> TurnRequest:
    return decode({"messages": [USER], **body}).turn


def read_message(message: dict[str, Any]) -> Any:
    return read(messages=[message]).messages[0]


def test_tools_that_are_sent_again_are_not_read_again() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    first, second = (read(messages=[{"role": "user", "content": text}], tools=[tool]) for text in "ab")
    assert first.tools == ({"type": "function", "function": {"name": "f"}},)
    assert second.tools is first.tools


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("foo", 1),
        ("functions", []),
        ("prediction", {"type": "content", "content": "x"}),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("logit_bias", {"5": 1}),
        ("seed", 1),
        ("top_p", 0.5),
        ("min_p", 0.5),
        ("presence_penalty", 1),
        ("repetition_penalty", 1.5),
    ],
)
def test_unsupported_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter, match=name) as caught:
        read(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("parallel_tool_calls", False),
    ],
)
def test_unenforced_parameter_is_accepted_and_reported(name: str, value: Any) -> None:
    request = decode({"messages": [USER], "tools": [TOOL], name: value})
    assert (request.ignored, request.turn) == ((name,), read(tools=[TOOL]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", [USER, {"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_completion_tokens", 2**70),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 2**31),
        ("top_p", 0),
        ("n", 17),
        ("n", 0),
        ("seed", 2**63),
        ("stop", ["x"] * 17),
        ("stop", ""),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [-1]),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("tools", ["f"]),
        ("stream", "yes"),
        ("chat_template_kwargs", []),
        ("stream_options", 1),
    ],
)
def test_wrong_type_or_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [None, "yes", True, False])
def test_continuous_usage_stats_is_not_a_field_of_chat(value: Any) -> None:
    assert read(stream_options={"continuous_usage_stats": value}) == read()
    assert read(stream_options={"include_usage": None}).sampling == read().sampling
    schema = msgspec.json.schema(ChatCompletionsBody)
    assert "continuous_usage_stats" not in str(schema)
    assert "include_usage" in str(schema)


def test_missing_messages_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode({"model": "m"})
    assert caught.value.param == "messages"


@pytest.mark.parametrize("body", [None, [], 3, "x"])
def test_body_must_be_an_object(body: Any) -> None:
    with pytest.raises(InvalidRequest, match="object"):
        decode(body)


def test_error_text_quotes_no_caller_text() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(messages=[{"role": "LEAK", "content": "x"}])
    assert "LEAK" not in str(caught.value)


def test_images_are_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.2/x.png"}}
    with pytest.raises(UnsupportedParameter, match=r"^messages\[0\]\.content\[1\] has type 'image_url'; expected text"):
        read_message({"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]})


def test_parameters_at_their_default_need_no_engine_support() -> None:
    sampling = read(top_p=1, presence_penalty=0, repetition_penalty=1.0, min_p=0, seed=None).sampling
    assert (sampling.top_p, sampling.seed) == (1.0, None)


def test_null_equals_an_omitted_field() -> None:
    names = {*ChatCompletionsBody.__struct_fields__, *IGNORED} - {"messages"}
    assert read(**dict.fromkeys(names)) == read()


def test_ignored_parameters_change_nothing() -> None:
    assert read(**dict.fromkeys(IGNORED, "anything")) == read()


def test_max_completion_tokens_overrides_max_tokens() -> None:
    assert read(max_tokens=5).sampling.max_tokens == 5
    assert read(max_tokens=5, max_completion_tokens=7).sampling.max_tokens == 7
    assert read().sampling.max_tokens == 0


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ('{"a": 1, "b": [true]}', {"a": 1, "b": [True]}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        ("", ""),
        ("[1]", "[1]"),
        ('{"a": ', '{"a": '),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ],
)
def test_tool_arguments_are_objects_where_they_can_be(written: Any, read_as: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": written}}
    message = read_message({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message == {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": read_as}}],
    }


def test_message_fields_that_templates_read_are_kept_and_others_dropped() -> None:
    kept = {"role": "tool", "content": "x", "reasoning_content": "r", "name": "f", "tool_call_id": "1"}
    assert read_message({**kept, "annotations": [], "cache_control": {}, "refusal": None}) == kept


@pytest.mark.parametrize("field", ["function_call", "audio", "refusal"])
def test_message_fields_that_would_be_lost_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedParameter, match=field):
        read_message({"role": "assistant", field: {"name": "f"}})


def test_tools_are_kept_as_they_were_written() -> None:
    tool = {"function": {"returns": True, **TOOL["function"]}, "type": "function"}  # type: ignore[dict-item]
    (kept,) = read(tools=[tool]).tools
    assert msgspec.json.encode(kept) == msgspec.json.encode(tool)


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_deep_nesting_is_refused_by_name(name: str) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"x": deep}
    value = deep if name == "chat_template_kwargs" else [{**TOOL, "more": deep}]
    with pytest.raises(InvalidRequest) as caught:
        read(**{name: value})
    assert caught.value.param == name


def with_arguments(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def test_deep_tool_arguments_are_refused() -> None:
    deep: Any = 1
    for _ in range(65):
        deep = {"x": deep}
    with pytest.raises(
        InvalidRequest, match=r"^messages\[0\]\.tool_calls\[0\]\.function\.arguments is nested too deeply"
    ):
        read_message(with_arguments(deep))
    assert read_message(with_arguments(deep["x"])) == with_arguments(deep["x"])


@pytest.mark.parametrize(
    "text", ["[" * 900 + "]" * 900, "[" * 9000, '{"x":' * 65 + "1" + "}" * 65, '{"x":' * 9000 + "1" + "}" * 9000]
)
def test_deep_text_as_tool_arguments_is_kept_as_text(text: str) -> None:
    """A model may sample it, and clients send replies back."""
    assert read_message(with_arguments(text)) == with_arguments(text)
    shallow = read_message(with_arguments('{"x":' * 64 + "1" + "}" * 64))
    assert isinstance(shallow["tool_calls"][0]["function"]["arguments"], dict)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 99999999999999999999}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 100_000,
        b'{"chat_template_kwargs": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_malformed_body_is_a_400(gateway_url: str, body: bytes) -> None:
    answer = httpx2.post(f"{gateway_url}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'\xef\xbb\xbf{"messages": []}', "begins with a byte order mark: send it without"),
        (b'{"messages": [], "temperature": NaN}', "JSON has no NaN: send a number or null"),
        (b'{"a": "\\" NaN", "temperature": -Infinity}', "JSON has no -Infinity"),
        (b'{"a": "cut \\ud83d"}', "half of a surrogate pair: cut texts between whole characters"),
        (b'{"a": "\\ude00 and \\\\ud83d", "b": "longer"}', "half of a surrogate pair"),
        (b'{"temperature": 1e999}', "a number is too large for a double: send a smaller one"),
        (b'{"a": "\\ud83d\\ude00 \\\\ud83d", "b" 1}', "expected ':' "),
    ],
)
def test_what_is_no_json_is_named(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_json(body)


def test_position_of_malformed_json_counts_the_known_messages_too(gateway_url: str) -> None:
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x"}'
    url = f"{gateway_url}/sessions/position/v1/chat/completions"
    assert httpx2.post(url, content=body + b"]}").status_code == 200
    malformed = body + b', {"role" 1}]}'
    answer = httpx2.post(url, content=malformed)
    assert f"(byte {malformed.index(b'1}]')})" in answer.json()["error"]["message"]


def test_words_within_strings_are_no_numbers() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"a": "NaN", "b": x}')
    assert "NaN" not in str(caught.value)


def test_assistant_messages_without_content_have_an_empty_one() -> None:
    assert read_message({"role": "assistant"}) == {"role": "assistant", "content": ""}
    assert read_message({"role": "assistant", "content": None}) == {"role": "assistant", "content": ""}
    thought = {"role": "assistant", "reasoning_content": "hm"}
    assert read_message(thought) == {**thought, "content": ""}
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert "content" not in read_message({"role": "assistant", "tool_calls": calls})
    assert "content" not in read_message({"role": "user"})


def test_an_unknown_stop_id_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"stop_token_ids\[1\] is 100, which is not in the vocabulary; .* 0 to 99"):
        read(stop_token_ids=[99, 100, 200])


TEXT = st.text(max_size=20) | st.sampled_from(["<|im_end|>", "<tool_call>", "\0", "\ue000\U000f0000", "</think>"])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CALL = st.fixed_dictionaries(
    {
        "id": TEXT,
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": TEXT, "arguments": TEXT | VALUE.map(lambda v: msgspec.json.encode(v).decode())}
        ),
    }
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": TEXT
        | st.none()
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2),
        "reasoning_content": TEXT,
        "tool_calls": st.lists(CALL, max_size=2),
        "tool_call_id": TEXT,
        "name": TEXT,
        "extra": VALUE,
    },
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=4)},
    optional={
        "tools": st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries(
                        {"name": TEXT}, optional={"parameters": st.dictionaries(TEXT, VALUE, max_size=3)}
                    ),
                }
            ),
            max_size=2,
        ),
        "chat_template_kwargs": st.dictionaries(TEXT, VALUE, max_size=3),
        "stop": TEXT | st.lists(TEXT, max_size=2),
        "seed": st.integers(-(2**65), 2**65),
        "temperature": st.floats(-1, 3),
        "stream": st.booleans(),
    },
)


@given(
    body=BODY,
    changed=st.sampled_from(["messages", "tools", "stop", "n", "logprobs", "top_logprobs", "stream_options", "x"]),
    value=st.none() | VALUE,
    keep=st.booleans(),
)
@example(body={"messages": [USER]}, changed="x", value=None, keep=True)
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_is_a_server_error(
    gateway_url: str, body: dict[str, Any], changed: str, value: Any, keep: bool
) -> None:
    sent = {**body, "max_tokens": 1} if keep else {**body, "max_tokens": 1, changed: value}
    try:
        content = msgspec.json.encode(sent)
    except UnicodeEncodeError:
        return
    answer = httpx2.post(f"{gateway_url}/v1/chat/completions", content=content)
    assert answer.status_code < 500, answer.text
    if answer.status_code == 200 and sent.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
