from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def damaged(data_dir: Path) -> Path:
    with closing(sqlite3.connect(data_dir / "tokentape.db")) as database, database:
        database.execute("UPDATE turns SET weight_version = 'x' WHERE session_id = 'plain' AND seq = 1")
    return data_dir


def test_a_clean_record_is_exit_code_0(run: Run, data_dir: Path) -> None:
    done = run("verify", data_dir)
    assert (done.exit_code, done.stdout) == (0, "sessions 2, turns 5, tokens 40: findings 0\n")


def test_a_damaged_turn_is_named_and_exit_code_1(run: Run, damaged: Path) -> None:
    done = run("verify", damaged)
    assert done.exit_code == 1
    finding, summary = done.stdout.splitlines()
    assert finding.startswith("session plain turn 1: ")
    assert summary.endswith("findings 1")


def test_json_has_the_findings(run: Run, damaged: Path) -> None:
    done = run("verify", damaged, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (report["ok"], report["sessions"], report["turns"]) == (False, 2, 5)
    assert [(one["session_id"], one["turn"]) for one in report["findings"]] == [("plain", 1)]
