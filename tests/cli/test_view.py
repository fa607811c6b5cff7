"""`tokentape view`: output, pages and access."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from starlette.types import ASGIApp

from tests.cli.conftest import Record, Run
from tests.processes import Command
from tests.records import make_chain
from tokentape._session.flatten import trajectories
from tokentape._session.jsonl import write_jsonl
from tokentape._session.tree import Session
from tokentape.types import Provenance, SessionInfo

HELLO = [(Provenance.USER, "hello"), (Provenance.SAMPLED, "hi<|im_end|>")]


@contextmanager
def viewing(*arguments: object) -> Iterator[tuple[Command, str]]:
    """Run `tokentape view` in a separate process, and yield its printed line."""
    with Command(["view", *arguments, "--no-browser"]) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_data_directory_is_shown_locally_until_an_interrupt(record: Record) -> None:
    with viewing(record(HELLO)) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/view")
        assert "<!doctype html>" in httpx2.get(url).text
        listed = httpx2.get(f"{url}/api/sessions").json()
        assert [session["session_id"] for session in listed["sessions"]] == ["s"]
        about = httpx2.get(f"{url}/api/about").json()
        assert (about["text"], about["against"], about["overview"]) == (True, ["retokenized", "rerendered"], False)
        refused = httpx2.get(f"{url}/api/sessions", headers={"host": "evil.example"})
        assert (refused.status_code, "pass --host" in refused.text) == (403, True)
        assert httpx2.get(url.removesuffix("/view"), follow_redirects=False).headers["location"] == "/view"
        missing = httpx2.get(f"{url}/api/sessions/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert httpx2.post(f"{url}/api/sessions").status_code == 405
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_port_in_use_is_reported_with_advice(record: Record, run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("view", record(HELLO), "--no-browser", "--port", port)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: port {port} of 127.0.0.1 is taken")


def test_file_is_shown_with_the_named_tokenizer(tmp_path: Path, model_dir: Path) -> None:
    path = tmp_path / "some.jsonl"
    write_jsonl(trajectories(Session(SessionInfo("s", 1.0), make_chain("s", 2))), path)
    with viewing(path, "--tokenizer", model_dir) as (_, url):
        assert httpx2.get(f"{url}/api/about").json()["text"] is True
    with viewing(path) as (process, url):
        assert httpx2.get(f"{url}/api/about").json()["text"] is False
        process.kill()
        assert "showing ids only; pass a model folder with --tokenizer" in process.stderr.read()


def test_on_a_public_address_the_page_needs_the_printed_key(record: Record) -> None:
    with viewing(record(HELLO), "--host", "127.0.0.2") as (process, url):
        assert url.startswith("http://127.0.0.2:")
        key = process.stderr.readline().removeprefix("key: ").strip()
        assert len(key) == 32
        assert httpx2.get(f"{url}/api/sessions").status_code == 401
        answer = httpx2.get(f"{url}/api/sessions", headers={"authorization": f"Bearer {key}", "host": "gpu-3"})
        assert [session["session_id"] for session in answer.json()["sessions"]] == ["s"]


def test_record_is_written_to_a_single_file(run: Run, record: Record, tmp_path: Path) -> None:
    directory, path = record(HELLO), tmp_path / "run.html"
    done = run("view", directory, "--export", path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.endswith("sessions with tokens: 1, listed without: 0, left out: 0\n")
    assert path.read_bytes().startswith(b"<!doctype html>")
    assert run("view", directory, "--export", path, "--session", "nothing").exit_code == 2
    done = run("view", directory, "--session", "s")
    assert (done.exit_code, "--session goes with --export" in done.stderr) == (2, True)


def test_missing_view_path_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    done = run("view", tmp_path / "nothing")
    assert done.exit_code == 2
    assert "does not exist" in done.stderr


def test_path_that_is_not_a_record_fails_in_a_single_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    done = run("view", tmp_path / "a.parquet", "--no-browser")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def test_wildcard_address_opens_at_a_reachable_address(
    run: Run, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(app: ASGIApp, *, on_ready: Callable[[str], None], **more: object) -> None:
        on_ready("http://0.0.0.0:8810")

    monkeypatch.setattr("tokentape.cli.view.serve", serve)
    done = run("view", record(HELLO), "--host", "0.0.0.0", "--no-browser")
    assert (done.exit_code, done.stdout) == (0, "http://127.0.0.1:8810/view\n")
    assert f"from other machines: http://{socket.gethostname()}:8810/view" in done.stderr
