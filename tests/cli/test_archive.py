from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.client import Client
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.store._snapshots import Selection, Snapshots


def test_old_sessions_are_archived_deleted_and_read_from_the_archive(run: Run, data_dir: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    done = run("archive", data_dir, "--to", archive, "--older-than", "30d", "--delete")
    assert (done.exit_code, done.stdout) == (0, f"{archive}: archived 2 sessions, deleted 2\n")
    assert run("show", data_dir).stdout == ""
    assert [line.split()[0] for line in run("show", archive).stdout.splitlines()] == ["forked", "plain"]
    assert run("verify", f"file://{archive}").stdout == "sessions 2, turns 5, tokens 40: findings 0\n"
    exported = run("export", archive, "-o", tmp_path / "t.jsonl", "--json")
    assert json.loads(exported.stdout)["trajectories"] == 3
    again = run("archive", data_dir, "--to", archive, "--json")
    assert json.loads(again.stdout) == {"run": None, "sessions": 0, "deleted": [], "kept": []}


def test_a_gateway_that_has_the_record_open_takes_part(
    run: Run, data_dir: Path, tmp_path: Path, renderer: Renderer
) -> None:
    archive = tmp_path / "archive"
    turns = Turns(ScriptedEngine(renderer, ["hi<|im_end|>"]), renderer, SqliteStore.open(data_dir))
    with running(create_app(turns, model_id="m")) as url:
        refused = run("archive", data_dir, "--to", archive)
        assert refused.exit_code == 2
        assert "is open for writing by process" in refused.stderr
        assert "change its record through it: pass its URL as --url" in " ".join(refused.stderr.split())
        done = run("archive", data_dir, "--to", archive, "--delete", "--url", url)
        assert (done.exit_code, done.stdout) == (0, f"{archive}: archived 2 sessions, deleted 2\n")
    assert run("show", data_dir).stdout == ""


def test_sessions_that_delete_keeps_make_the_exit_code_1(run: Run, data_dir: Path, tmp_path: Path) -> None:
    with SqliteStore.open(data_dir) as store:
        asyncio.run(Snapshots(store).take(Selection(), "someone", None))
    done = run("archive", data_dir, "--to", tmp_path / "archive", "--delete")
    assert (done.exit_code, done.stderr.count("held by snapshot")) == (1, 2)


def test_snapshot_left_at_a_gateway_by_an_interrupted_archive_is_released(
    run: Run, data_dir: Path, tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, archive = Client.take_snapshot, tmp_path / "archive"

    def die(self: Client, **selection: Any) -> object:
        take(self, **selection)
        raise SystemExit(9)

    turns = Turns(ScriptedEngine(renderer, ["hi<|im_end|>"]), renderer, SqliteStore.open(data_dir))
    with running(create_app(turns, model_id="m")) as url:
        with monkeypatch.context() as patched:
            patched.setattr(Client, "take_snapshot", die)
            assert run("archive", data_dir, "--to", archive, "--delete", "--url", url).exit_code == 9
        done = run("archive", data_dir, "--to", archive, "--delete", "--url", url)
    assert (done.exit_code, done.stdout) == (0, f"{archive}: archived 2 sessions, deleted 2\n")


def test_memory_of_the_command_is_no_target(run: Run, data_dir: Path) -> None:
    refused = run("archive", data_dir, "--to", "memory://runs", "--older-than", "0s", "--delete")
    assert refused.exit_code == 2
    assert "memory of this command" in refused.stderr
    assert run("show", data_dir).stdout


@pytest.mark.parametrize("age", ["30", "a day", "-1d", ""])
def test_age_needs_a_unit(run: Run, data_dir: Path, tmp_path: Path, age: str) -> None:
    refused = run("archive", data_dir, "--to", tmp_path / "archive", "--older-than", age)
    assert refused.exit_code == 2
    assert "30d" in refused.stderr


def test_missing_record_is_a_wrong_argument(run: Run, tmp_path: Path) -> None:
    for command in (["show"], ["verify"], ["archive", "--to", tmp_path / "archive"]):
        refused = run(command[0], tmp_path / "nothing", *command[1:])
        assert refused.exit_code == 2
        assert "does not exist" in refused.stderr


@pytest.mark.parametrize("database", [None, b""], ids=["no database", "empty file"])
@pytest.mark.parametrize("command", ["archive --to {archive}", "delete --older-than 0s --yes", "score"])
def test_a_folder_without_a_record_is_refused_and_left_alone(
    run: Run, tmp_path: Path, command: str, database: bytes | None
) -> None:
    folder = tmp_path / "typo"
    folder.mkdir()
    if database is not None:
        (folder / "tokentape.db").write_bytes(database)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    name, *options = command.format(archive=tmp_path / "archive").split()
    done = run(name, folder, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert ("is not a data directory; name the folder" if database is None else "expected a Tokentape") in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not (tmp_path / "archive").exists()
