from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.records import bits
from tokentape.session.arrow import ExtraNames, read_parquet
from tokentape.session.flatten import trajectories
from tokentape.session.jsonl import read_jsonl
from tokentape.session.tree import Session
from tokentape.session.verdict import BRIDGE_CHECKED, BRIDGE_DUE
from tokentape.store import SqliteStore
from tokentape.types import Event, Trajectory, TurnColumn, TurnPayload


@pytest.fixture
def recorded(data_dir: Path) -> list[Trajectory]:
    with SqliteStore.open(data_dir, read_only=True) as store:
        return [
            one
            for stored in store.iter_sessions()
            for one in trajectories(Session(stored.info, stored.turns), stored.rewards)
        ]


def test_parquet_holds_every_branch(run: Run, data_dir: Path, recorded: list[Trajectory], tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.parquet")
    assert (done.exit_code, done.stdout) == (0, "")
    assert len(recorded) == 3
    assert bits(read_parquet(tmp_path / "t.parquet")) == bits(recorded)


def test_a_file_named_jsonl_is_jsonl(run: Run, data_dir: Path, recorded: list[Trajectory], tmp_path: Path) -> None:
    assert run("export", data_dir, "-o", tmp_path / "t.jsonl").exit_code == 0
    assert bits(list(read_jsonl(tmp_path / "t.jsonl"))) == bits(recorded)


def test_the_format_can_be_named(run: Run, data_dir: Path, tmp_path: Path) -> None:
    assert run("export", data_dir, "-o", tmp_path / "t.txt", "--format", "jsonl").exit_code == 0
    assert len(list(read_jsonl(tmp_path / "t.txt"))) == 3


def test_columns_and_payloads_are_written(run: Run, data_dir: Path, tmp_path: Path) -> None:
    with SqliteStore.open(data_dir) as store:
        values, rows = np.arange(4, dtype=np.float32), np.ones((8, 2), np.uint8)
        said = TurnColumn("forked", 0, "advantages", values, 1.0), TurnPayload("forked", 0, "experts", 0, rows)
        asyncio.run(store.write(*said))
        expected = [one for stored in store.iter_sessions(per_token=True) for one in stored.trajectories()]
    for name, read in (("t.parquet", read_parquet), ("t.jsonl", read_jsonl)):
        assert run("export", data_dir, "-o", tmp_path / name).exit_code == 0
        assert bits(list(read(tmp_path / name))) == bits(expected)
    assert [list(one.columns) for one in expected] == [["advantages"], ["advantages"], []]


def test_a_column_named_while_it_runs_is_left_out(
    run: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SqliteStore.open(data_dir) as store:
        asyncio.run(store.write(TurnColumn("plain", 0, "late", np.zeros(4, np.float32), 1.0)))
    monkeypatch.setattr(SqliteStore, "extra_names", lambda self, session_ids: ExtraNames())
    assert run("export", data_dir, "-o", tmp_path / "t.parquet").exit_code == 0
    assert [dict(one.columns) for one in read_parquet(tmp_path / "t.parquet")] == [{}, {}, {}]


def test_only_the_verdicts_asked_for(run: Run, data_dir: Path, tmp_path: Path) -> None:
    def leaves(verdict: str) -> list[tuple[str, int]]:
        assert run("export", data_dir, "-o", tmp_path / "t.jsonl", "--verdict", verdict).exit_code == 0
        return [(one.session_id, one.leaf) for one in read_jsonl(tmp_path / "t.jsonl")]

    assert leaves("exact") == [("forked", 1), ("plain", 1)]
    assert leaves("forked:branched") == [("forked", 2)]
    assert leaves("closed") == []
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--verdict", "good")
    assert (done.exit_code, done.stderr.startswith("error: a verdict is exact, forked, closed")) == (1, True)


def test_only_the_sessions_asked_for(run: Run, data_dir: Path, tmp_path: Path) -> None:
    assert run("export", data_dir, "-o", tmp_path / "t.parquet", "--session", "plain").exit_code == 0
    assert [one.session_id for one in read_parquet(tmp_path / "t.parquet")] == ["plain"]


def test_an_unknown_session_leaves_what_was_there(run: Run, data_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "t.parquet"
    target.parent.mkdir()
    target.write_text("yesterday's")
    done = run("export", data_dir, "-o", target, "--session", "plain", "--session", "nobody")
    assert (done.exit_code, done.stderr) == (1, "error: there is no session 'nobody'\n")
    assert [path.name for path in target.parent.iterdir()] == ["t.parquet"]
    assert target.read_text() == "yesterday's"


def test_json_counts_what_was_written(run: Run, data_dir: Path, tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.parquet", "--json")
    assert json.loads(done.stdout) == {
        "file": str(tmp_path / "t.parquet"),
        "format": "parquet",
        "sessions": 2,
        "trajectories": 3,
        "tokens": 48,
        "trained_tokens": 20,
    }


@pytest.mark.parametrize("checked", [True, False])
def test_checks_that_nobody_does_are_waited_for_and_told(
    run: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    monkeypatch.setattr("tokentape.cli.export._PATIENCE", 0.0)
    events = [Event("plain", 1, BRIDGE_DUE, {}, 1.0), Event("plain", 1, BRIDGE_CHECKED, {"outcome": "same"}, 2.0)]
    with SqliteStore.open(data_dir) as store:
        asyncio.run(store.write(*events[: 1 + checked]))
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--wait-checks")
    assert (done.exit_code, "1 bridges are still unchecked" in done.stderr) == (0, not checked)
    verdicts = {one.session_id: one.verdict for one in read_jsonl(tmp_path / "t.jsonl")}
    assert verdicts["plain"] == ("exact" if checked else "exact, bridge unchecked")


def test_it_works_beside_a_writer(run: Run, data_dir: Path, tmp_path: Path) -> None:
    with SqliteStore.open(data_dir):
        assert run("export", data_dir, "-o", tmp_path / "t.parquet").exit_code == 0
