"""What a server reveals: its ids, the likelihood of a text, the name of its model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.engines.stand_in import StandIn, language_model
from tokentape.audit import _served
from tokentape.audit._served import (
    MARGIN,
    SCORED_TOKENS,
    CheckResult,
    FolderModel,
    likely_text,
    other_ids,
    same_name,
    same_template,
    same_tokenizer,
    serves_model,
)
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.engines._base import EngineInfo
from tokentape.engines._http import HttpClient
from tokentape.engines._identity import ServedAs
from tokentape.gateway._serve import running

INFO = EngineInfo("vllm", "0.33.0", "m", 4000, 4096, "raw_logprobs", frozenset(), scoring_paths=("/v1/completions",))


def scored(server: StandIn, renderer: Renderer, info: EngineInfo = INFO) -> CheckResult:
    async def run() -> CheckResult:
        http = HttpClient(url)
        try:
            return await likely_text(http, info, renderer)
        finally:
            await http.close()

    with running(server.app) as url:
        return asyncio.run(run())


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The tiny model's words with different ids: all except control tokens in reverse order."""
    folder = tmp_path_factory.mktemp("reversed")
    for file in MODEL.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    controls = {token["content"] for token in spec["added_tokens"]}
    words = [word for word in spec["model"]["vocab"] if word not in controls]
    ids = [spec["model"]["vocab"][word] for word in words]
    spec["model"]["vocab"].update(zip(words, reversed(ids), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return Renderer.load(folder)


def examined(url: str, renderer: Renderer) -> list[CheckResult]:
    async def run() -> list[CheckResult]:
        http = HttpClient(url)
        try:
            return [await check("vllm", http, "m", renderer) for check in (same_tokenizer, same_template)]
        finally:
            await http.close()

    return asyncio.run(run())


def tokenizing(answer: Callable[[dict[str, Any]], list[int]]) -> Starlette:
    """A server that tokenizes as `answer` does."""

    async def tokenize(request: Request) -> Response:
        return JSONResponse({"tokens": answer(await request.json())})

    return Starlette(routes=[Route("/tokenize", tokenize, methods=["POST"])])


def as_we_do(renderer: Renderer) -> Callable[[dict[str, Any]], list[int]]:
    def answer(body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return renderer.tokenizer.encode_plain(body["prompt"])
        ids: list[int] = renderer.render(body["messages"], body.get("tools", ())).ids.tolist()
        return ids

    return answer


def test_server_with_the_same_tokenizer_and_template_passes(renderer: Renderer) -> None:
    with running(tokenizing(as_we_do(renderer))) as url:
        assert [finding.status for finding in examined(url, renderer)] == ["ok", "ok"]


def test_server_with_another_tokenizer_fails_with_text_and_position(renderer: Renderer) -> None:
    with running(tokenizing(lambda body: [*as_we_do(renderer)(body), 7])) as url:
        tokenizer, template = examined(url, renderer)
    assert (tokenizer.status, template.status) == ("fail", "warn")
    assert "[7] at the server from token" in tokenizer.found
    assert "different ids for a question: [" in template.found
    assert "agents that call the server directly" in template.advice


def test_server_that_renders_tools_differently_is_found(renderer: Renderer) -> None:
    ours = as_we_do(renderer)

    def with_strict(body: dict[str, Any]) -> list[int]:
        tools = [{**tool, "function": {**tool["function"], "strict": False}} for tool in body.get("tools", ())]
        return ours({**body, "tools": tools})

    with running(tokenizing(with_strict)) as url:
        tokenizer, template = examined(url, renderer)
    assert (tokenizer.status, template.status) == ("ok", "warn")
    assert "a question with a tool" in template.found


def test_server_without_endpoints_is_not_compared(renderer: Renderer) -> None:
    with running(Starlette()) as url:
        assert ["not compared" in finding.found for finding in examined(url, renderer)] == [True, True]


def test_a_control_token_with_another_id_fails(renderer: Renderer, tmp_path: Path) -> None:
    for file in MODEL.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    first, second = spec["added_tokens"][-2:]
    first["content"], second["content"] = second["content"], first["content"]
    swapped = {first["content"]: first["id"], second["content"]: second["id"]}
    spec["model"]["vocab"].update({word: i for word, i in swapped.items() if word in spec["model"]["vocab"]})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with running(StandIn(Renderer.load(tmp_path)).app) as url:
        tokenizer, _ = examined(url, renderer)
    assert tokenizer.status == "fail"
    assert "the text of all control tokens" in tokenizer.found


def test_a_plain_text_is_likely_to_the_model_of_the_same_ids(renderer: Renderer) -> None:
    finding = scored(StandIn(renderer, language_model(renderer)), renderer)
    assert finding.status == "ok", finding


def test_a_plain_text_is_noise_to_a_model_of_other_ids(renderer: Renderer, other: Renderer) -> None:
    finding = scored(StandIn(other, language_model(other)), renderer)
    assert finding.status == "fail"
    assert f"at least {MARGIN} expected" in finding.found


def test_prompts_are_scored_one_at_a_time(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    running_now, most = 0, 0

    async def score(*args: Any) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0)
        running_now -= 1

    monkeypatch.setattr(_served, "server_scores", score)
    scored(StandIn(renderer), renderer)
    assert most == 1


def test_server_without_likelihoods_is_not_scored(renderer: Renderer) -> None:
    assert scored(StandIn(renderer), renderer).status == "warn"


def test_a_server_with_little_context_is_not_scored(renderer: Renderer) -> None:
    info = EngineInfo("vllm", "0.33.0", "m", 4000, 64, "raw_logprobs", frozenset(), scoring_paths=("/v1/completions",))
    server = StandIn(renderer, language_model(renderer))
    assert scored(server, renderer, info).status == "warn"
    assert server.scored == 0


def test_replaced_ids_keep_repetitions_and_stay_in_the_vocabulary() -> None:
    import numpy as np

    ids = np.array([9, *range(50), *range(50), 3999], np.int32)
    others = other_ids(ids, 4000, 0)
    tail, changed = ids[-SCORED_TOKENS:], others[-SCORED_TOKENS:]
    assert others[:-SCORED_TOKENS].tolist() == ids[:-SCORED_TOKENS].tolist()
    assert len({*zip(tail.tolist(), changed.tolist(), strict=True)}) == len({*tail.tolist()})
    assert 0 <= changed.min() <= changed.max() < 4000
    assert (tail != changed).mean() > 0.9


def test_ids_that_the_server_may_lack_are_not_sent(renderer: Renderer, other: Renderer) -> None:
    server = StandIn(other, language_model(other), name="model")

    async def run() -> list[CheckResult]:
        http = HttpClient(url)
        try:
            return await serves_model("vllm", http, INFO, renderer, FolderModel.read(MODEL))
        finally:
            await http.close()

    with running(server.app) as url:
        findings = asyncio.run(run())
    assert [finding.status for finding in findings] == ["fail", "ok"]
    assert server.scored == 0
    assert not any("--unverified-model" in finding.advice for finding in findings)


def test_a_model_of_a_narrow_task_fails_with_the_option_that_serves_it(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language_model(renderer)
    monkeypatch.setattr(model, "logprobs", lambda ids: [-9.0] * (len(ids) - 1))
    server = StandIn(renderer, model, name="m", root=str(MODEL))

    async def run() -> list[CheckResult]:
        http = HttpClient(url)
        try:
            return await serves_model("vllm", http, INFO, renderer, FolderModel.read(MODEL), "m")
        finally:
            await http.close()

    with running(server.app) as url:
        tokenizer, name, text = asyncio.run(run())
    assert (tokenizer.status, name.status, text.status) == ("ok", "ok", "fail")
    assert "pass --unverified-model" in text.advice
    assert "--engine-model does not override" in text.advice


QWEN = FolderModel(frozenset({"/models/Qwen3-8B"}), {"model_type": "qwen3", "max_position_embeddings": 40960})
CACHED = FolderModel(frozenset({"/c/models--Qwen--Qwen3-8B/snapshots/f00", "Qwen/Qwen3-8B"}), {})
STEP = FolderModel(frozenset({"/runs/7/step_100"}), {"max_position_embeddings": 40960})


@pytest.mark.parametrize(
    ("names", "folder", "more", "status"),
    [
        ({"Qwen/Qwen3-8B"}, QWEN, {}, "ok"),
        ({"policy", "/data/qwen3-8b/"}, QWEN, {}, "ok"),
        ({"Qwen/Qwen3-8B"}, CACHED, {}, "ok"),
        ({"/hub/models--Qwen--Qwen3-8B/snapshots/0ff"}, CACHED, {}, "ok"),
        ({"/hub/models--Qwen--Qwen3-8B/snapshots/0ff"}, QWEN, {}, "ok"),
        ({"Qwen/Qwen3-4B"}, QWEN, {}, "fail"),
        ({"/models/Qwen3-4B"}, QWEN, {}, "fail"),
        ({"deepseek-ai/DeepSeek-R1"}, CACHED, {}, "fail"),
        ({"policy"}, QWEN, {}, "warn"),
        ({"Qwen/Qwen3-8B"}, STEP, {}, "warn"),
        ({"policy"}, STEP, {"max_model_len": 131072}, "fail"),
        ({"policy"}, STEP, {"max_model_len": 40960}, "warn"),
        ({"Qwen/Qwen3-8B"}, QWEN, {"max_model_len": 131072}, "ok"),
        ({"Qwen/Qwen3-8B"}, QWEN, {"model_type": "llama"}, "fail"),
        ({"Qwen/Qwen3-8B"}, QWEN, {"model_type": "qwen3"}, "ok"),
        ({"Qwen/Qwen3-8B"}, CACHED, {"model_type": "qwen3"}, "ok"),
    ],
)
def test_model_names_are_compared(names: set[str], folder: FolderModel, more: dict[str, Any], status: str) -> None:
    assert same_name(ServedAs(frozenset(names), frozenset(names), **more), folder).status == status


def test_a_name_that_is_expected_is_the_one_that_counts() -> None:
    served = ServedAs(frozenset({"policy"}), frozenset({"policy", "/runs/7/step_100"}))
    assert same_name(served, QWEN, "policy").status == "ok"
    assert same_name(served, QWEN, "Qwen/Qwen3-8B").status == "fail"
