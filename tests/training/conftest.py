"""The table of trainers at the end of a run."""

from __future__ import annotations

import pytest

HEADER = ["trainer", "exact, cut", "forked", "versions", "resumed", "planted errors found", "seconds"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    rows = [value for report in reports for name, value in report.user_properties if name == "trainer"]
    if rows:
        table = [HEADER, *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            terminalreporter.write_line(line.rstrip())
