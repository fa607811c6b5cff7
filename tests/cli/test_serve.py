from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.cli.conftest import Run
from tests.engines import fake_vllm
from tests.engines.adapters import write_adapter
from tests.engines.stand_in import StandIn, language_model
from tests.processes import Command
from tests.records import SETUP, make_turn
from tests.vocabularies import changed_tokenizer
from tests.waiting import PATIENCE
from tokentape._opening import open_configured, wait_for_engine
from tokentape.chat._renderer import Renderer
from tokentape.cli.serving import _removed_if_unused
from tokentape.config import EngineConfig, ServeConfig
from tokentape.demo import MODEL
from tokentape.errors import EngineError
from tokentape.gateway._serve import running
from tokentape.store import SqliteStore
from tokentape.store._served_model import ServedModel, write_served_model
from tokentape.types import SessionInfo

HELLO = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[Command, str]]:
    """Run `tokentape serve` in a separate process, and yield its printed URL."""
    with Command(["serve", *arguments, "--port", 0]) as process:
        try:
            output = ""
            for line in process.stderr:
                output += line
                if match := re.search("at (http://[^ ]+)/sessions/NAME/v1 ", line):
                    yield process, match[1]
                    return
            raise AssertionError(output)
        finally:
            process.kill()


def recorded(data: Path, session_id: str) -> list[int]:
    with SqliteStore.open(data, read_only=True) as store:
        (turn,) = store.load_session(session_id).turns
    ids: list[int] = turn.completion_ids.tolist()
    return ids


def test_embedded_engine_is_served_recorded_and_stopped_by_interrupt(
    model_dir: Path, renderer: Renderer, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    pytest.importorskip("peft")
    write_adapter(tmp_path / "lora", 0, model_dir)
    options = ["--model-id", "shop", "--adapter", f"a={tmp_path}/lora", "--supports", 5000]
    with serving(model_dir, "--data", data, *options, "--payloads-to", tmp_path / "files") as (process, url):
        reply = httpx2.post(f"{url}/sessions/s/v1/chat/completions", json={**HELLO, "return_token_ids": True}).json()
        httpx2.post(f"{url}/sessions", json={"session_id": "with", "pin": {"adapter": "a"}})
        other = httpx2.post(f"{url}/sessions/with/v1/chat/completions", json={**HELLO, "return_token_ids": True}).json()
        truncated = {**HELLO, "temperature": 1, "top_p": 0.9}
        httpx2.post(f"{url}/sessions/truncated/v1/chat/completions", json=truncated).raise_for_status()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert f"stopped; every answered call is recorded in {data}" in process.stderr.read()
    assert reply["model"] == "shop"
    assert recorded(data, "s") == reply["choices"][0]["token_ids"]
    assert recorded(data, "with") == other["choices"][0]["token_ids"]
    with SqliteStore.open(data, read_only=True) as store:
        (plain,), (adapted,) = store.load_session("s").turns, store.load_session("with").turns
        (supports,) = store.load_session("truncated", per_token=True).payloads
    assert (plain.adapter, adapted.adapter) == (None, "a")
    assert (supports.name, len(list((tmp_path / "files").iterdir()))) == ("supports", 1)
    assert abs(plain.logprobs - adapted.logprobs).max() > 1e-3
    served = json.loads((data / "model.json").read_text())
    assert served == {
        "folder": str(model_dir.resolve()),
        "tokenizer_sha256": renderer.tokenizer.sha256,
        "fingerprint": renderer.fingerprint,
    }


@pytest.mark.slow  # as with two servers
def test_a_vllm_server_can_sample(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        fake_vllm.running() as vllm,
        serving(model_dir, "--engine", "vllm", "--engine-url", vllm.url, "--data", data) as (_, url),
    ):
        assert httpx2.post(f"{url}/sessions/s/v1/chat/completions", json=HELLO).status_code == 200
    assert recorded(data, "s") == fake_vllm.SAMPLED


def test_gateway_with_a_failed_record_does_not_say_that_all_is_recorded(model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, "--data", tmp_path) as (process, url):
        (tmp_path / "tokentape.db").unlink()
        assert httpx2.post(f"{url}/sessions/s/v1/chat/completions", json=HELLO).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 2
        assert process.stderr.read().splitlines()[-1].startswith(f"error: stopped, but the record in {tmp_path} failed")


def test_unreachable_vllm_server_is_named(run: Run, model_dir: Path, tmp_path: Path) -> None:
    # Port 9 is "discard", which is not served.
    engine = ["--engine", "vllm", "--engine-url", "http://127.0.0.1:9"]
    done = run("serve", model_dir, *engine, "--data", tmp_path, "--port", 0, "--engine-wait", 0)
    assert done.exit_code == 2
    assert done.stderr.count("refuses connections") == 1
    assert "startup failed" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: http://127.0.0.1:9: the engine refuses connections")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        (["--engine", "vllm"], "add --engine-url http://host:port"),
        (["--engine-url", "http://127.0.0.1:9"], "add --engine vllm"),
        (
            ["--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--logprobs-mode", "processed"],
            "applies only to the embedded engine. Leave it out, and set",
        ),
        (
            ["--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--adapter", "a=x"],
            "and pin its name",
        ),
        (
            ["--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--device", "cuda"],
            "Leave it out, and choose the",
        ),
        (["--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--dtype", "bfloat16"], "Leave it out, and set it"),
        (["--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--threads", "2"], "choose the threads at"),
        (["--adapter", "a"], "'a' is not NAME=VALUE; expected a value such as a=runs/a"),
        (["--adapter", "=runs/a"], "'=runs/a' is not NAME=VALUE; expected a value such as a=runs/a"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_advice(
    run: Run, model_dir: Path, tmp_path: Path, engine: list[str], advice: str
) -> None:
    done = run("serve", model_dir, *engine, "--data", tmp_path)
    assert done.exit_code == 2
    assert advice in done.stderr


@asynccontextmanager
async def answering(answer: bytes, port: int = 0) -> AsyncIterator[int]:
    """Run a server that answers every request with these bytes, and yield its port."""

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", port) as server:
        yield server.sockets[0].getsockname()[1]


def http(status: str, body: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


CARDS = http("200 OK", '{"data": [{"id": "m"}]}')


@pytest.mark.parametrize(("before", "cause"), [(None, "refuses connections"), (http("503 Busy"), "answered 503")])
def test_loading_server_is_awaited_and_the_cause_is_reported_immediately(
    before: bytes | None, cause: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loads() -> None:
        async with answering(before or b"") as port:
            config = EngineConfig(kind="vllm", urls=(f"http://127.0.0.1:{port}",))
            if before is not None:
                await wait_for_engine(config, once=True)
        if before is None:
            await wait_for_engine(config, once=True)
        waiting = asyncio.create_task(wait_for_engine(config))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        async with answering(CARDS, port):
            await asyncio.wait_for(waiting, PATIENCE)

    monkeypatch.setattr("tokentape._opening._WAIT_TICK_SECONDS", 0.01)
    caplog.set_level("INFO", "tokentape.serve")
    asyncio.run(loads())
    # The second line is from the second wait.
    first, _ = caplog.messages
    assert first.startswith("waiting for the engine, 300 s at most (--engine-wait): http://127.0.0.1:")
    assert cause in first


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http("404 Not Found"), "it has no such path or model; check its URL (http://host:port)"),
        (http("200 OK", "<html>Welcome</html>"), "expected the http://host:port of an inference server"),
        (http("301 Moved"), "redirects are not followed"),
        (http("401 Unauthorized"), "check the API key"),
    ],
)
def test_address_of_another_service_is_refused_immediately(answer: bytes, message: str) -> None:
    async def waits() -> str:
        async with answering(answer) as port:
            url = f"http://127.0.0.1:{port}"
            with pytest.raises(EngineError) as refused:
                await asyncio.wait_for(wait_for_engine(EngineConfig(kind="vllm", urls=(url,))), PATIENCE)
            assert str(refused.value).startswith(f"{url}: the engine")
            return str(refused.value)

    assert message in asyncio.run(waits())


def test_https_to_an_http_server_is_refused_immediately() -> None:
    async def waits() -> None:
        async with answering(http("400 Bad Request")) as port:
            config = EngineConfig(kind="vllm", urls=(f"https://127.0.0.1:{port}",))
            with pytest.raises(EngineError, match="the engine does not use https; pass its URL with http://"):
                await asyncio.wait_for(wait_for_engine(config), PATIENCE)

    asyncio.run(waits())


@pytest.mark.parametrize(
    ("code", "message"),
    [(socket.EAI_NONAME, "the engine's host name is unknown"), (socket.EAI_AGAIN, "no DNS server answers")],
)
def test_unknown_host_is_refused_and_a_silent_name_server_is_awaited(
    code: int, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "x")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    caplog.set_level("INFO", "tokentape.serve")
    config = EngineConfig(kind="vllm", urls=("http://gpu-sevrer:8000",))
    if code == socket.EAI_NONAME:
        with pytest.raises(EngineError, match=f"http://gpu-sevrer:8000: {message}"):
            asyncio.run(wait_for_engine(config))
    else:
        asyncio.run(wait_for_engine(config, once=True))
        assert message in caplog.text


def test_replica_with_a_wrong_address_does_not_end_the_wait_for_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def waits() -> None:
        async with answering(http("404 Not Found")) as port:
            urls = (f"http://127.0.0.1:{port}", "http://127.0.0.1:9")
            await wait_for_engine(EngineConfig(kind="vllm", urls=urls), once=True)

    caplog.set_level("INFO", "tokentape.serve")
    asyncio.run(waits())
    assert "http://127.0.0.1:9: the engine refuses connections" in caplog.text


def test_port_and_engine_are_checked_before_the_folder_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("tokentape.cli.serving.open_renderer", loaded)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert "is taken" in run("serve", tmp_path, *remote("http://127.0.0.1:9"), "--port", port).stderr
        done = run("serve", tmp_path, *remote("http://127.0.0.1:x"), "--port", 0)
    assert done.stderr == "error: http://127.0.0.1:x: the engine's URL is malformed; expected http://host:port\n"


def test_gateway_is_refused_as_an_engine(run: Run, model_dir: Path, renderer: Renderer, tmp_path: Path) -> None:
    with running(StandIn(renderer, owner="tokentape").app) as url:
        done = run("serve", model_dir, *remote(url), "--data", tmp_path / "data", "--port", 0)
    assert done.exit_code == 2
    assert "this is the URL of a Tokentape gateway" in done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_data_that_is_a_file_is_refused(workers: int, run: Run, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(
        "serve",
        model_dir,
        *remote("http://127.0.0.1:9"),
        "--data",
        tmp_path / "file",
        "--workers",
        workers,
        "--port",
        0,
    )
    assert done.exit_code == 2
    assert "it is a file; name a directory that this user may write to" in done.stderr


def test_data_without_permission_is_refused(
    run: Run, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, *a, **b: Path(path) != tmp_path / "d" and access(path, *a, **b))
    done = run("serve", model_dir, *remote("http://127.0.0.1:9"), "--data", tmp_path / "d", "--port", 0)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/d can't be used as a data directory: Permission")


def test_public_address_without_keys_is_refused(run: Run, model_dir: Path, tmp_path: Path) -> None:
    done = run("serve", model_dir, "--data", tmp_path, "--host", "0.0.0.0", "--port", 0)
    assert done.exit_code == 2
    assert "no API keys" in done.stderr


def test_template_that_refuses_everything_stops_serve(run: Run, model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "never.jinja"
    template.write_text("{{ raise_exception('never') }}", encoding="utf-8")
    done = run("serve", model_dir, "--data", tmp_path / "data", "--chat-template", template, "--port", 0)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "error: the chat template refused this conversation: never"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def test_keys_limits_and_logs_are_read_from_the_file(model_dir: Path, tmp_path: Path) -> None:
    file, data, key = tmp_path / "gateway.toml", tmp_path / "data", "k" * 16
    with fake_vllm.running() as server, ExitStack() as opened:
        file.write_text(
            f'data = "data"\n[engine]\nkind = "vllm"\nurls = ["{server.url}"]\n[keys]\nalice = "{key}"\n'
            '[limits]\nbody_bytes = 400\n[log]\nformat = "json"\n',
            encoding="utf-8",
        )
        process, url = opened.enter_context(serving(model_dir, "--config", file))
        path = f"{url}/sessions/s/v1/chat/completions"
        headers = {"Authorization": f"Bearer {key}"}
        answers = [
            httpx2.post(path, json=HELLO),
            httpx2.post(path, json={**HELLO, "stop": ["x" * 400]}, headers=headers),
            httpx2.post(path, json=HELLO, headers=headers),
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert [answer.status_code for answer in answers] == [401, 413, 200]
    assert [line["status"] for line in lines if line["logger"] == "tokentape.access"] == [401, 413, 200]
    assert recorded(data, "s") == fake_vllm.SAMPLED


def test_two_servers_can_sample(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with fake_vllm.running() as first, fake_vllm.running() as other:
        engines = ["--engine", "vllm", "--engine-url", first.url, "--engine-url", other.url]
        with serving(model_dir, *engines, "--data", data) as (_, url):
            assert httpx2.post(f"{url}/sessions/s/v1/chat/completions", json=HELLO).status_code == 200
    assert recorded(data, "s") == fake_vllm.SAMPLED


@pytest.mark.parametrize("workers", [1, 2])
def test_port_in_use_is_reported_with_advice(workers: int, run: Run, model_dir: Path, tmp_path: Path) -> None:
    engine = ("--engine", "vllm", "--engine-url", "http://127.0.0.1:9") if workers > 1 else ()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("serve", model_dir, "--data", tmp_path / "d", "--port", port, "--workers", workers, *engine)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: port {port} of 127.0.0.1 is taken")
    assert "--port" in done.stderr


def remote(url: str, *options: object) -> list[object]:
    return ["--engine", "vllm", "--engine-url", url, *options]


def test_without_a_model_the_served_model_of_the_server_is_used(run: Run, renderer: Renderer, tmp_path: Path) -> None:
    with running(StandIn(renderer, name="qwen", root="Qwen/Qwen3-8B").app) as url:
        done = run("serve", *remote(url), "--data", tmp_path / "data", "--port", 0)
    assert done.exit_code == 2
    assert f"{url} serves Qwen/Qwen3-8B, qwen" in done.stderr


def test_without_a_model_an_unreachable_server_is_named(run: Run, tmp_path: Path) -> None:
    # Port 9 is "discard", which is not served.
    done = run("serve", *remote("http://127.0.0.1:9"), "--data", tmp_path / "data", "--port", 0)
    assert done.exit_code == 2
    assert "the server could not be asked: http://127.0.0.1:9: the engine refuses connections" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("is it running?")


def test_uncached_hub_name_error_contains_the_download_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    done = run("serve", "Qwen/Qwen3-8B", *remote("http://127.0.0.1:9"), "--port", 0)
    assert done.exit_code == 2
    assert "hf download Qwen/Qwen3-8B --include '*.json' '*.jinja'" in done.stderr
    assert "hf download Qwen/Qwen3-8B\n" in run("serve", "Qwen/Qwen3-8B", "--port", 0).stderr


def test_missing_or_empty_folder_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no model folder" in run("serve", tmp_path / "none", "--port", 0).stderr
    monkeypatch.setattr("tokentape.cli.extras.find_spec", lambda name: None)
    assert "there is no model folder" in run("serve", tmp_path / "none", "--port", 0).stderr
    assert "(found: an empty folder)" in run("serve", tmp_path, *remote("http://127.0.0.1:9"), "--port", 0).stderr


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of the tiny model in a Hub cache."""
    repository = tmp_path / "hub" / "models--tokentape--Tiny-1B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("f00", encoding="utf-8")
    for revision in ("0ld", "f00"):
        (repository / "snapshots").mkdir(exist_ok=True)
        (repository / "snapshots" / revision).symlink_to(MODEL)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return "tokentape/Tiny-1B"


@pytest.mark.parametrize(
    ("tells", "options", "verdict"),
    [
        ({}, [], "exact"),
        pytest.param({"tokenizes": False}, [], "exact, model unverified", marks=pytest.mark.slow),
        pytest.param({"name": "policy", "root": None}, [], "exact, model unverified", marks=pytest.mark.slow),
        pytest.param({"name": "policy", "root": None}, ["--engine-model", "policy"], "exact", marks=pytest.mark.slow),
        pytest.param(
            {"root": "tokentape/Tiny-4B"}, ["--unverified-model"], "exact, model unverified", marks=pytest.mark.slow
        ),
    ],
)
def test_verdict_depends_on_whether_the_server_serves_the_model(
    cached: str, renderer: Renderer, tmp_path: Path, tells: dict[str, Any], options: list[object], verdict: str
) -> None:
    server = StandIn(renderer, language_model(renderer), **{"root": cached, "max_model_len": 1024, **tells})
    with (
        running(server.app) as url,
        serving(cached, *remote(url, *options), "--data", tmp_path / "data") as (_, gateway),
    ):
        path = f"{gateway}/sessions/s/v1/chat/completions"
        # Greedy sampling would add that the logprobs are of another distribution.
        assert httpx2.post(path, json=HELLO | {"temperature": 1}).json()["model"] == cached
        metrics = httpx2.get(f"{gateway}/metrics").text
        (leaf,) = httpx2.get(f"{gateway}/sessions/s").json()["leaves"]
    assert leaf["verdict"] == verdict
    assert f"tokentape_engine_model_verified {float(verdict == 'exact')}" in metrics
    assert f'tokentape_verdicts_total{{verdict="{verdict}"}} 1.0' in metrics


def test_a_server_of_another_model_with_the_same_vocabulary_is_refused(
    run: Run, cached: str, renderer: Renderer, tmp_path: Path
) -> None:
    server = StandIn(renderer, language_model(renderer), root="tokentape/Tiny-4B")
    with running(server.app) as url:
        done = run("serve", cached, *remote(url), "--data", tmp_path / "data", "--port", 0)
    assert done.exit_code != 0
    assert "the server says that it serves m, tokentape/Tiny-4B; the folder is" in done.stderr
    assert "pass --unverified-model" in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("before", "kept"), [(None, False), ("directory", True), ("record", True)])
def test_a_failed_start_removes_only_an_empty_record_that_it_created(
    tmp_path: Path, before: str | None, kept: bool
) -> None:
    config = ServeConfig(data=tmp_path / "data")
    if before == "directory":
        config.data.mkdir()
    elif before == "record":
        SqliteStore.open(config.data).close()
    with suppress(EngineError), _removed_if_unused(config):
        SqliteStore.open(config.data).close()
        raise EngineError("another model")
    assert config.data.exists() == kept


def test_failed_gateway_keeps_a_created_record_with_a_session(tmp_path: Path) -> None:
    config = ServeConfig(data=tmp_path / "data")
    with suppress(EngineError), _removed_if_unused(config), SqliteStore.open(config.data) as store:
        asyncio.run(store.write(SessionInfo("s", 0.0)))
        raise EngineError("late")
    with SqliteStore.open(config.data, read_only=True) as store:
        assert [session.info.session_id for session in store.sessions(limit=9)] == ["s"]


@pytest.mark.parametrize("workers", [1, 2])
def test_data_with_turns_of_another_tokenizer_is_refused_and_left_as_it_was(
    workers: int, run: Run, model_dir: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    other = changed_tokenizer(model_dir)
    with SqliteStore.open(data) as store:
        asyncio.run(store.bind(other))
        asyncio.run(store.write(SessionInfo("s", 0.0), SETUP, make_turn("s", 0)))
    write_served_model(data, ServedModel("/models/other", other.sha256, "0"))
    model = (data / "model.json").read_bytes()
    # No engine answers: the record is refused first.
    engine = ("--engine", "vllm", "--engine-url", "http://127.0.0.1:1", "--engine-wait", 0)
    done = run("serve", model_dir, *engine, "--data", data, "--port", 0, "--workers", workers)
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert "error: this record belongs to another tokenizer (" in said
    assert "last served from /models/other" in said
    assert "another --data directory" in said
    assert (data / "model.json").read_bytes() == model


def test_server_with_different_ids_is_always_refused(
    run: Run, cached: str, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = StandIn(renderer, language_model(renderer), root=cached)
    tokens = server._tokens
    monkeypatch.setattr(server, "_tokens", lambda body: tokens(body)[::-1])
    with running(server.app) as url:
        done = run("serve", cached, *remote(url), "--data", tmp_path / "data", "--port", 0)
    assert done.exit_code == 2
    assert "the server has different token ids than the folder: " in done.stderr
    assert "seems to serve" not in done.stderr
    assert done.stderr.count("The server serves a different model than the folder's") == 1
    assert "tokenizer files differ from the folder's (compare their sha256)" in " ".join(done.stderr.split())
    assert re.search(r"\(tokens in all: \d+ here, \d+ at the server\)", done.stderr)
    assert f"It serves m, {cached}; the folder is {cached}. Pass the gateway the folder" in done.stderr
    assert "--unverified-model" not in done.stderr


def test_without_torch_serving_an_engine_server_is_advised(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape.cli.extras.find_spec", lambda name: None)
    done = run("serve")
    assert done.exit_code == 2
    assert "pip install 'tokentape[hf]'" in done.stderr
    assert "tokentape serve MODEL --engine vllm --engine-url URL" in done.stderr


@pytest.mark.usefixtures("quick_models")
@pytest.mark.parametrize("other", [pytest.param(False, marks=pytest.mark.slow), True])
def test_different_template_of_the_server_is_logged_and_not_refused(
    model_dir: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: bool
) -> None:
    server = StandIn(renderer, language_model(renderer), root=str(model_dir.resolve()))
    tokens = server._tokens
    monkeypatch.setattr(server, "_tokens", lambda body: tokens(body) + [7] * (other and "messages" in body))

    async def open_and_close(url: str) -> None:
        config = ServeConfig(model=model_dir, engine=EngineConfig(kind="vllm", urls=(url,)))
        await (await open_configured(config, renderer)).close()

    with running(server.app) as url:
        asyncio.run(open_and_close(url))
        message = f"{url}: the server's chat template gives different ids for a question: "
        assert any(line.startswith(message) and "--chat-template" in line for line in caplog.messages) is other


def test_a_server_of_another_kind_is_recognized(renderer: Renderer, model_dir: Path) -> None:
    async def open_it(url: str) -> None:
        config = ServeConfig(model=model_dir, engine=EngineConfig(kind="sglang", urls=(url,)))
        await open_configured(config, renderer)

    answers = {"/v1/models": {"data": [{"id": "m", "max_model_len": 64}]}, "/version": {"version": "0.32.0"}}
    vllm = Starlette(routes=[Route(path, lambda _, body=body: JSONResponse(body)) for path, body in answers.items()])
    with running(vllm) as url, pytest.raises(EngineError, match=r"different kind of server; try --engine vllm$"):
        asyncio.run(open_it(url))


def test_record_option_was_renamed_to_data(run: Run) -> None:
    output = run("serve", "--record", "x").stderr.splitlines()[0]
    assert output.startswith("error: No such option: --record")
    assert "--data" in output
