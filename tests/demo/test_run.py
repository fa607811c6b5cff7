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


def test_record_equals_the_sampled_tokens(report: DemoReport) -> None:
    assert report.turns > 4
    assert (report.turns_differing_from_engine, report.findings) == (0, 0)
    assert report.exact


def test_half_is_greedy_and_half_of_each_is_streamed(report: DemoReport) -> None:
    assert [(g.temperature, g.sessions, g.streamed) for g in report.groups] == [(0.0, 2, 1), (1.0, 2, 1)]


def test_the_file_holds_every_session_with_its_reward(report: DemoReport) -> None:
    trajectories = read_trajectories(report.trajectories_file)
    assert len(trajectories) == report.trajectories
    assert {trajectory.session_id for trajectory in trajectories} == {"demo-00", "demo-01", "demo-02", "demo-03"}
    assert sum(trajectory.reward or 0.0 for trajectory in trajectories) == sum(group.solved for group in report.groups)
    assert all((trajectory.provenance[trajectory.loss_mask] == Provenance.SAMPLED).all() for trajectory in trajectories)


def test_counts_match_the_record(report: DemoReport) -> None:
    with SqliteStore.open(report.directory, read_only=True) as store:
        listed = store.sessions()
    assert report.turns == sum(session.turns for session in listed) == sum(g.completions for g in report.groups)
    assert report.tokens == sum(session.tokens for session in listed)
    assert sum(g.tokens for g in report.groups) == sum(session.sampled_tokens for session in listed)


def test_the_report_fits_80_columns_and_names_the_file(report: DemoReport) -> None:
    printed = io.StringIO()
    print_report(report, Console(file=printed, width=80))
    lines = printed.getvalue().splitlines()
    assert f"  {report.trajectories_file}" in lines
    assert max(len(line) for line in lines if str(report.directory) not in line) <= 80
    assert f"  0 of {report.turns} turns differ in prompt, sampled ids or logprobs; verify: 0 findings" in lines


def test_commands_of_the_report_run_like_the_demo(
    report: DemoReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = io.StringIO()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["/somewhere/tokentape/__main__.py", "demo"])
    print_report(report, Console(file=printed, width=80))
    assert f"  python -m tokentape view {report.directory}" in printed.getvalue().splitlines()


def test_directory_with_contents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Conflict, match="not empty"):
        run_demo(tmp_path, sessions=1, seed=0)


def test_new_directory_does_not_exist_yet() -> None:
    assert not new_directory().exists()


def test_the_recorded_run_is_exact_and_drifts(tmp_path: Path) -> None:
    report = replay(tmp_path / "run")
    assert report.exact
    assert [(g.temperature, g.sessions, g.streamed) for g in report.groups] == [(0.0, 8, 4), (1.0, 8, 4)]
    assert sum(group.changed_tokens for group in report.groups) > 0
    assert len(read_trajectories(report.trajectories_file)) == report.trajectories


def test_recorded_call_missing_from_the_engine_log_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "recorded"
    shutil.copytree(findings.RECORDED, changed)
    made = json.loads((changed / "engine.json").read_text())
    (changed / "engine.json").write_text(json.dumps({**made, "calls": made["calls"][1:]}))
    monkeypatch.setattr(findings, "RECORDED", changed)
    report = replay(tmp_path / "run")
    assert (report.turns_differing_from_engine, report.exact) == (1, False)
