from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import numpy as np
import pytest
from starlette.responses import JSONResponse

from tests.cli.conftest import Run
from tests.engines import fake_vllm
from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._certification import certify
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.cli.doctor import (
    access,
    certified,
    data_directory,
    environment,
    probe,
    rescored,
    sqlite_version,
)
from tokentape.config import ServeConfig
from tokentape.engines._http import HttpClient
from tokentape.engines._scoring import Scores
from tokentape.errors import EngineContractError
from tokentape.store import SqliteStore

KEY = "k" * 16


def test_suitable_machine_is_exit_code_0(run: Run, model_dir: Path, tmp_path: Path) -> None:
    done = run("doctor", model_dir, "--threads", 1, "--port", 0, "--data", tmp_path / "data", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"]) == (0, True)
    names = [finding["name"] for finding in report["findings"]]
    assert names == [
        *("versions", "sqlite", "data", "disk", "fsync", "host", "model", "certificate", "engine", "probe", "logprobs"),
    ]
    assert not (tmp_path / "data").exists()


def test_failure_is_named_with_a_remedy_and_exit_code_1(run: Run, model_dir: Path, tmp_path: Path) -> None:
    # Port 9 is "discard", which is not served.
    done = run("doctor", model_dir, "--data", tmp_path, "--engine", "vllm", "--engine-url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    line, advice = done.stdout.splitlines()[-2:]
    assert line.startswith("fail  engine: http://127.0.0.1:9: the engine refuses connections")
    assert advice.strip() == "Check that it runs, its URL and its API key."


def test_server_is_identified_and_checked_for_ids(run: Run, model_dir: Path, tmp_path: Path) -> None:
    with fake_vllm.running() as vllm:
        vllm.scale_out = True
        arguments = ("doctor", model_dir, "--data", tmp_path, "--engine", "vllm", "--engine-url", vllm.url)
        done = run(*arguments, "--trainer", "verl")
        assert "ok    engine: vllm " in done.stdout
        assert "--enable-scale-out" not in done.stdout
        assert "      For other temperatures restart vLLM with `--logprobs-mode processed_logprobs`, or" in done.stdout
        vllm.scale_out = False
        done = run(*arguments)
        assert "      vLLM runs without --enable-scale-out" in done.stdout
        assert "warn  logprobs: the engine reports raw_logprobs, right for every trainer if all calls" in done.stdout


def test_a_paused_server_is_reported_at_once(run: Run, model_dir: Path, tmp_path: Path) -> None:
    with fake_vllm.running() as vllm:
        error = {"message": "Generation is paused. Please retry after it resumes.", "code": 503}
        for path in ("/v1/completions", "/inference/v1/generate"):
            vllm.routes[path] = JSONResponse({"error": error}, 503)
        done = run("doctor", model_dir, "--data", tmp_path, "--engine", "vllm", "--engine-url", vllm.url)
    assert done.exit_code == 1
    assert "answered 503" in done.stdout


def test_usability_of_the_record_by_a_trainer_is_reported(run: Run, model_dir: Path, tmp_path: Path) -> None:
    def line(*options: object) -> str:
        done = run("doctor", model_dir, "--threads", 1, "--data", tmp_path / "data", *options)
        assert done.exit_code == 0, done.stdout
        return "\n".join(done.stdout.splitlines()[-2:])

    assert "ok    trainer: verl 0.9.1 computes log_softmax(logits / T)" in line("--trainer", "verl")
    raw = line("--trainer", "verl", "--logprobs-mode", "raw")
    assert "warn  trainer: verl 0.9.1" in raw
    assert "--logprobs-mode processed" in raw
    done = run("doctor", model_dir, "--trainer", "none")
    assert done.exit_code == 2
    assert "unknown trainer 'none'; choose from agent-lightning" in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("version", "noted"), [((3, 6, 23), False), ((3, 40, 1), True), ((3, 51, 2), True), ((3, 51, 3), False)]
)
def test_the_wal_reset_bug_is_noted(version: tuple[int, ...], noted: bool) -> None:
    finding = sqlite_version(version)
    assert finding.status == "ok"
    assert ("WAL-reset" in finding.found) == noted


def test_misspelled_variable_is_reported() -> None:
    (finding,) = environment({"TOKENTAPE_PROT": "1", "TOKENTAPE_PORT": "1", "TOKENTAPE_CACHE": "x", "PROT": "1"})
    assert (finding.found, finding.advice) == ("TOKENTAPE_PROT is not a setting", "Did you mean TOKENTAPE_PORT?")


def test_a_directory_in_use_is_a_warning(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path):
        finding = next(data_directory(tmp_path))
    assert finding.status == "warn"
    assert "open for writing by process" in finding.found
    assert "stop it" not in finding.found
    assert finding.advice == "This is fine if that process is the gateway."


def test_file_that_is_not_a_record_fails(tmp_path: Path) -> None:
    (tmp_path / "tokentape.db").write_bytes(b"not a database" * 100)
    assert next(data_directory(tmp_path)).status == "fail"


def test_a_directory_that_can_not_be_made_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = data_directory(tmp_path / "file" / "data")
    assert finding.status == "fail"


def test_public_address_without_keys_fails_and_open_key_files_warn(tmp_path: Path) -> None:
    assert [finding.status for finding in access(ServeConfig(host="0.0.0.0"))] == ["fail"]
    path = tmp_path / "keys"
    path.write_text(f"alice={KEY}", encoding="utf-8")
    path.chmod(0o644)
    findings = list(access(ServeConfig(host="0.0.0.0", keys_file=path)))
    assert [finding.status for finding in findings] == ["ok", "warn"]
    path.chmod(0o600)
    assert [finding.status for finding in access(ServeConfig(host="0.0.0.0", keys_file=path))] == ["ok"]


def test_a_taken_port_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = {check.name: check for check in access(ServeConfig(port=taken.getsockname()[1]))}
    assert (found["port"].status, "is taken" in found["port"].found) == ("warn", True)


def test_an_address_of_another_machine_is_a_failure(tmp_path: Path) -> None:
    (path := tmp_path / "keys").write_text(f"alice={KEY}", encoding="utf-8")
    path.chmod(0o600)
    # RFC 5737 reserves this address for documentation.
    found = list(access(ServeConfig(host="192.0.2.1", port=0, keys_file=path)))[-1]
    assert (found.name, found.status, "can't listen on 192.0.2.1" in found.found) == ("host", "fail", True)


def test_uncertified_features_are_named(renderer: Renderer) -> None:
    refusing = Renderer(
        renderer.tokenizer,
        ChatTemplate(
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )
    finding = certified(certify(refusing))
    assert finding.status == "warn"
    assert "refused continuations: " in finding.found
    assert "tool" in finding.found


def test_nondeterministic_engine_is_a_warning(renderer: Renderer) -> None:
    finding = asyncio.run(probe(ScriptedEngine(renderer, ["one", "two"]), renderer))
    assert finding.status == "warn"
    assert "differed the second time" in finding.found
    assert "Recorded ids and logprobs are not affected" in finding.advice


def test_an_engine_that_samples_nothing_fails(renderer: Renderer) -> None:
    finding = asyncio.run(probe(ScriptedEngine(renderer, ["", ""]), renderer))
    assert finding.status == "fail"


@pytest.mark.parametrize(("score", "status"), [(-0.6, "ok"), (-1.5, "warn")])
def test_sampled_logprobs_are_compared_with_the_servers_scores(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, score: float, status: str
) -> None:
    async def scores(_http: object, _info: object, ids: np.ndarray, start: int) -> Scores:
        return Scores(np.full(len(ids) - start, score, np.float32), np.empty((len(ids) - start, 0), np.float32))

    monkeypatch.setattr("tokentape.cli.doctor.server_scores", scores)
    (finding,) = asyncio.run(rescored(ScriptedEngine(renderer, ["one two"]), HttpClient("http://unused"), renderer))
    assert (finding.name, finding.status) == ("scores", status)


def test_a_server_that_breaks_its_contract_answered(
    run: Run, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise EngineContractError("the engine returned no logprobs")

    monkeypatch.setattr("tokentape.cli.doctor.open_configured", broken)
    server = ("--engine", "vllm", "--engine-url", "http://127.0.0.1:9")
    done = run("doctor", model_dir, "--data", tmp_path, *server)
    assert done.stdout.splitlines()[-1] == "fail  engine: the engine returned no logprobs"


def test_without_torch_the_extra_is_advised(
    run: Run, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr("tokentape.cli.doctor.open_configured", missing)
    *_, line, advice = run("doctor", model_dir, "--data", tmp_path).stdout.splitlines()
    assert line == "fail  engine: No module named 'torch'"
    assert advice.strip().startswith("Run: pip install 'tokentape[hf]'")
