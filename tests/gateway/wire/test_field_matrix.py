"""The effect of every field of the four wire APIs; docs/reference/fields.md has the same as a table.

The official packages' own types say which fields there are. `python -m tests.gateway.wire.test_field_matrix` writes the
page.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from anthropic.types import beta, message_create_params
from msgspec import structs
from openai.types import chat, completion_create_params, responses
from openai.types.chat.chat_completion_content_part_image_param import ImageURL
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

import tokentape.demo
from tests.chat.conftest import load_renderer
from tests.engines import fake_vllm
from tests.engines.real import Opening
from tests.gateway.request_context import ENGINE, FakeContext
from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.engines._base import SamplingParams
from tokentape.engines._vllm import VllmEngine
from tokentape.errors import InvalidRequest
from tokentape.gateway._app import create_app
from tokentape.gateway._dialect import DecodedRequest
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.gateway._wire.anthropic_messages import AnthropicMessages
from tokentape.gateway._wire.chat_completions import _IMAGE_FIELDS, _PART_FIELDS, _STREAM_FIELDS, ChatCompletions
from tokentape.gateway._wire.completions import Completions
from tokentape.gateway._wire.responses import Responses
from tokentape.gateway._wire.responses_items import PART_FIELDS
from tokentape.store import SqliteStore

PAGE = Path(__file__).parents[3] / "docs/reference/fields.md"
WORDS = {
    "honored": "changes the prompt or the kind of reply",
    "passed on": "is sent to the engine; refused if the engine does not take it",
    "reply": "changes what the reply says, not what is sampled",
    "reported": "accepted, not enforced, and named in `X-Tokentape-Ignored-Params`",
    "no effect": "accepted; it asks for nothing that could change what is sampled",
    "refused": "400 that names the field, unless its value asks for nothing",
}
What = Literal["honored", "passed on", "reply", "reported", "no effect", "refused"]


@dataclass(frozen=True)
class Row:
    """The effect of a field with this value, together with others."""

    what: What
    value: Any = "x"
    beside: tuple[tuple[str, Any], ...] = ()
    shown_by: str = ""
    """The test of its effect, if that needs more than a decoded body."""


USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
CLAUDE = {"name": "f", "input_schema": SCHEMA}
JSON = {"type": "json_object"}
NO_EFFECT, REFUSED = Row("no effect"), Row("refused")
SAMPLING = {
    "temperature": Row("passed on", 0.5),
    "top_p": Row("passed on", 0.5),
    "frequency_penalty": Row("passed on", 0.5),
    "presence_penalty": Row("passed on", 0.5),
    "seed": Row("passed on", 1),
    "stop": Row("passed on"),
}
CACHE = dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), NO_EFFECT)
MODEL = Row("reported", "an-adapter")
HINTS = {**CACHE, "model": MODEL, **dict.fromkeys(("user", "service_tier", "safety_identifier"), NO_EFFECT)}
LOGPROBS = "test_logprobs_cover_every_sampled_token"

MATRIX: dict[str, dict[str, Row]] = {
    "chat": {
        **SAMPLING,
        **HINTS,
        **dict.fromkeys(("audio", "function_call", "functions", "moderation", "prediction"), REFUSED),
        "logit_bias": Row("refused", {"5": 1}),
        "logprobs": Row("reply", True, shown_by=f"test_chat_completions.{LOGPROBS}"),
        "max_completion_tokens": Row("passed on", 5),
        "max_tokens": Row("passed on", 5),
        "messages": Row("honored", [{"role": "user", "content": "other"}]),
        "metadata": NO_EFFECT,
        "modalities": Row("refused", ["audio"]),
        "n": Row("honored", 2),
        "parallel_tool_calls": Row("reported", False),
        "reasoning_effort": Row("reported", "low"),
        "response_format": Row("passed on", JSON),
        "store": NO_EFFECT,
        "stream": Row("honored", True),
        "stream_options": Row(
            "reply", {"include_usage": True}, shown_by="test_chat_completions.test_stream_equals_non_stream"
        ),
        "tool_choice": Row("reported", "required", (("tools", [TOOL]),)),
        "tools": Row("honored", [TOOL]),
        "top_logprobs": Row("passed on", 2, (("logprobs", True),)),
        "verbosity": Row("reported", "low"),
        "web_search_options": REFUSED,
    },
    "completions": {
        **SAMPLING,
        "best_of": Row("refused", 2),
        "echo": Row("refused", True),
        "logit_bias": Row("refused", {"5": 1}),
        "logprobs": Row("passed on", 2),
        "max_tokens": Row("passed on", 5),
        "model": MODEL,
        "n": Row("honored", 2),
        "prompt": Row("honored", [7, 8]),
        "stream": Row("honored", True),
        "stream_options": Row(
            "reply", {"include_usage": True}, shown_by="test_completions.test_stream_equals_non_stream"
        ),
        "suffix": REFUSED,
        "user": NO_EFFECT,
    },
    "responses": {
        **{name: row for name, row in SAMPLING.items() if name in ("temperature", "top_p")},
        **HINTS,
        **dict.fromkeys(("access_programs", "background_options", "image", "moderation"), REFUSED),
        "background": Row("refused", True),
        "context_management": Row("refused", [{"type": "compaction"}]),
        "conversation": REFUSED,
        "include": Row("reply", ["message.output_text.logprobs"], shown_by=f"test_responses.{LOGPROBS}"),
        "input": Row("honored", "other"),
        "instructions": Row("honored"),
        "max_output_tokens": Row("passed on", 5),
        "max_tool_calls": Row("no effect", 1),
        "metadata": Row("reply", {"a": "b"}, shown_by="test_responses.test_response_echoes_metadata_store_and_user"),
        "parallel_tool_calls": Row("reported", False),
        "previous_response_id": Row(
            "honored", shown_by="test_responses.test_previous_response_id_continues_the_session"
        ),
        "prompt": Row("refused", {"id": "p"}),
        "reasoning": Row("reported", {"effort": "low"}),
        "store": Row("reply", False, shown_by="test_responses.test_response_echoes_metadata_store_and_user"),
        "stream": Row("honored", True),
        "stream_options": NO_EFFECT,
        "text": Row("passed on", {"format": JSON}),
        "tool_choice": Row("reported", "required", (("tools", [FLAT]),)),
        "tools": Row("honored", [FLAT]),
        "top_logprobs": Row("passed on", 2),
        "truncation": Row("reported", "auto"),
        "user": Row("reply", "u", shown_by="test_responses.test_response_echoes_metadata_store_and_user"),
    },
    "messages": {
        **dict.fromkeys(("betas", "billing_policy", "cache_control", "diagnostics", "fallbacks"), NO_EFFECT),
        "model": MODEL,
        **dict.fromkeys(("fallback_credit_token", "inference_geo", "metadata", "service_tier", "speed"), NO_EFFECT),
        **dict.fromkeys(("user_profile_id", "workspace_id"), NO_EFFECT),
        **dict.fromkeys(("container", "mcp_servers", "thread"), REFUSED),
        "compaction": Row("reported", {"type": "summary"}),
        "context_management": Row("reported", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        "max_tokens": Row("passed on", 5),
        "messages": Row("honored", [{"role": "user", "content": "other"}]),
        "output_config": Row("reported", {"effort": "low"}),
        "stop_sequences": Row("passed on", ["x"]),
        "stream": Row("honored", True),
        "system": Row("honored"),
        "temperature": Row("passed on", 0.5),
        "thinking": Row("honored", {"type": "disabled"}),
        "tool_choice": Row("reported", {"type": "any"}, (("tools", [CLAUDE]),)),
        "tools": Row("honored", [CLAUDE]),
        "top_k": Row("passed on", 5),
        "top_p": Row("passed on", 0.5),
    },
}

TYPES: dict[str, tuple[Any, ...]] = {
    "chat": (chat.completion_create_params.CompletionCreateParamsStreaming,),
    "completions": (completion_create_params.CompletionCreateParamsStreaming,),
    "responses": (responses.response_create_params.ResponseCreateParamsStreaming,),
    "messages": (
        message_create_params.MessageCreateParamsStreaming,
        beta.message_create_params.MessageCreateParamsStreaming,
    ),
}
"""The types of the bodies in the official packages."""

TOKENIZER = Renderer.load(Path(tokentape.demo.__file__).parent / "model").tokenizer
DIALECTS: dict[str, Any] = {
    "chat": ChatCompletions("m", TOKENIZER),
    "completions": Completions("m", TOKENIZER),
    "responses": Responses("m", TOKENIZER),
    "messages": AnthropicMessages("m", ChatTemplate("{{ messages }}{{ tools }}{{ enable_thinking }}"), TOKENIZER),
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER]},
    "completions": {"prompt": [5, 6]},
    "responses": {"input": "hi"},
    "messages": {"messages": [USER], "max_tokens": 8},
}
TAKES_ALL = replace(ENGINE, sampling=frozenset(field.name for field in fields(SamplingParams)))
ROWS = [pytest.param(api, name, row, id=f"{api}-{name}") for api in MATRIX for name, row in MATRIX[api].items()]


def decode(api: str, **values: Any) -> DecodedRequest:
    found: DecodedRequest = asyncio.run(DIALECTS[api].decode({**BODIES[api], **values}, FakeContext(engine=TAKES_ALL)))
    ids = found.turn.prompt_ids
    return structs.replace(found, turn=structs.replace(found.turn, prompt_ids=None if ids is None else ids.tolist()))


@pytest.mark.parametrize("api", MATRIX)
def test_a_model_name_is_reported_only_where_it_could_mean_an_adapter(api: str) -> None:
    context = FakeContext(engine=ENGINE)
    found = asyncio.run(DIALECTS[api].decode({**BODIES[api], "model": "any"}, context))
    assert "model" not in found.ignored
    assert "model" not in decode(api, model="m").ignored
    assert "model" in decode(api, model="any").ignored


@pytest.mark.parametrize("api", MATRIX)
def test_the_matrix_has_every_field_of_the_official_types(api: str) -> None:
    known = {name for typed_dict in TYPES[api] for name in typed_dict.__annotations__}
    assert known - MATRIX[api].keys() == set()


def test_every_field_of_the_official_types_of_parts_is_known() -> None:
    texts = (chat.ChatCompletionContentPartTextParam, chat.ChatCompletionContentPartImageParam)
    assert {name for typed_dict in texts for name in typed_dict.__annotations__} <= _PART_FIELDS
    assert ImageURL.__annotations__.keys() <= _IMAGE_FIELDS
    assert chat.ChatCompletionStreamOptionsParam.__annotations__.keys() <= _STREAM_FIELDS
    items = (responses.ResponseInputTextParam, responses.ResponseOutputTextParam)
    assert {name for typed_dict in items for name in typed_dict.__annotations__} <= PART_FIELDS


@pytest.mark.parametrize(("api", "name", "row"), ROWS)
def test_field_behaves_as_the_matrix_states(api: str, name: str, row: Row) -> None:
    beside = dict(row.beside)
    if row.what == "refused":
        with pytest.raises(InvalidRequest) as caught:
            decode(api, **beside, **{name: row.value})
        assert caught.value.param == name
        return
    if row.shown_by:
        module, _, test = row.shown_by.partition(".")
        source = inspect.getsource(getattr(import_module(f"tests.gateway.wire.{module}"), test))
        assert name in source
        if row.what == "honored":
            return
    without, with_it = decode(api, **beside), decode(api, **beside, **{name: row.value})
    sampling_changed = without.turn.sampling != with_it.turn.sampling
    rest_changed = structs.replace(without.turn, sampling=with_it.turn.sampling) != with_it.turn
    assert (sampling_changed, rest_changed) == (row.what == "passed on", row.what == "honored")
    reported = {name_of_field.partition(".")[0] for name_of_field in with_it.ignored} - {
        name_of_field.partition(".")[0] for name_of_field in without.ignored
    }
    assert reported == ({name} if row.what == "reported" else set())


SENT_AS = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "response_format": "structured_outputs",
    "stop_sequences": "stop",
    "text": "structured_outputs",
    "top_logprobs": "logprobs",
}
"""The names of fields in vLLM's bodies, where these differ."""
PATHS = {"chat": "chat/completions", "completions": "completions", "responses": "responses", "messages": "messages"}


class Recorder:
    """A gateway over an engine for vLLM, and the bodies that the server got."""

    def __init__(self, url: str, server: fake_vllm.FakeVllm) -> None:
        self._url, self._server = url, server
        self._without: dict[tuple[str, str], dict[str, Any]] = {}

    def without(self, api: str, **beside: Any) -> dict[str, Any]:
        """The body that the server gets without the field of a row, made once."""
        key = api, repr(beside)
        if key not in self._without:
            (self._without[key],) = self.bodies(api, **beside)
        return self._without[key]

    def bodies(self, api: str, **values: Any) -> list[dict[str, Any]]:
        """The bodies that the server gets for a body, in its own session."""
        self._server.bodies.clear()
        url = f"{self._url}/sessions/{uuid.uuid4().hex}/v1/{PATHS[api]}"
        answer = httpx2.post(url, json={**BODIES[api], **values}, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return list(self._server.bodies)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    card = {"data": [{"id": fake_vllm.MODEL, "max_model_len": 4096}]}
    renderer = load_renderer("qwen3/templates/Qwen3.jinja")
    with fake_vllm.running() as server, SqliteStore.open(tmp_path_factory.mktemp("record")) as store:
        server.routes["/v1/models"] = JSONResponse(card)

        async def opening() -> ASGIApp:
            engine = await VllmEngine.open(server.url, vocab_size=renderer.tokenizer.vocab_size)
            return create_app(Turns(engine, renderer, store), model_id="m")

        with running(Opening(opening)) as url:
            yield Recorder(url, server)


@pytest.mark.parametrize(("api", "name", "row"), [param for param in ROWS if param.values[2].what != "refused"])
def test_server_receives_what_the_matrix_says(recorder: Recorder, api: str, name: str, row: Row) -> None:
    if row.value == "x" and name == "previous_response_id":
        # A turn of another session: `shown_by` has it.
        return
    without = recorder.without(api, **dict(row.beside))
    with_it = recorder.bodies(api, **dict(row.beside), **{name: row.value})
    changed = {key for body in with_it for key in body.keys() | without.keys() if body.get(key) != without.get(key)}
    if row.what == "passed on":
        key = SENT_AS.get(name, name)
        assert changed == {key}
        sent = with_it[0][key]
        assert sent == {"json": {"type": "object"}} if key == "structured_outputs" else sent in (row.value, [row.value])
    elif name == "n":
        assert (len(with_it), changed) == (2, set())
    elif row.what == "honored" and name != "stream":
        assert changed - {"max_tokens"} == {"prompt"}
    else:
        assert changed <= {"stream", "stream_options"}
        assert (name == "stream") == bool(changed)


def page() -> str:
    lines = [
        "# Fields of request bodies",
        "",
        "What becomes of every field that the official `openai` and `anthropic` packages can send. A field that is not",
        "here is refused by name, apart from [those of vLLM](http.md).",
        "",
        *(f"- *{word}*: {meaning}." for word, meaning in WORDS.items()),
        "",
        "`model` is reported if the engine serves LoRA adapters and the name is not the gateway's model: pin `adapter`",
        "to sample with one. For other engines any name is accepted and nothing is reported.",
        "A larger `max_tokens` than fits in the context is limited to what fits; vLLM itself answers 400.",
        "`tool_choice` is passed on or refused with `--enforce-tools`.",
        "",
        "| Field | Chat | Completions | Responses | Messages |",
        "|---|---|---|---|---|",
    ]
    for name in sorted({name for rows in MATRIX.values() for name in rows}):
        cells = [MATRIX[api][name].what if name in MATRIX[api] else "" for api in MATRIX]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_matrix() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
