"""The demo, small: real agents, engine, sockets and record."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tokentape._session.files import read_trajectories
from tokentape.demo import findings
from tokentape.demo.findings import DemoReport, new_directory, print_report, replay
from tokentape.demo.run import run_demo
from tokentape.errors import Conflict
from tokentape.store import SqliteStore
from tokentape.types import Provenance


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoReport]:
    return run_demo(tmp_path_factory.mktemp("demo") / "run", sessions=4, seed=0)


def test_the_record_is_what_the_engine_sampled(report: DemoReport) -> None:
    assert report.turns > 4
    assert (report.turns_unlike_engine, report.findings) == (0, 0)
    assert report.exact


def test_half_is_greedy_and_half_of_each_is_streamed(report: DemoReport) -> None:
    assert [(g.temperature, g.sessions, g.streamed) for g in report.groups] == [(0.0, 2, 1), (1.0, 2, 1)]


def test_the_file_holds_every_session_with_its_reward(report: DemoReport) -> None:
    found = read_trajectories(report.trajectories_file)
    assert len(found) == report.trajectories
    assert {one.session_id for one in found} == {"demo-00", "demo-01", "demo-02", "demo-03"}
    assert sum(one.reward or 0.0 for one in found) == sum(group.solved for group in report.groups)
    assert all((one.provenance[one.loss_mask] == Provenance.SAMPLED).all() for one in found)


def test_the_counts_are_those_of_the_record(report: DemoReport) -> None:
    with SqliteStore.open(report.directory, read_only=True) as store:
        listed = store.sessions()
    assert report.turns == sum(one.turns for one in listed) == sum(g.completions for g in report.groups)
    assert report.tokens == sum(one.tokens for one in listed)
    assert sum(g.tokens for g in report.groups) == sum(one.sampled_tokens for one in listed)


def test_the_report_fits_80_columns_and_names_the_file(report: DemoReport) -> None:
    printed = io.StringIO()
    print_report(report, Console(file=printed, width=80))
    lines = printed.getvalue().splitlines()
    assert f"  {report.trajectories_file}" in lines
    assert max(len(line) for line in lines if str(report.directory) not in line) <= 80
    assert f"  0 of {report.turns} turns differ in prompt, sampled ids or logprobs; verify: 0 findings" in lines


def test_commands_of_the_report_can_be_run_as_the_demo_was(
    report: DemoReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = io.StringIO()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["/somewhere/tokentape/__main__.py", "demo"])
    print_report(report, Console(file=printed, width=80))
    assert f"  python -m tokentape view {report.directory}" in printed.getvalue().splitlines()


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Conflict, match="not empty"):
        run_demo(tmp_path, sessions=1, seed=0)


def test_a_new_directory_is_not_there_yet() -> None:
    assert not new_directory().exists()


def test_the_recorded_run_is_exact_and_drifts(tmp_path: Path) -> None:
    report = replay(tmp_path / "run")
    assert report.exact
    assert [(g.temperature, g.sessions, g.streamed) for g in report.groups] == [(0.0, 8, 4), (1.0, 8, 4)]
    assert sum(group.changed_tokens for group in report.groups) > 0
    assert len(read_trajectories(report.trajectories_file)) == report.trajectories


def test_a_recorded_call_that_the_engine_did_not_log_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "recorded"
    shutil.copytree(findings.RECORDED, changed)
    made = json.loads((changed / "engine.json").read_text())
    (changed / "engine.json").write_text(json.dumps({**made, "calls": made["calls"][1:]}))
    monkeypatch.setattr(findings, "RECORDED", changed)
    report = replay(tmp_path / "run")
    assert (report.turns_unlike_engine, report.exact) == (1, False)
