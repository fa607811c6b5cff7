"""The OpenAPI document: it covers all endpoints, and no request, allowed by it or not, is a server error."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from tests.gateway.scripted import ScriptedEngine
from tests.searching import examples
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import DISTRIBUTION, SampleDelta, SamplingParams
from tokentape.gateway._app import create_app
from tokentape.gateway._openapi import document
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import TokenIds


class QuickEngine(ScriptedEngine):
    """Says the same to everything, at once."""

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        top = tuple((token_id, -0.5) for token_id in range(params.top_logprobs))
        yield SampleDelta((5,), (-0.5,), "length", None, (top,) if top else (), weight_version="7")


@pytest.fixture(scope="module")
def quick_url(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway whose replies cost nothing."""
    with SqliteStore.open(tmp_path_factory.mktemp("quick")) as store:
        app = create_app(Turns(QuickEngine(renderer, [], sampling=DISTRIBUTION), renderer, store), model_id="m")
        with running(app) as url:
            yield url


@pytest.fixture(scope="module")
def quick(quick_url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=quick_url) as client:
        client.post("/sessions", json={"session_id": "fuzzed"})
        yield client


def test_openapi_document_lists_exactly_the_endpoints(renderer: Renderer, store: SqliteStore) -> None:
    app = create_app(Turns(QuickEngine(renderer, []), renderer, store), model_id="m")
    served = {
        (route.path_format, method)
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {
        (path, method.upper()) for path, methods in document(app.routes)["paths"].items() for method in methods
    }
    assert documented == served


def test_document_is_served_and_its_schemas_are_valid(quick: httpx2.Client) -> None:
    served = quick.get("/openapi.json").json()
    assert served["openapi"] == "3.1.0"
    for name, schema in served["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert name
    references = {ref.removeprefix("#/components/schemas/") for ref in _references(served)}
    assert references <= set(served["components"]["schemas"])


def test_names_in_the_document_are_public_and_bodies_are_described(renderer: Renderer, store: SqliteStore) -> None:
    app = create_app(Turns(QuickEngine(renderer, []), renderer, store), model_id="m")
    described = document(app.routes)
    schemas = described["components"]["schemas"]
    assert [name for name in schemas if name.startswith("_")] == []
    operations = [
        method for methods in described["paths"].values() for method in methods.values() if "requestBody" in method
    ]
    bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        for operation in operations
    }
    assert len(bodies) > 5
    for name in (*bodies, "Error", "ImageSource", "AnthropicMessage"):
        assert schemas[name].get("description", "").endswith("."), name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2, "user": "u"}),
        ("/v1/completions", {"prompt": [1, 2], "logprobs": 1, "ignore_eos": True, "stop": ["x"]}),
        ("/v1/responses", {"input": "hi", "prompt_cache_key": "k"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "metadata": {}}),
        ("/sessions", {"metadata": {"a": 1}}),
    ],
)
def test_bodies_that_are_served_are_valid_by_the_document(quick: httpx2.Client, path: str, body: Any) -> None:
    assert quick.post(path, json=body).status_code < 300
    described = quick.get("/openapi.json").json()
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
    validator.validate(body)
    assert not validator.is_valid({**body, "unknown": 1})


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


# Fuzzing: a body that is served, one of its values replaced by something that breaks careless code.

TOOL: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "stop": ["x"],
        "stop_token_ids": [1],
        "seed": 1,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 1,
        "chat_template_kwargs": {"a": 1},
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
    },
    "/v1/completions": {
        "prompt": [1, 2],
        "logprobs": 1,
        "stop": "x",
        "seed": 1,
        "n": 1,
        "best_of": 1,
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        ],
        "instructions": "i",
        "tools": [{"type": "function", **TOOL}, {"type": "namespace", "name": "n", "tools": [{**TOOL}]}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "previous_response_id": None,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"messages": [USER], "system": "s"},
    "/sessions": {"metadata": {"a": {"b": [1]}}},
    "/sessions/fuzzed/reward": {"value": 1.5, "turn": 0},
    "/sessions/fuzzed/columns": {"columns": {"advantage": [0.5]}, "turn": 0},
    "/snapshots": {"session_ids": ["a"], "since": 1, "idle_seconds": 1.5, "metadata": {"a": 1}},
    "/snapshots/7/confirm": {"digest": "d", "drop_sessions": True},
    "/tokenize": {"prompt": "x", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2]},
    "/engine/pause": {"mode": "wait", "timeout": 1},
    "/engine/resume": {"weight_version": "8"},
}

STANDS_FOR = {
    '"@deep"': "[" * 5000 + "]" * 5000,
    '"@nested"': '{"a":' * 900 + "1" + "}" * 900,
    '"@huge"': '"' + "x" * 200_000 + '"',
}
NASTY = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        -(2**63) - 1,
        10**400,
        1e308,
        -0.0,
        float("nan"),
        float("inf"),
        "",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "<|im_end|>",
        "\U0010fffe\U00100000",
        "@deep",
        "@nested",
        "@huge",
        [],
        {},
        [[]],
        {"": None},
        {"type": "\ud800"},
        [None],
    ]
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner_schema in inner:
        yield from _places(inner_schema, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copied


def _written(body: Any) -> bytes:
    text = json.dumps(body)
    for name, meant in STANDS_FOR.items():
        text = text.replace(name, meant)
    return text.encode()


def test_every_post_path_is_fuzzed(quick: httpx2.Client) -> None:
    paths = {path for path, methods in quick.get("/openapi.json").json()["paths"].items() if "post" in methods}
    fuzzed = {path.replace("/fuzzed/", "/{session_id}/").replace("/7/", "/{snapshot_id}/") for path in BODIES}
    # What is served below a session as well is the same handler.
    below = {"/sessions/{session_id}" + path for path in fuzzed}
    assert paths <= fuzzed | below


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", BODIES)
@given(data=st.data(), stream=st.booleans())
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_is_a_server_error(quick: httpx2.Client, path: str, data: st.DataObject, stream: bool) -> None:
    body = dict(BODIES[path])
    if stream and path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        body["stream"] = True
    for _ in range(data.draw(st.integers(0, 2))):
        body = _replaced(body, data.draw(st.sampled_from(list(_places(body)))), data.draw(NASTY))
        if not isinstance(body, dict):
            break
    answer = quick.post(path, content=_written(body))
    if path == "/engine/pause" and answer.status_code == 200:
        quick.post("/engine/resume")
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        _check_error(path, answer.json())
    elif "event: error" in answer.text or '"error":{' in answer.text:
        pytest.fail(f"an error within a reply: {answer.text[-300:]}")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b'"', b"NaN", b"[" * 100_000, b"{}" * 2, b'{"a": 1e999}'])
def test_invalid_json_is_a_400_in_the_shape_of_its_api(quick: httpx2.Client, path: str, body: bytes) -> None:
    answer = quick.post(path, content=body)
    assert answer.status_code == 400
    _check_error(path, answer.json())


def _check_error(path: str, body: Any) -> None:
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert {"type", "message"} <= set(body["error"])
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(quick_url: str, tmp_path: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{quick_url}/openapi.json")
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.specs.openapi.checks.content_type_conformance,
        schemathesis.specs.openapi.checks.response_schema_conformance,
        schemathesis.specs.openapi.checks.status_code_conformance,
    ]
    seen = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=examples(30), suppress_health_check=list(HealthCheck), database=None)
        def holds(case: Any) -> None:
            nonlocal seen
            seen += 1
            case.call_and_validate(checks=checks)

        holds()
    assert seen > 100
