from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokentape.store import SqliteStore


@pytest.fixture
def damaged(data_dir: Path) -> Path:
    with closing(sqlite3.connect(data_dir / "tokentape.db")) as database, database:
        database.execute("UPDATE turns SET weight_version = 'x' WHERE session_id = 'plain' AND seq = 1")
    return data_dir


def test_a_clean_record_is_exit_code_0(run: Run, data_dir: Path) -> None:
    done = run("verify", data_dir)
    assert (done.exit_code, done.stdout) == (0, "sessions 2, turns 5, tokens 40: findings 0\n")


@pytest.mark.parametrize("command", ["verify", "export"])
def test_reading_a_record_imports_no_tokenizer_and_no_trainer_format(command: str) -> None:
    code = f"""
import sys, tokentape.cli.{command}
print(sorted({{"tokenizers", "jinja2", "tokentape.training", "tokentape.audit"}} & {{*sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_record_without_sessions_is_exit_code_3(run: Run, tmp_path: Path) -> None:
    SqliteStore.open(tmp_path / "empty").close()
    done = run("verify", tmp_path / "empty")
    assert (done.exit_code, done.stderr) == (3, "nothing was measured: no sessions were recorded here\n")


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
    assert [(finding["session_id"], finding["turn"]) for finding in report["findings"]] == [("plain", 1)]


def test_a_head_is_written_and_compared_with(run: Run, data_dir: Path, tmp_path: Path) -> None:
    head = tmp_path / "head.json"
    written = run("verify", data_dir, "--head-out", head)
    digest = json.loads(head.read_text())["digest"]
    assert (written.exit_code, written.stdout.splitlines()[-1]) == (0, f"head {digest}")
    compared = run("verify", data_dir, "--against", head, "--json")
    report = json.loads(compared.stdout)
    assert (report["ok"], report["added"]) == (True, {"sessions": 0})
    assert f"compared with head {digest}" in run("verify", data_dir, "--against", head).stdout
    with closing(sqlite3.connect(data_dir / "tokentape.db")) as database, database:
        database.execute("DELETE FROM rewards")
    done = run("verify", data_dir, "--against", head)
    assert done.exit_code == 1
    assert "session forked: reward of the session was deleted or can't be read since the head" in done.stdout


def test_a_damaged_record_gets_no_head(run: Run, damaged: Path, tmp_path: Path) -> None:
    done = run("verify", damaged, "--head-out", tmp_path / "head.json")
    assert done.exit_code == 1
    assert "was not written: the record has findings" in done.stdout
    assert list(tmp_path.glob("head*")) == []


@pytest.mark.parametrize(("option", "needs"), [("--sign", "--head-out"), ("--public-key", "--against")])
def test_keys_need_a_head(run: Run, data_dir: Path, option: str, needs: str) -> None:
    done = run("verify", data_dir, option, data_dir / "tokentape.db")
    assert done.exit_code == 2
    assert needs in done.output


def test_invalid_key_or_head_file_is_refused(run: Run, data_dir: Path, tmp_path: Path) -> None:
    file = data_dir / "tokentape.db"
    assert "is not a head" in run("verify", data_dir, "--against", file).output
    head = tmp_path / "head.json"
    assert "not a PEM file" in run("verify", data_dir, "--head-out", head, "--sign", file).output
    assert not head.exists()
