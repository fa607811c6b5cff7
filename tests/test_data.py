"""A skip not caused by the machine is a failure in CI, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data import judged, spread


def report(outcome: Any, reason: str, **more: Any) -> pytest.TestReport:
    longrepr = ("tests/test_x.py", 7, f"Skipped: {reason}")
    made = pytest.TestReport("tests/test_x.py::test_x", ("tests/test_x.py", 6, "test_x"), {}, outcome, longrepr, "call")
    made.__dict__.update(more)
    return made


@pytest.mark.parametrize(
    "reason", ["x.json is not here", "set TOKENTAPE_TOKENIZERS to a folder", "got empty parameter set for (x)"]
)
def test_a_skip_for_missing_data_fails_in_ci(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    found = judged(report("skipped", reason))
    assert found.outcome == "failed"
    assert reason in found.longrepr


@pytest.mark.parametrize("reason", ["needs Chromium", "could not import 'torch': No module named 'torch'"])
def test_skip_for_missing_hardware_stays_a_skip(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert judged(report("skipped", reason)).outcome == "skipped"


def test_expected_failure_is_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert judged(report("skipped", "", wasxfail="a known fault")).outcome == "skipped"


def test_skip_outside_ci_stays_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert judged(report("skipped", "x.json is not here")).outcome == "skipped"


@pytest.mark.parametrize(("count", "kept"), [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (12, list(range(10)))])
def test_fixed_number_of_evenly_spread_cases_runs(count: int, kept: list[int]) -> None:
    assert sorted(spread(count, 10)) == kept
