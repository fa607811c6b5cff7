from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.cli.conftest import Run
from tests.engines import fake_vllm
from tokentape.chat.renderer import Renderer
from tokentape.store import SqliteStore

HELLO = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`tokentape serve` in a process of its own, and the URL that it says it serves at."""
    command = [sys.executable, "-m", "tokentape", "serve", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            for line in process.stderr:
                said += line
                if found := re.search("at (http://[^ ]+)/v1", line):
                    yield process, found[1]
                    return
            raise AssertionError(said)
        finally:
            process.kill()


def recorded(data: Path, session_id: str) -> list[int]:
    with SqliteStore.open(data, read_only=True) as store:
        (turn,) = store.load_session(session_id).turns
    ids: list[int] = turn.completion_ids.tolist()
    return ids


def test_the_embedded_engine_is_served_recorded_and_stopped_by_an_interrupt(
    model_dir: Path, renderer: Renderer, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with serving(model_dir, "--data", data, "--model-id", "shop") as (process, url):
        reply = httpx2.post(f"{url}/sessions/s/v1/chat/completions", json={**HELLO, "return_token_ids": True}).json()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert reply["model"] == "shop"
    assert recorded(data, "s") == reply["choices"][0]["token_ids"]
    served = json.loads((data / "model.json").read_text())
    assert served == {
        "folder": str(model_dir.resolve()),
        "tokenizer_sha256": renderer.tokenizer.sha256,
        "fingerprint": renderer.fingerprint,
    }


def test_a_vllm_server_can_sample(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        fake_vllm.running() as vllm,
        serving(model_dir, "--engine", "vllm", "--engine-url", vllm.url, "--data", data) as (_, url),
    ):
        assert httpx2.post(f"{url}/sessions/s/v1/chat/completions", json=HELLO).status_code == 200
    assert recorded(data, "s") == fake_vllm.SAMPLED


def test_a_vllm_server_that_is_not_there_is_named(model_dir: Path, tmp_path: Path) -> None:
    # Port 9 is "discard", which nobody serves.
    engine = ["--engine", "vllm", "--engine-url", "http://127.0.0.1:9"]
    command = [sys.executable, "-m", "tokentape", "serve", model_dir, *engine, "--data", tmp_path, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "refuses connections" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", [["--engine", "vllm"], ["--engine-url", "http://127.0.0.1:9"]])
def test_engine_and_its_url_belong_together(run: Run, model_dir: Path, tmp_path: Path, engine: list[str]) -> None:
    done = run("serve", model_dir, *engine, "--data", tmp_path)
    assert done.exit_code == 2
    assert "belong together" in done.stderr


def test_other_machines_are_not_served(run: Run, model_dir: Path, tmp_path: Path) -> None:
    done = run("serve", model_dir, "--data", tmp_path, "--host", "0.0.0.0", "--port", 0)
    assert done.exit_code == 1
    assert "no API keys" in done.stderr


def test_a_template_that_refuses_everything_is_told_in_one_line(run: Run, model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "never.jinja"
    template.write_text("{{ raise_exception('never') }}", encoding="utf-8")
    done = run("serve", model_dir, "--data", tmp_path / "data", "--chat-template", template, "--port", 0)
    assert (done.exit_code, done.stderr) == (1, "error: the chat template refused this conversation: never\n")
    assert not (tmp_path / "data").exists()


def test_keys_limits_and_logs_come_from_the_file(model_dir: Path, tmp_path: Path) -> None:
    file, data, key = tmp_path / "gateway.toml", tmp_path / "data", "k" * 16
    file.write_text(
        f'data = "data"\n[engine]\nthreads = 1\n[keys]\nalice = "{key}"\n[limits]\nbody_bytes = 400\n'
        '[log]\nformat = "json"\n',
        encoding="utf-8",
    )
    with serving(model_dir, "--config", file) as (process, url):
        path = f"{url}/sessions/s/v1/chat/completions"
        headers = {"Authorization": f"Bearer {key}"}
        answers = [
            httpx2.post(path, json=HELLO),
            httpx2.post(path, json={**HELLO, "stop": ["x" * 400]}, headers=headers),
            httpx2.post(path, json=HELLO, headers=headers),
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert [answer.status_code for answer in answers] == [401, 413, 200]
    assert [line["status"] for line in lines if line["logger"] == "tokentape.access"] == [401, 413, 200]
    assert len(recorded(data, "s")) == 3


def test_two_servers_can_sample(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with fake_vllm.running() as one, fake_vllm.running() as other:
        engines = ["--engine", "vllm", "--engine-url", one.url, "--engine-url", other.url]
        with serving(model_dir, *engines, "--data", data) as (_, url):
            assert httpx2.post(f"{url}/sessions/s/v1/chat/completions", json=HELLO).status_code == 200
    assert recorded(data, "s") == fake_vllm.SAMPLED


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_that_is_taken_is_said_with_what_to_do(workers: int, run: Run, model_dir: Path, tmp_path: Path) -> None:
    engine = ("--engine", "vllm", "--engine-url", "http://127.0.0.1:9") if workers > 1 else ()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("serve", model_dir, "--data", tmp_path / "d", "--port", port, "--workers", workers, *engine)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: port {port} of 127.0.0.1 is taken")
    assert "--port" in done.stderr
