"""An interrupted run resumes, and a mutant that crashes or hangs its process is one line of the run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.audit.mutator import __main__ as runner
from tests.audit.mutator.files import TINY
from tests.audit.mutator.judge import Base


def _line(base: Base, seed: int) -> dict[str, Any]:
    return {"model": base.model.name, "seed": seed, "complaints": [], "pid": os.getpid()}


def test_seeds_that_have_a_line_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "case", _line)
    monkeypatch.setattr(Base, "warm", lambda self: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    out = tmp_path / "mutants.jsonl"
    runner.run([TINY], range(2), out, seconds=60)
    first = out.read_text(encoding="utf-8")
    lines = runner.run([TINY], range(3), out, seconds=60)
    assert [line["seed"] for line in lines] == [0, 1, 2]
    assert out.read_text(encoding="utf-8").startswith(first)
    assert [json.loads(text)["seed"] for text in out.read_text(encoding="utf-8").splitlines()] == [0, 1, 2]


def test_each_case_has_a_process_of_its_own(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "case", _line)
    pids = {runner.isolated(base, seed, 60)["pid"] for seed in range(2)}
    assert len(pids | {os.getpid()}) == 3


def test_a_case_that_ends_its_process_is_a_complaint(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "case", lambda base, seed: os.kill(os.getpid(), signal.SIGKILL))
    assert runner.isolated(base, 5, 60)["complaints"] == ["case ends with status 9"]


def test_a_case_that_does_not_end_is_a_complaint(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "case", lambda base, seed: signal.pause())
    monkeypatch.setattr(runner, "WALL", 1)
    assert runner.isolated(base, 5, 0.1)["complaints"] == ["case takes too long"]


@pytest.mark.slow
def test_a_case_that_loops_is_a_complaint(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(base: Base, seed: int) -> None:
        while True:
            pass

    monkeypatch.setattr(runner, "case", loop)
    assert runner.isolated(base, 5, 1)["complaints"] == ["case takes too long"]


@pytest.mark.slow
def test_two_folders_with_the_same_files_exit_with_0(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "last", base.folder)
    assert runner._by_command(base, False) == []


@pytest.mark.parametrize(("skewed", "wrong"), [(False, (1, 2, -9)), (True, (0, 2, -9)), (None, (0,))])
def test_exit_code_that_contradicts_the_report_is_a_complaint(
    base: Base, monkeypatch: pytest.MonkeyPatch, skewed: bool | None, wrong: tuple[int, ...]
) -> None:
    for code in (0, 1, 2, -9):
        monkeypatch.setattr(runner.subprocess, "run", lambda *_, code=code, **__: CompletedProcess([], code))
        expected = [f"exit code: {code} where skewed is {skewed}"] if code in wrong else []
        assert runner._by_command(base, skewed) == expected


def test_the_summary_counts_what_the_audit_missed() -> None:
    mutant = {"changes": [], "effects": ["ids: x"], "skewed": False, "checked": True, "cpu": 1.0}
    lines = [
        {**mutant, "complaints": ["called clean: merges: ids"]},
        {**mutant, "skewed": True, "checked": False, "complaints": []},
        {**mutant, "effects": [], "complaints": []},
        {"harmless": "copied", "complaints": [], "cpu": 0.5},
    ]
    found = runner.summary(lines)
    assert (found["mutants"], found["harmless"], found["differing"], found["called clean"]) == (3, 1, 2, 1)
    assert found["complaints"] == {"called clean: merges: ids": 1}
