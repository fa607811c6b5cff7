from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.gateway.scripted import ScriptedEngine
from tests.records import SETUP, make_chain
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.store._snapshots import Selection, Snapshots
from tokentape.types import SessionInfo


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write two old sessions of user 7, as number and as text; one of another user; a future one without user."""
    with SqliteStore.open(tmp_path / "data") as store:
        for name, at, metadata in (
            ("number", 1.0, {"user": 7}),
            ("text", 1.0, {"user": "7", "run": "a"}),
            ("other", 1.0, {"user": "77"}),
            ("young", 4e9, {}),
        ):
            info = SessionInfo(name, at, metadata, "alice" if name == "other" else "")
            asyncio.run(store.write(info, SETUP, *make_chain(name, 2, created_at=at)))
    return tmp_path / "data"


def names(directory: Path) -> list[str]:
    with SqliteStore.open(directory, read_only=True) as store:
        return list(store.session_ids())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("conditions", "selected"),
    [
        (["--where", "user=7"], ["number", "text"]),
        (["--where", "user=7", "--where", "run=a"], ["text"]),
        (["--where", "user=7", "--where", "user=77"], []),
        (["--where", "user="], []),
        (["--where", "nothing=null"], []),
        (["--older-than", "30d"], ["number", "text", "other"]),
        (["--older-than", "0s", "--where", "user=77"], ["other"]),
        (["--owner", "alice"], ["other"]),
        (["--owner", "alice", "--where", "user=7"], []),
        (["--owner", ""], ["number", "text", "young"]),
    ],
)
def test_sessions_are_deleted_if_all_conditions_apply(
    run: Run, data: Path, conditions: list[str], selected: list[str]
) -> None:
    before = names(data)
    listed = run("delete", data, *conditions)
    assert (listed.exit_code, listed.stdout.split()) == (0, selected)
    assert ("pass --yes" in listed.stderr) == bool(selected)
    assert names(data) == before
    done = run("delete", data, *conditions, "--yes", "--json")
    assert (done.exit_code, json.loads(done.stdout)["deleted"]) == (0, selected)
    assert names(data) == [name for name in before if name not in selected]
    assert run("verify", data).exit_code == 0


def test_deleted_session_leaves_no_trace_in_the_files(run: Run, data: Path) -> None:
    with SqliteStore.open(data) as store:
        for name in ("kept", "gone"):
            # Longer than a page of the database.
            asyncio.run(store.write(SessionInfo(name, 1.0, {"run": name, "note": f"what {name} wrote; " * 200})))

    def files() -> bytes:
        return b"".join(path.read_bytes() for path in data.iterdir())

    assert (files().count(b"what kept wrote"), files().count(b"what gone wrote")) >= (190, 190)
    assert run("delete", data, "--where", "run=gone", "--yes").exit_code == 0
    assert files().count(b"what kept wrote") >= 190
    assert files().count(b"what gone wrote") == 0


def test_session_held_by_a_snapshot_is_kept(run: Run, data: Path) -> None:
    with SqliteStore.open(data) as store:
        asyncio.run(Snapshots(store).take(Selection(session_ids=("text",)), "me", None))
    done = run("delete", data, "--where", "user=7", "--yes")
    assert done.exit_code == 1
    assert done.stdout.startswith("number\nkept text: session 'text' is part of snapshot 1")
    assert names(data) == ["text", "other", "young"]


def test_a_gateway_that_has_the_record_open_deletes(run: Run, data: Path, renderer: Renderer) -> None:
    turns = Turns(ScriptedEngine(renderer, ["hi<|im_end|>"]), renderer, SqliteStore.open(data))
    with running(create_app(turns, model_id="m")) as url:
        refused = run("delete", data, "--where", "user=7", "--yes")
        assert refused.exit_code == 2
        assert "is open for writing by process" in refused.stderr
        assert "change its record through it: pass its URL as --url" in " ".join(refused.stderr.split())
        assert run("delete", data, "--where", "user=7", "--yes", "--url", url).exit_code == 0
        assert names(data) == ["other", "young"]


@pytest.mark.parametrize("conditions", [[], ["--where", "user"], ["--older-than", "old"]])
def test_incomplete_conditions_delete_nothing(run: Run, data: Path, conditions: list[str]) -> None:
    assert run("delete", data, *conditions, "--yes").exit_code == 2
    assert len(names(data)) == 4
