"""Schemas, forced tool choices and strict tools, enforced by real engines on the demonstration model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from anthropic import Anthropic
from openai import OpenAI
from real import MODEL, Opening, load_forward, served
from starlette.types import ASGIApp
from tests.searching import examples

from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import Engine
from tokentape.engines._kinds import open_engine
from tokentape.engines._transformers import TransformersEngine
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

VLLM = os.environ.get("TOKENTAPE_VLLM_BIN")
SGLANG = os.environ.get("TOKENTAPE_SGLANG_SERVER")
COMMANDS = {
    # Else the demo model writes white space between JSON tokens until its budget is used up.
    "vllm": f"{VLLM} serve {MODEL} --served-model-name demo --dtype float32 --enforce-eager --max-model-len 2048 "
    "--structured-outputs-config.backend xgrammar --structured-outputs-config.disable_any_whitespace true",
    "sglang": f"{SGLANG} --model-path {MODEL} --served-model-name demo --device cpu --attention-backend torch_native "
    "--sampling-backend pytorch --dtype float32 --context-length 2048 --max-total-tokens 16384 "
    "--max-running-requests 8 --mem-fraction-static 0.3 --disable-overlap-schedule "
    "--constrained-json-disable-any-whitespace",
}
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
COLOR = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "dark blue"]}, "shade": {"enum": [1, 20, 300]}},
    "required": ["name", "shade"],
    "additionalProperties": False,
}
SIZE = {"type": "object", "properties": {"tall": {"type": "boolean"}}, "required": ["tall"]}
SCHEMAS = {"paint": COLOR, "measure": SIZE}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
USER: Any = {"role": "user", "content": "hi"}
REPLIES = examples(6, least=3)


def needs(kind: str, have: object, what: str, *marks: Any) -> Any:
    return pytest.param(kind, marks=[*marks, pytest.mark.skipif(not have, reason=f"needs {what}")])


@pytest.fixture(
    scope="module",
    params=[
        needs("embedded", find_spec("llguidance"), "llguidance, of the extra grammar"),
        needs("vllm", VLLM, "vllm: TOKENTAPE_VLLM_BIN", pytest.mark.engines),
        needs("sglang", SGLANG, "a command that starts one: TOKENTAPE_SGLANG_SERVER", pytest.mark.engines),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Return kind and address of a server; the embedded engine has no address."""
    if request.param == "embedded":
        yield request.param, ""
        return

    def command(port: int) -> list[str]:
        return [*COMMANDS[request.param].split(), "--host", "127.0.0.1", "--port", str(port)]

    with served(command, tmp_path_factory.mktemp("server") / "log", SETTINGS) as url:
        yield request.param, url


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore.open(tmp_path)


@pytest.fixture
def gateway(engine: tuple[str, str], store: SqliteStore) -> Iterator[str]:
    kind, url = engine
    renderer = Renderer.load(MODEL)

    def app(opened: Engine) -> ASGIApp:
        return create_app(Turns(opened, renderer, store, enforce_tools=True), model_id="demo")

    async def opening() -> ASGIApp:
        return app(await open_engine(kind, url, vocab_size=renderer.tokenizer.vocab_size))

    embedded = TransformersEngine.open(MODEL, threads=1) if kind == "embedded" else None
    with running(Opening(opening) if embedded is None else app(embedded)) as address:
        yield f"{address}/sessions/s"
    if embedded is not None:
        asyncio.run(embedded.close())


def check(calls: list[tuple[str, Any]], allowed: set[str]) -> None:
    assert calls
    for name, arguments in calls:
        assert name in allowed
        jsonschema.validate(arguments, SCHEMAS[name])


def chat(engine: tuple[str, str], gateway: str, **more: Any) -> list[Any]:
    """Return replies that ended by themselves. The model was not trained on the enforced format and may continue."""
    with OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as client:
        # SGLang accepts seeds only with --enable-deterministic-inference, which needs a GPU.
        seeds = [{} if engine[0] == "sglang" else {"seed": seed} for seed in range(REPLIES)]
        replies = [
            client.chat.completions.create(model="m", messages=[USER], max_tokens=300, top_p=0.9, **seed, **more)
            for seed in seeds
        ]
    done = [reply for reply in replies if reply.choices[0].finish_reason != "length"]
    assert len(done) > REPLIES // 2
    return done


def calls_of(reply: Any) -> list[tuple[str, Any]]:
    calls = reply.choices[0].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_required_is_a_call_of_some_tool(engine: tuple[str, str], gateway: str) -> None:
    for reply in chat(engine, gateway, tools=TOOLS, tool_choice="required"):
        check(calls_of(reply), {"paint", "measure"})
        assert not reply.choices[0].message.content
        assert "ignored_params" not in reply.choices[0].tokentape


def test_a_named_tool_is_called_once(engine: tuple[str, str], gateway: str) -> None:
    choice: Any = {"type": "function", "function": {"name": "paint"}}
    for reply in chat(engine, gateway, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False):
        calls = calls_of(reply)
        check(calls, {"paint"})
        assert len(calls) == 1


def test_arguments_of_strict_tools_are_valid(engine: tuple[str, str], gateway: str) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for reply in chat(engine, gateway, tools=strict):
        assert "ignored_params" not in reply.choices[0].tokentape
        for name, arguments in calls_of(reply):
            jsonschema.validate(arguments, SCHEMAS[name])


def test_responses_and_messages_apis_can_force_calls(gateway: str) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    with OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as client:
        reply = client.responses.create(
            model="m", input="hi", tools=flat, tool_choice="required", temperature=0, max_output_tokens=300
        )
    calls = [(item.name, json.loads(item.arguments)) for item in reply.output if item.type == "function_call"]
    check(calls, {"paint", "measure"})
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    with Anthropic(base_url=gateway, api_key="none", max_retries=0) as anthropic:
        message = anthropic.messages.create(
            model="m",
            max_tokens=300,
            # Of 60 replies without it, one added members that the schema allows until its budget was used up.
            extra_body={"temperature": 0},
            messages=[USER],
            tools=tools,
            tool_choice={"type": "tool", "name": "measure", "disable_parallel_tool_use": True},
        )
    used = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert len(used) == 1
    check(used, {"measure"})


def test_a_reply_follows_its_schema(engine: tuple[str, str], gateway: str, store: SqliteStore) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR}}
    for reply in chat(engine, gateway, response_format=form):
        jsonschema.validate(json.loads(reply.choices[0].message.content), COLOR)
    for turn in store.load_session("s").turns:
        assert json.loads(turn.sampling["json_schema"]) == COLOR
        assert turn.sampled_from.grammar


def test_turn_declares_logprobs_under_the_constraint(engine: tuple[str, str], gateway: str, store: SqliteStore) -> None:
    chat(engine, gateway, tools=TOOLS, tool_choice="required")
    stored = store.load_session("s")
    free, session = load_forward(), Session(stored.info, stored.turns)
    for turn in stored.turns:
        assert json.loads(turn.sampling["structural_tag"])["type"] == "structural_tag"
        assert turn.sampled_from.grammar
        assert turn.logprobs_of is not None
        assert turn.logprobs_of.grammar
        # For example, the control token that begins the call is certain, though the model finds it unlikely.
        ids = np.concatenate([session.context_before(turn.seq), turn.completion_ids])
        own = free(ids)[np.arange(len(ids) - len(turn.completion_ids) - 1, len(ids) - 1), turn.completion_ids]
        assert (turn.logprobs >= own - 1e-3).all()
        assert turn.logprobs.sum() > own.sum() + 1
