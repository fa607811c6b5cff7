"""`tokentape snapshot` against a real gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.records import SETUP, make_chain, make_turn
from tokentape._session.jsonl import read_jsonl
from tokentape.store import SqliteStore
from tokentape.types import SessionInfo


@pytest.fixture
def at(gateway_url: str, store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> SqliteStore:
    """Yield the store of a gateway in the environment of the commands, with sessions `a` and `b`."""
    monkeypatch.setenv("TOKENTAPE_URL", gateway_url)
    records = SessionInfo("a", 1.0), SETUP, *make_chain("a", 2), SessionInfo("b", 2.0), make_turn("b", 0)
    asyncio.run(store.write(*records))
    return store


def test_snapshot_can_be_taken_confirmed_and_dropped(run: Run, at: SqliteStore, tmp_path: Path) -> None:
    taken = run("snapshot", "create", "--session", "a", "--session", "b")
    assert (taken.exit_code, taken.stdout) == (0, "1\n")
    exported = run("snapshot", "export", 1, "-o", tmp_path / "t.jsonl")
    digest = exported.stdout.strip()
    assert [trajectory.session_id for trajectory in read_jsonl(tmp_path / "t.jsonl")] == ["a", "b"]
    assert f"held  trajectories 2, tokens 24, with loss 12  {digest}" in run("snapshot", "show", 1).stdout
    early = run("snapshot", "drop", 1)
    assert (early.exit_code, "not confirmed" in early.stderr) == (2, True)
    assert run("snapshot", "confirm", 1, digest).exit_code == 0
    asyncio.run(at.write(make_turn("b", 1, make_turn("b", 0))))
    dropped = run("snapshot", "drop", 1)
    assert (dropped.exit_code, dropped.stdout) == (1, "kept b: changed since the snapshot\n")
    assert [session.info.session_id for session in at.sessions()] == ["b"]
    assert run("snapshot", "create", "--since", 1, "--json").exit_code == 0
    states = [json.loads(line)["state"] for line in run("snapshot", "show", "--json").stdout.splitlines()]
    assert states == ["released", "held"]


def test_a_wrong_digest_is_refused(run: Run, at: SqliteStore) -> None:
    run("snapshot", "create")
    done = run("snapshot", "confirm", 1, "0" * 64)
    assert (done.exit_code, "corrupt or of a different snapshot" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", ["snapshot", "archive", "score"])
def test_unreachable_gateway_is_a_single_error_line(
    run: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("tokentape.client._blocking.time", None)
    url = "http://127.0.0.1:9"
    rest = {
        "snapshot": ("show", "--url", url),
        "archive": (data_dir, "--to", tmp_path / "archive", "--older-than", "0s", "--url", url),
        "score": (url, "--engine", "vllm", "--engine-url", url, "--model", tmp_path),
    }
    done = run(command, *rest[command])
    assert (done.exit_code, done.stderr.splitlines()[-1].endswith("is it running?")) == (2, True), done.output
