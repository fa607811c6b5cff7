"""A server's vocabulary differs from the folder's in one place only, and `tokenizers` itself is the server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.chat.conftest import SMALL
from tests.data import REAL
from tests.engines.stand_in import StandIn
from tokentape.audit._served import FolderModel, Outcome, same_vocabulary, serves_model
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.demo import MODEL
from tokentape.engines._base import EngineInfo
from tokentape.engines._http import HttpClient
from tokentape.gateway._serve import running

Spec = dict[str, Any]
SMALL_FOLDERS = sorted(path.parent for path in SMALL.glob("*/tokenizer.json"))
# The smallest vocabulary is quick, and of the kind that has byte tokens.
REAL_FOLDERS = [
    pytest.param(
        path.parent, marks=[pytest.mark.real, *([] if path.parent.name == "mistral_v3_spm" else [pytest.mark.slow])]
    )
    for path in sorted(REAL.glob("*/tokenizer.json"))
]


class Server:
    """Tokenizes as vLLM does, with `spec`."""

    def __init__(self, spec: Spec, *, decodes: bool = True) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self.decodes = decodes
        self.requests = 0

    async def handle(self, request: Request) -> Response:
        self.requests += 1
        body = await request.json()
        if request.url.path == "/tokenize":
            text = body.get("prompt", body.get("content"))
            return JSONResponse({"tokens": self.tokenizer.encode(text, add_special_tokens=False).ids})
        if not self.decodes:
            return JSONResponse({"detail": "Not Found"}, 404)
        text = self.tokenizer.decode(body["tokens"], skip_special_tokens=False)
        return JSONResponse({"prompt": text, "content": text})


def spec_of(folder: Path) -> Spec:
    spec: Spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return spec


def compared(server: Server, folder: Path, kind: str = "vllm") -> Outcome:
    async def run() -> Outcome:
        http = HttpClient(url)
        try:
            return await same_vocabulary(kind, http, "m", Tokenizer.load(folder))
        finally:
            await http.close()

    with running(Starlette(routes=[Route("/{path:path}", server.handle, methods=["POST"])])) as url:
        return asyncio.run(run())


def swapped(spec: Spec, left: str, right: str) -> Spec:
    vocab = spec["model"]["vocab"]
    vocab[left], vocab[right] = vocab[right], vocab[left]
    return spec


@pytest.mark.parametrize("folder", [*SMALL_FOLDERS, *REAL_FOLDERS], ids=lambda folder: folder.name)
def test_the_same_tokenizer_has_the_same_vocabulary(folder: Path) -> None:
    server = Server(spec_of(folder))
    assert compared(server, folder) == ("ok", "")
    assert server.requests <= 40


def test_two_exchanged_entries_are_found_with_a_text_and_both_ids() -> None:
    spec = spec_of(SMALL / "qwen3")
    left, right = ("".join(merge) for merge in spec["model"]["merges"][-2:])
    ids = [spec["model"]["vocab"][entry] for entry in (left, right)]
    status, found = compared(Server(swapped(spec, left, right)), SMALL / "qwen3")
    assert status == "fail"
    assert f"[{ids[0]}] here and [{ids[1]}] at the server" in found


def test_swapped_parts_of_characters_are_found_although_no_text_has_them() -> None:
    spec = spec_of(SMALL / "qwen3")
    vocab = spec["model"]["vocab"]
    parts = [entry for entry in vocab if len(entry) == 1 and entry in "ÀÁõö÷øùúûüýþÿðñòóô"]
    known = tokenizers.Tokenizer.from_str(json.dumps(spec))
    left, right = [p for p in parts if p in "óô"]
    assert not {vocab[left], vocab[right]} & set(known.encode("óô", add_special_tokens=False).ids)
    status, found = compared(Server(swapped(spec, left, right)), SMALL / "qwen3")
    assert status == "fail"
    assert "at the server" in found


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_dropped_merge_is_found(ignore_merges: bool) -> None:
    folder = SMALL / ("llama3" if ignore_merges else "qwen3")
    spec = spec_of(folder)
    assert spec["model"]["ignore_merges"] == ignore_merges
    del spec["model"]["merges"][-1]
    status, found = compared(Server(spec), folder)
    assert status == "fail"
    assert "at the server from token" in found


def test_a_moved_text_token_is_found() -> None:
    spec = spec_of(SMALL / "gemma3")
    tokens = {token["content"]: token for token in spec["added_tokens"]}
    assert Tokenizer.load(SMALL / "gemma3").control("▁▁▁▁") is None
    shorter, longer = tokens["▁▁▁"], tokens["▁▁▁▁"]
    shorter["content"], longer["content"] = longer["content"], shorter["content"]
    status, found = compared(Server(swapped(spec, "▁▁▁", "▁▁▁▁")), SMALL / "gemma3")
    assert (status, "at the server" in found) == ("fail", True)


def test_ids_that_the_server_does_not_decode_are_unknown() -> None:
    status, found = compared(Server(spec_of(SMALL / "qwen3"), decodes=False), SMALL / "qwen3")
    assert (status, "can't decode" in found) == ("warn", True)


def test_llama_cpp_may_split_a_text_differently_if_the_ids_mean_the_same() -> None:
    spec = spec_of(SMALL / "qwen3")
    swap = swapped(spec_of(SMALL / "qwen3"), *("".join(merge) for merge in spec["model"]["merges"][-2:]))
    del spec["model"]["merges"][-1]
    assert compared(Server(spec), SMALL / "qwen3", "llamacpp")[0] == "warn"
    assert compared(Server(swap), SMALL / "qwen3", "llamacpp")[0] == "fail"


def test_unchanged_server_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer.load(MODEL)
    size = renderer.tokenizer.vocab_size
    long_texts: list[str] = []

    class Counting(StandIn):
        started = ""

        async def handle(self, request: Request) -> Response:
            if request.url.path == "/metrics" and self.started:
                return Response(f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.started}\n")
            return await super().handle(request)

        def _tokens(self, body: dict[str, Any]) -> list[int]:
            long_texts.extend([body["prompt"]] * (len(body["prompt"]) > size))
            return super()._tokens(body)

    server = Counting(renderer, root=str(MODEL))

    async def asks_the_server(generation: int, started: str = "", context: int = 4096) -> bool:
        monkeypatch.setattr(HttpClient, "generation", generation)
        server.started, server.max_model_len = started, context
        before = len(long_texts)
        found = await serves_model("vllm", http, info, renderer, FolderModel.read(MODEL))
        assert (found[0].status, "vocabulary" in found[0].found) == ("ok", True)
        return len(long_texts) > before

    async def run() -> list[bool]:
        nonlocal http
        http = HttpClient(url)
        try:
            known = [
                await asks_the_server(1),
                await asks_the_server(1),
                await asks_the_server(2),
                await asks_the_server(2, context=4097),
            ]
            return [
                *known,
                await asks_the_server(2, "1.5e9"),
                await asks_the_server(3, "1.5e9"),
                await asks_the_server(4, "1.6e9"),
            ]
        finally:
            await http.close()

    info = EngineInfo(
        "vllm", "0.33.0", "m", size, 4096, "raw_logprobs", frozenset(), scoring_paths=("/v1/completions",)
    )
    with running(server.app) as url:
        http = HttpClient(url)
        assert asyncio.run(run()) == [True, False, True, True, True, False, True]
