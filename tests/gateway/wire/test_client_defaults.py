"""What clients send by default: it is served, reported, or refused with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

USER: Any = {"role": "user", "content": "hi"}
HI = "hi<|im_end|>"
PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}}
IGNORED = "x-tokentape-ignored-params"


class Served:
    """A gateway over a scripted engine, and the official clients."""

    def __init__(
        self, renderer: Renderer, store: SqliteStore, opened: ExitStack, max_context: int = 1 << 20, **settings: Any
    ) -> None:
        self.renderer = renderer
        self.engine = ScriptedEngine(renderer, [HI] * 8)
        self.engine.info = replace(self.engine.info, max_context=max_context)
        self.store = store
        self._opened = opened
        turns = Turns(self.engine, renderer, store, **settings)
        self.url = opened.enter_context(running(create_app(turns, model_id="org/script")))

    def openai(self, path: str = "/sessions/s/v1", api_key: str = "none", **more: Any) -> OpenAI:
        client = OpenAI(base_url=self.url + path, api_key=api_key, max_retries=0, **more)
        return self._opened.enter_context(client)

    def anthropic(self) -> Anthropic:
        client = Anthropic(base_url=f"{self.url}/sessions/s", api_key="none", max_retries=0)
        return self._opened.enter_context(client)

    def chat(self, *messages: Any, **more: Any) -> Any:
        raw = self.openai().chat.completions.with_raw_response
        return raw.create(model="m", messages=list(messages) or [USER], max_tokens=8, **more)

    def session_key(self, session_id: str) -> str:
        return httpx2.post(f"{self.url}/sessions", json={"session_id": session_id}).json()["api_key"]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def served(renderer: Renderer, store: SqliteStore, opened: ExitStack) -> Served:
    return Served(renderer, store, opened)


def test_harness_session_header_is_a_hint_with_a_session_path(served: Served) -> None:
    client = served.openai(default_headers={"X-Session-Id": "ses_1"})
    reply = client.chat.completions.with_raw_response.create(model="m", messages=[USER])
    assert reply.headers["x-session-id"] == "s"
    (turn,) = served.store.load_session("s").turns
    assert turn.sampling["client_session"] == "ses_1"


def test_harness_session_header_is_a_hint_with_a_session_key(served: Served) -> None:
    key = served.session_key("k")
    client = served.openai("/v1", key, default_headers={"X-Session-Id": "not an id!"})
    reply = client.chat.completions.with_raw_response.create(model="m", messages=[USER])
    assert reply.headers["x-session-id"] == "k"
    (turn,) = served.store.load_session("k").turns
    assert turn.sampling["client_session"] == "not an id!"


def test_path_and_session_key_of_different_sessions_are_a_conflict(served: Served) -> None:
    client = served.openai("/sessions/other/v1", served.session_key("k"))
    with pytest.raises(
        openai.BadRequestError, match="different session ids: 'other' in the path, 'k' in the session key"
    ):
        client.chat.completions.create(model="m", messages=[USER])


def test_a_session_key_cut_short_is_refused(served: Served) -> None:
    client = served.openai("/v1", served.session_key("k")[:20])
    with pytest.raises(openai.AuthenticationError, match="incomplete"):
        client.chat.completions.create(model="m", messages=[USER])


def test_null_equals_an_omitted_field_for_unknown_fields(served: Served) -> None:
    assert served.chat(extra_body={"functions": None, "unheard_of": None}).status_code == 200
    reply = served.openai().responses.create(model="m", input="hi", extra_body={"text_verbosity": None})
    assert reply.status == "completed"


def test_effort_and_verbosity_are_accepted_and_reported(served: Served) -> None:
    reply = served.chat(reasoning_effort="low", verbosity="low")
    assert reply.headers[IGNORED] == "reasoning_effort, verbosity"


def test_a_developer_message_is_a_system_message_in_chat_as_in_responses(served: Served) -> None:
    served.chat({"role": "developer", "content": "Be brief."}, USER)
    served.openai("/sessions/r/v1").responses.create(model="m", input="hi", instructions="Be brief.")
    chat, responses = (prompt for prompt, _ in served.engine.requests)
    assert chat == responses


def test_strict_is_reported_and_not_in_the_prompt(served: Served) -> None:
    function = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
    reply = served.chat(tools=[{"type": "function", "function": {**function, "strict": True}}])
    assert reply.headers[IGNORED] == "tools.strict"
    served.chat(tools=[{"type": "function", "function": function}])
    (first, _), (second, _) = served.engine.requests
    assert first == second


def test_unknown_fields_of_messages_and_tools_are_reported(served: Served) -> None:
    assistant: Any = {"role": "assistant", "content": "The", "mood": "calm", "annotations": [], "refusal": None}
    assert served.chat(USER, assistant, USER).headers[IGNORED] == "messages.mood"
    tool: Any = {
        "name": "look",
        "input_schema": PARAMETERS,
        "defer_loading": True,
        "cache_control": {"type": "ephemeral"},
    }
    reply = served.anthropic().messages.with_raw_response.create(model="m", max_tokens=8, messages=[USER], tools=[tool])
    assert reply.headers[IGNORED] == "tools.defer_loading"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "other"}}])
def test_tool_choice_without_its_tool_is_refused_in_chat(served: Served, choice: Any) -> None:
    tools = [] if choice == "required" else [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        served.chat(tool_choice=choice, tools=tools)


def test_tool_choice_without_its_tool_is_refused_in_the_other_apis(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        served.openai().responses.create(model="m", input="hi", tool_choice={"type": "function", "name": "other"})
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        served.anthropic().messages.create(
            model="m", max_tokens=8, messages=[USER], tool_choice={"type": "tool", "name": "other"}
        )


def test_context_length_error_has_the_code_and_text_of_openai(
    renderer: Renderer, store: SqliteStore, opened: ExitStack
) -> None:
    served = Served(renderer, store, opened, max_context=8)
    for ask in (served.chat, lambda: served.openai().responses.create(model="m", input="hi")):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 8 tokens") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        served.anthropic().messages.create(model="m", max_tokens=8, messages=[USER])


def test_a_model_is_found_by_its_name(served: Served) -> None:
    assert served.openai().models.retrieve("org/script").id == "org/script"
    with pytest.raises(openai.NotFoundError, match="org/script"):
        served.openai().models.retrieve("other")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("", "/v1/chat/completions"),
        ("/v1/v1", "/v1/chat/completions"),
        ("/sessions/s", "/sessions/{session_id}/v1/chat/completions"),
    ],
)
def test_wrong_base_url_error_names_the_nearest_path(served: Served, path: str, nearest: str) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean") as caught:
        served.openai(path).chat.completions.create(model="m", messages=[USER])
    assert nearest in str(caught.value)


def test_an_unknown_path_has_anthropic_s_error_shape_for_its_clients(served: Served) -> None:
    client = Anthropic(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(anthropic.NotFoundError, match="/v1/messages") as caught:
        client.messages.create(model="m", max_tokens=8, messages=[USER])
    assert caught.value.body["type"] == "error"  # type: ignore[index]


def replies_of_each_api(served: Served, **more: Any) -> tuple[Any, Any, Any, Any]:
    """The replies of all four APIs to the same question."""
    client = served.openai()
    return (
        client.chat.completions.create(model="m", messages=[USER], extra_body=more),
        client.completions.create(model="m", prompt="hi", extra_body=more),
        client.responses.create(model="m", input="hi", extra_body=more),
        served.anthropic().messages.create(model="m", max_tokens=8, messages=[USER]),
    )


def test_cached_tokens_are_in_usage_and_counted(served: Served) -> None:
    served.engine.cached_tokens = 3
    chat, plain, response, message = replies_of_each_api(served)
    assert chat.usage.prompt_tokens_details.cached_tokens == 3
    assert plain.usage.prompt_tokens_details.cached_tokens == 3
    assert response.usage.input_tokens_details.cached_tokens == 3
    # Anthropic's API counts them separately.
    assert (message.usage.cache_read_input_tokens, message.usage.input_tokens) == (3, chat.usage.prompt_tokens - 3)
    streamed = served.chat(stream=True, stream_options={"include_usage": True}).parse()
    assert list(streamed)[-1].usage.prompt_tokens_details.cached_tokens == 3
    assert "tokentape_cached_prompt_tokens_total 15.0" in httpx2.get(f"{served.url}/metrics").text


def test_usage_omits_cached_tokens_if_the_engine_reports_none(served: Served) -> None:
    chat, plain, _, message = replies_of_each_api(served)
    assert (chat.usage.prompt_tokens_details, plain.usage.prompt_tokens_details) == (None, None)
    assert message.usage.cache_read_input_tokens == 0


def test_reasoning_has_both_names_and_its_tokens_are_counted(served: Served) -> None:
    served.engine.replies = ["<think>\nhm, so\n</think>\n\nhi<|im_end|>"] * 8
    chat, _, response, message = replies_of_each_api(served)
    tokens = len(served.renderer.tokenizer.encode_plain("hm, so"))
    answer = chat.choices[0].message
    assert (answer.reasoning_content, answer.reasoning) == ("hm, so", "hm, so")
    # The parser's text and the tokens that hold it may differ by the line breaks around it.
    assert 0 <= chat.usage.completion_tokens_details.reasoning_tokens - tokens <= 2
    thought = chat.usage.completion_tokens_details.reasoning_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == thought
    assert message.usage.output_tokens_details.thinking_tokens == thought
    deltas = [chunk.choices[0].delta for chunk in served.chat(stream=True).parse() if chunk.choices]
    both = [(delta.reasoning_content, delta.reasoning) for delta in deltas if hasattr(delta, "reasoning")]
    assert "".join(delta for delta, _ in both) == "hm, so"
    assert all(first == other for first, other in both)
    served.chat(USER, answer.model_dump(exclude_none=True), USER)
    assert served.store.load_session("s").turns[-1].parent is not None


def test_priority_and_cache_salt_reach_an_engine_that_takes_them(served: Served) -> None:
    served.engine.info = replace(served.engine.info, sampling=ScriptedEngine.EVERYTHING)
    replies_of_each_api(served, priority=2, cache_salt="salt")
    for _, params in served.engine.requests[:3]:
        assert (params.priority, params.cache_salt) == (2, "salt")


def test_priority_and_cache_salt_are_reported_where_the_engine_takes_none(served: Served) -> None:
    assert served.chat(extra_body={"priority": 2, "cache_salt": "salt"}).headers[IGNORED] == "priority, cache_salt"
    assert (served.engine.requests[0][1].priority, served.engine.requests[0][1].cache_salt) == (0, None)


def test_a_session_id_in_a_body_selects_nothing_and_is_reported_if_it_names_another_session(served: Served) -> None:
    for sent, reported in (("trial-1", ["session_id"]), ("s", [])):
        chat, plain, response, _ = replies_of_each_api(served, session_id=sent)
        for where in (chat.choices[0], plain.choices[0], response):
            assert where.tokentape["session_id"] == "s"
            assert where.tokentape.get("ignored_params", []) == reported


def test_ignored_fields_are_also_in_each_reply_body(served: Served) -> None:
    chat, plain, response, _ = replies_of_each_api(served, priority=2)
    for where in (chat.choices[0], plain.choices[0], response):
        assert where.tokentape["ignored_params"] == ["priority"]
    message = served.anthropic().messages.create(
        model="m", max_tokens=8, messages=[USER], output_config={"effort": "low"}
    )
    assert message.tokentape["ignored_params"] == ["output_config.effort"]  # type: ignore[attr-defined]
    *_, last = served.chat(stream=True, reasoning_effort="low").parse()
    assert last.choices[0].tokentape["ignored_params"] == ["reasoning_effort"]


LOOK = {"name": "look", "parameters": PARAMETERS}


def test_allowed_tools_are_accepted_in_chat_and_reported(served: Served) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}
    tools = [{"type": "function", "function": LOOK}]
    reply = served.chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert reply.headers[IGNORED] == "tool_choice"


@pytest.mark.parametrize("named", [{"name": "other"}, {}])
def test_allowed_tools_that_are_not_there_are_refused(served: Served, named: dict[str, str]) -> None:
    nested = {"mode": "auto", "tools": [{"type": "function", "function": named}]}
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        served.chat(
            tools=[{"type": "function", "function": LOOK}],
            tool_choice={"type": "allowed_tools", "allowed_tools": nested},
        )
    flat_tool: Any = {"type": "function", **LOOK, "strict": None}
    flat: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", **named}]}
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        served.openai().responses.create(model="m", input="hi", tools=[flat_tool], tool_choice=flat)


def test_prefill_is_refused_with_advice(served: Served) -> None:
    begun = {"role": "assistant", "content": "The"}
    for ask in (
        lambda: served.chat(USER, {**begun, "prefix": True}),
        lambda: served.chat(USER, begun, extra_body={"continue_final_message": True, "add_generation_prompt": False}),
    ):
        with pytest.raises(openai.BadRequestError, match="/v1/completions"):
            ask()
    with pytest.raises(anthropic.BadRequestError, match="/v1/completions"):
        served.anthropic().messages.create(model="m", max_tokens=8, messages=[USER, begun])  # type: ignore[list-item]


def test_unknown_fields_of_items_and_blocks_are_reported(served: Served) -> None:
    part = {"type": "input_text", "text": "hi", "bold": True}
    item: Any = {"type": "message", "role": "user", "content": [part], "mood": "calm"}
    reply = served.openai().responses.with_raw_response.create(model="m", input=[item])
    assert reply.headers[IGNORED] == "input.mood, input.content.bold"
    block: Any = {"type": "text", "text": "hi", "bold": True, "cache_control": {"type": "ephemeral"}}
    message: Any = {"role": "user", "content": [block], "mood": "calm"}
    response = served.anthropic().messages.with_raw_response.create(model="m", max_tokens=8, messages=[message])
    assert response.headers[IGNORED] == "messages.mood, messages.content.bold"


def test_unknown_fields_of_chat_parts_and_stream_options_are_reported(served: Served) -> None:
    kept = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"type": "ephemeral"}}
    assert IGNORED not in served.chat({"role": "user", "content": [{"type": "text", "text": "hi", **kept}]}).headers
    reply = served.chat({"role": "user", "content": [{"type": "text", "text": "hi", "bold": True, "none": None}]})
    assert reply.headers[IGNORED] == "messages.content.bold"
    reply = served.chat(stream=True, stream_options={"include_obfuscation": False, "include_use": True})
    assert reply.headers[IGNORED] == "stream_options.include_use"


def test_unknown_fields_of_nested_parts_are_reported(served: Served) -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1", "b": 1}]}
    reply = served.openai().responses.with_raw_response.create(model="m", input=[call, output])
    assert reply.headers[IGNORED] == "input.output.b"
    part: Any = {"type": "text", "text": "1", "bold": True}
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [part]}]}
    response = served.anthropic().messages.with_raw_response.create(
        model="m", max_tokens=8, messages=[result], system=[{**part, "mood": "calm"}]
    )
    assert response.headers[IGNORED] == "messages.content.content.bold, system.bold, system.mood"


def test_a_key_does_not_revive_the_session_that_was_deleted(served: Served) -> None:
    client = served.openai("/v1", served.session_key("k"))
    client.chat.completions.create(model="m", messages=[USER])
    assert httpx2.delete(f"{served.url}/sessions/k").status_code in (200, 204)
    with pytest.raises(openai.NotFoundError, match="session"):
        client.chat.completions.create(model="m", messages=[USER])
    again = httpx2.post(f"{served.url}/sessions", json={}, headers={"Authorization": f"Bearer {client.api_key}"})
    assert again.status_code == 403
    assert httpx2.get(f"{served.url}/sessions/k").status_code == 404


def test_response_input_is_listed_and_other_methods_are_refused(served: Served) -> None:
    responses = served.openai().responses
    first = responses.create(model="m", input="one", instructions="Be brief.")
    second = responses.create(model="m", input="two", previous_response_id=first.id, instructions="Be brief.")
    listed = [item.model_dump() for item in responses.input_items.list(second.id, order="asc")]
    texts = [(item["role"], item["content"][0]["text"]) for item in listed]
    assert texts == [("user", "one"), ("assistant", "hi"), ("user", "two")]
    assert [item.model_dump() for item in responses.input_items.list(second.id)] == listed[::-1]
    with pytest.raises(openai.BadRequestError, match="DELETE /sessions/s"):
        responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no such path"):
        responses.cancel(first.id)
    for refused in (responses.delete, lambda response_id: list(responses.input_items.list(response_id))):
        with pytest.raises(openai.NotFoundError, match="no response"):
            refused(f"{first.id[:-1]}x")
