"""Malformed requests: each is refused with a text that names what was found, and the session continues."""

from __future__ import annotations

import gzip
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.errors import InvalidRequest
from tokentape.gateway._app import create_app
from tokentape.gateway._http import MAX_DEPTH
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER], "max_tokens": 2},
    "responses": {"input": "hi", "max_output_tokens": 2},
    "messages": {"messages": [USER], "max_tokens": 2},
}
WRONG: list[Any] = [7, -1, 1.5, 10**30, 1e300, True, "x", [], [None], [7], ["x"], [[]], [{}], {}, {"x": 1}]
FIELDS = {
    "chat/completions": (
        "messages max_tokens temperature top_p n stop stream stream_options tools tool_choice response_format logprobs "
        "top_logprobs seed logit_bias chat_template_kwargs modalities parallel_tool_calls model stop_token_ids"
    ),
    "responses": (
        "input instructions previous_response_id tools tool_choice max_output_tokens top_logprobs include reasoning "
        "text truncation store background conversation context_management prompt temperature stream model"
    ),
    "messages": (
        "messages max_tokens system temperature top_p top_k stop_sequences tools tool_choice thinking "
        "context_management output_config stream container mcp_servers chat_template_kwargs seed model"
    ),
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return value


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, message, USER]}


def part(**fields: Any) -> dict[str, Any]:
    return chat(role="user", content=[fields])


def call(**function: Any) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}]
    return chat(role="assistant", content=None, tool_calls=calls)


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def form(**fields: Any) -> dict[str, Any]:
    return {"format": fields}


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    # Chat completions.
    (
        "chat/completions",
        part(type="input_audio"),
        "messages",
        "messages[1].content[0] has type 'input_audio'; expected",
    ),
    ("chat/completions", part(type="UN SEEN"), "messages", "messages[1].content[0] has an unknown type; expected text"),
    ("chat/completions", part(type="text"), "messages", "messages[1].content[0].text is missing; send a string"),
    (
        "chat/completions",
        chat(role="assistant", refusal="no"),
        "messages",
        "messages[1].refusal is not supported; send",
    ),
    (
        "chat/completions",
        call(arguments=nested(MAX_DEPTH + 1)),
        "messages",
        "messages[1].tool_calls[0].function.arguments is nested too deeply; expected at most 64 levels, so flatten it",
    ),
    ("chat/completions", {"max_tokens": 0}, "max_tokens", "max_tokens: expected `int` >= 1, got 0"),
    ("chat/completions", {"stop": ["x"] * 17}, "stop", "stop: expected `array` of length <= 16, got 17"),
    ("chat/completions", {"tools": [{"type": "custom"}]}, "tools", "tools[0]"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice", "tool_choice requires a tool, but tools is empty"),
    (
        "chat/completions",
        {"response_format": {"type": "xml"}},
        "response_format",
        "response_format has type 'xml'; expec",
    ),
    (
        "chat/completions",
        {"response_format": 5},
        "response_format",
        "response_format has no type; expected text, json_",
    ),
    # Responses.
    ("responses", item(x=1), "input", "input[0] has no type; expected message, reasoning"),
    ("responses", item(type="web_search_call"), "input", "input[0] has type 'web_search_call'; expected message"),
    ("responses", item(type="message", content="x"), "input", "input[0]: object missing required field `role`"),
    ("responses", item(role="user", content=5), "input", "input[0].content: expected `str | array`, got `int`"),
    (
        "responses",
        item(role="user", content=[{"type": "input_file"}]),
        "input",
        "input[0].content[0] has type 'input_fi",
    ),
    (
        "responses",
        {"tools": [{"type": "custom", "name": "f"}]},
        "tools",
        "tools[0] has type 'custom'; expected function",
    ),
    ("responses", {"tools": [7]}, "tools", "tools[0] has no type; expected function"),
    ("responses", {"text": form(type="xml")}, "text", "text.format has type 'xml'; expected text, json_object or"),
    ("responses", {"text": form(type="json_schema")}, "text", "text.format has no schema; expected a JSON Schema"),
    # Messages.
    ("messages", part(type="document"), "messages", "messages[1].content[0] has type 'document'; expected text only"),
    ("messages", part(type="text"), "messages", "messages[1].content[0].text is missing; send a string"),
    ("messages", part(type="tool_result"), "messages", "messages[1].content[0].tool_use_id is missing; send a string"),
    (
        "messages",
        chat(role="assistant", content=[{"type": "tool_use", "id": "t", "name": "f", "input": nested(MAX_DEPTH + 1)}]),
        "messages",
        "messages[1].content[0].input is nested too deeply; expected at most 64 levels, so flatten it",
    ),
    ("messages", {"system": [{"type": "image"}]}, "system", "system[0] has type 'image'; expected text only"),
    ("messages", {"output_config": form(type="xml")}, "output_config", "output_config.format has type 'xml'; expected"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice", "tool_choice requires a tool, but tools is empty"),
]


@pytest.fixture
def no_errors_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def error_in(api: str, answer: httpx2.Response) -> tuple[str, str | None]:
    """The message and the parameter of an error in the format of its API."""
    body = answer.json()
    assert answer.headers["x-should-retry"] == "false"
    if api == "messages":
        assert body["type"] == "error"
        return body["error"]["message"], body["error"]["details"].get("param")
    return body["error"]["message"], body["error"]["param"]


@pytest.mark.usefixtures("no_errors_logged")
@pytest.mark.parametrize(("api", "wrong", "param", "text"), REFUSED)
def test_refusal_names_found_and_expected_values(
    gateway_url: str, api: str, wrong: dict[str, Any], param: str, text: str
) -> None:
    answer = httpx2.post(f"{gateway_url}/sessions/s/v1/{api}", json={**BODIES[api], **wrong})
    assert answer.status_code == 400
    message, named = error_in(api, answer)
    assert message.startswith(text)
    assert named == param


@pytest.mark.usefixtures("no_errors_logged")
@pytest.mark.parametrize("api", BODIES)
def test_session_continues_after_every_field_was_wrong(gateway_url: str, api: str) -> None:
    with httpx2.Client(base_url=f"{gateway_url}/sessions/s/v1", timeout=60) as http:
        for name in FIELDS[api].split():
            for value in WRONG:
                answer = http.post(f"/{api}", json={**BODIES[api], name: value})
                if answer.status_code != 200:
                    message, param = error_in(api, answer)
                    assert answer.status_code in (400, 404), (name, value)
                    assert name in message or "response" in message, (name, value)
                    assert param in (name, None)
        assert http.post(f"/{api}", json=BODIES[api]).status_code == 200


@pytest.mark.parametrize(
    ("api", "param"), [("chat/completions", "response_format"), ("responses", "text"), ("messages", "output_config")]
)
def test_an_engine_s_refusal_names_the_parameter_of_the_api(
    renderer: Renderer, store: SqliteStore, api: str, param: str
) -> None:
    error = InvalidRequest("the engine can't follow this JSON Schema; change it", "json_schema")
    engine = ScriptedEngine(renderer, ["hi"], fail_after=0, error=error)
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        answer = httpx2.post(f"{url}/sessions/s/v1/{api}", json=BODIES[api])
    assert (answer.status_code, error_in(api, answer)) == (400, (str(error), param))


@pytest.mark.parametrize("api", BODIES)
def test_an_unexpected_error_has_the_error_body_of_its_api(renderer: Renderer, store: SqliteStore, api: str) -> None:
    engine = ScriptedEngine(renderer, ["hi"], fail_after=0, error=RuntimeError("bug"))
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        answer = httpx2.post(f"{url}/sessions/s/v1/{api}", json=BODIES[api])
    assert answer.status_code == 500
    assert "an unexpected error" in error_in(api, answer)[0]


DEEP = ['{"x":' * 70 + "1" + "}" * 70, '{"x":' + "[" * 70 + "]" * 70 + "}", '{"x":' + "[" * 3000]


@pytest.mark.parametrize("arguments", DEEP, ids=["objects", "lists", "not closed"])
@pytest.mark.parametrize("api", BODIES)
def test_reply_with_deep_arguments_is_accepted_as_history(
    renderer: Renderer, store: SqliteStore, api: str, arguments: str
) -> None:
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    engine = ScriptedEngine(renderer, [call, "done<|im_end|>"])
    function = {"name": "f", "parameters": {"type": "object"}}
    body: dict[str, Any] = {
        "chat/completions": {"tools": [{"type": "function", "function": function}]},
        "responses": {"tools": [{"type": "function", **function}], "input": [USER]},
        "messages": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    }[api]
    body = {**BODIES[api], **body}
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        reply = httpx2.post(f"{url}/sessions/s/v1/{api}", json=body).json()
        if api == "responses":
            (called,) = reply["output"]
            body["input"] += [called, {"type": "function_call_output", "call_id": called["call_id"], "output": "1"}]
        elif api == "messages":
            (called,) = reply["content"]
            result = {"type": "tool_result", "tool_use_id": called["id"], "content": "1"}
            body["messages"] = [USER, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
        else:
            message = reply["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
            body["messages"] = [USER, message, result]
        answer = httpx2.post(f"{url}/sessions/s/v1/{api}", json=body)
        assert answer.status_code == 200, answer.text
        (leaf,) = httpx2.get(f"{url}/sessions/s").json()["leaves"]
    assert (leaf["turn"], leaf["verdict"]) == (1, "exact")


@pytest.mark.parametrize("api", [*BODIES, "completions", "../../../sessions", "../reward"])
@pytest.mark.parametrize("encoding", ["gzip", "DEFLATE", "zstd"])
def test_a_compressed_body_is_refused_by_its_header(gateway_url: str, api: str, encoding: str) -> None:
    httpx2.post(f"{gateway_url}/sessions", json={"session_id": "s"})
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = httpx2.post(f"{gateway_url}/sessions/s/v1/{api}", content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415
    assert f"Content-Encoding: {encoding}" in error_in(api, answer)[0]
    plain = httpx2.post(
        f"{gateway_url}/v1/chat/completions",
        json=BODIES["chat/completions"],
        headers={"Content-Encoding": "identity"},
    )
    assert plain.status_code == 200


@pytest.mark.parametrize("path", ["/sessions/s/trajectories", "/snapshots/1/trajectories"])
def test_an_unknown_format_of_trajectories_is_refused(gateway_url: str, path: str) -> None:
    httpx2.post(f"{gateway_url}/sessions/s/v1/chat/completions", json=BODIES["chat/completions"])
    httpx2.post(f"{gateway_url}/snapshots")
    own = "json" if "sessions" in path else "jsonl"
    answer = httpx2.get(f"{gateway_url}{path}?format=csv")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "format")
    assert answer.json()["error"]["message"] == f"format is 'csv'; expected {own} or parquet"
    pytest.importorskip("pyarrow")
    for query, accept, kind in (
        ("", "*/*", f"application/{own}"),
        ("", "application/vnd.apache.parquet", "application/vnd.apache.parquet"),
        (f"?format={own}", "application/vnd.apache.parquet", f"application/{own}"),
        ("?format=parquet", "*/*", "application/vnd.apache.parquet"),
    ):
        found = httpx2.get(f"{gateway_url}{path}{query}", headers={"Accept": accept})
        assert (found.status_code, found.headers["content-type"]) == (200, kind)


def test_wrong_method_error_lists_the_allowed_methods(gateway_url: str) -> None:
    answer = httpx2.put(f"{gateway_url}/sessions/s")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
    assert answer.json()["error"]["message"] == "PUT is not allowed on this path; expected DELETE, GET"


@pytest.mark.parametrize("name", ["metadata", "pin", "default"])
def test_deep_nesting_in_a_new_session_is_refused_by_name(gateway_url: str, name: str) -> None:
    answer = httpx2.post(f"{gateway_url}/sessions", json={name: nested(MAX_DEPTH + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert answer.json()["error"]["message"].startswith(f"{name} is nested too deeply")
