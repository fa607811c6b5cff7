"""Available test data, its report in a run, and skips in CI.

Real tokenizers belong to others and are kept outside the repository, if present. A test that needs them is marked
`real`: without them it is deselected, not skipped. Everything else runs in any clone. So the only valid reason of a
skip is something that the machine lacks, named with `needs ...`; with the variable CI set, any other skip is a failure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REAL = Path(os.environ.get("TOKENTAPE_TOKENIZERS", Path(__file__).parents[2] / "shared" / "tokenizers"))
HAVE_REAL = any(REAL.glob("*/tokenizer.json"))

TRIED: set[str] = set()
"""Pairs of template and tokenizer that the running test has loaded: `small qwen3/Qwen3.jinja`."""

ENVIRONMENT = re.compile("(Skipped: )?(needs |could not import )")
"""The beginning of the reason of a skip that the machine causes."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if call.when == "call" and TRIED:
        report.user_properties.append(("pairs", sorted(TRIED)))
        TRIED.clear()
    return judged(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    return judged((yield))


def judged(report: Any) -> Any:
    """Return the report, failed if this is CI and the skip is due to missing data."""
    if report.outcome == "skipped" and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not ENVIRONMENT.match(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}: in CI only what the machine lacks may be skipped, with a reason `needs ...`"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for cases in _sampled(items):
        for case in cases:
            case.add_marker("slow")
    left_out = [] if HAVE_REAL else [item for item in items if item.get_closest_marker("real")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("real")]


def _sampled(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """Yield the cases of each test marked `sampled(count)`, except `count` evenly spread ones."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in tests.values():
        (count,) = cases[0].get_closest_marker("sampled").args  # type: ignore[union-attr]  # it is there
        kept = spread(count, len(cases))
        yield [case for number, case in enumerate(cases) if number not in kept]


def spread(count: int, size: int) -> set[int]:
    """Return `count` numbers below `size`, evenly spread, the first and last among them."""
    return {round(number * (size - 1) / max(count - 1, 1)) for number in range(count)}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed", "xfailed") for report in terminalreporter.stats.get(kind, [])]
    pairs = {pair for report in reports for name, value in report.user_properties if name == "pairs" for pair in value}
    if pairs:
        real = sum(pair.startswith("real ") for pair in pairs)
        where = f"real tokenizers: {REAL}" if HAVE_REAL else "no real tokenizers here (TOKENTAPE_TOKENIZERS)"
        terminalreporter.write_line(
            f"pairs of template and tokenizer tried: {len(pairs) - real} small, {real} real; {where}"
        )
