"""The auditor against real servers of the demonstration model: clean with its folder, and finds a skewed folder."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.real import served
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.findings import AuditReport
from tokentape.demo import MODEL

VLLM = os.environ.get("TOKENTAPE_VLLM_BIN")
LLAMA = os.environ.get("TOKENTAPE_LLAMA_SERVER_BIN")
SGLANG = os.environ.get("TOKENTAPE_SGLANG_SERVER")
GGUF = os.environ.get("TOKENTAPE_LLAMA_GGUF")

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if VLLM is None:
        pytest.skip("needs the vllm executable of an environment: TOKENTAPE_VLLM_BIN")
    options = f"serve {MODEL} --dtype float32 --enforce-eager --max-model-len 1024 --host 127.0.0.1 --port"
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with served(lambda port: [*shlex.split(f"{VLLM} {options}"), str(port)], log, settings) as url:
        yield f"vllm:{url}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if LLAMA is None or GGUF is None:
        pytest.skip("needs TOKENTAPE_LLAMA_SERVER_BIN and TOKENTAPE_LLAMA_GGUF")
    template = f"--jinja --chat-template-file {MODEL / 'chat_template.jinja'}"
    options = f"-m {GGUF} {template} -t 1 -tb 1 --parallel 2 -c 2048 --host 127.0.0.1 --port"
    log = tmp_path_factory.mktemp("llama") / "log"
    with served(lambda port: [*shlex.split(f"{LLAMA} {options}"), str(port)], log, {}) as url:
        yield f"llamacpp:{url}"


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if SGLANG is None:
        pytest.skip("needs a command that starts an SGLang server: TOKENTAPE_SGLANG_SERVER")
    options = (
        f"--model-path {MODEL} --device cpu --attention-backend torch_native --sampling-backend pytorch "
        "--dtype float32 --context-length 1024 --max-total-tokens 8192 --max-running-requests 8 "
        "--mem-fraction-static 0.3 --disable-overlap-schedule --host 127.0.0.1 --port"
    )
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("sglang") / "log"
    with served(lambda port: [*shlex.split(f"{SGLANG} {options}"), str(port)], log, settings) as url:
        yield f"sglang:{url}"


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    """The folder as it might lie with a trainer: no normalizer, a greedy control token, a newline less."""
    folder = tmp_path / "skewed"
    shutil.copytree(MODEL, folder)
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    spec["normalizer"] = None
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] == "<tool_call>"
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    template = (folder / "chat_template.jinja").read_text()
    assert "'<think>\\n' + reasoning" in template
    (folder / "chat_template.jinja").write_text(template.replace("'<think>\\n' + reasoning", "'<think>' + reasoning"))
    return folder


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    """The folder with two of its rarest words exchanged, which only asking for every token can show."""
    folder = tmp_path / "swapped"
    shutil.copytree(MODEL, folder)
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    vocab = spec["model"]["vocab"]
    left, right = [piece for piece in vocab if len(piece) > 6 and piece.isascii()][-2:]
    vocab[left], vocab[right] = vocab[right], vocab[left]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def kinds(report: AuditReport) -> list[str]:
    return sorted(finding.kind for finding in report.findings if finding.severity == "skew")


def test_vllm_with_the_same_folder_is_clean(vllm: str) -> None:
    report = audit(MODEL, vllm)
    assert kinds(report) == [], [finding.cause for finding in report.findings]
    assert report.tried["render"] > 200
    assert report.tried["echo"] == 6


def test_skewed_training_folder_is_found_against_vllm(vllm: str, skewed: Path) -> None:
    report = audit(skewed, vllm)
    assert kinds(report) == ["added token", "normalizer", "reasoning"]
    found = {finding.kind: finding for finding in report.findings}
    assert found["normalizer"].example == "e\u0301"
    assert found["added token"].example == "<tool_call> "
    assert "rstrip" in found["added token"].cause


def test_vocabulary_is_read_from_vllm(vllm: str, swapped: Path) -> None:
    report = audit(swapped, vllm)
    (found,) = (finding for finding in report.findings if finding.severity == "skew")
    assert report.tried["encode"] > 3990
    assert found.where == ("vocabulary",)
    assert [len(side.ids) for side in (found.a, found.b)] == [1, 1]
    assert found.a.ids != found.b.ids


def test_llama_cpp_does_not_normalize_as_the_tokenizer_does(llama: str) -> None:
    report = audit(MODEL, llama)
    assert kinds(report) == ["normalizer"]
    assert report.findings[0].example == "e\u0301"


def test_only_tool_definitions_differ_with_sglang(sglang: str) -> None:
    report = audit(MODEL, sglang)
    assert kinds(report) == ["tools"]
    assert report.findings[0].b.text is not None
    assert '"defer_loading": null' in report.findings[0].b.text


def test_skewed_training_folder_is_found_against_sglang(sglang: str, skewed: Path) -> None:
    assert kinds(audit(skewed, sglang)) == ["added token", "normalizer", "reasoning", "tools"]
