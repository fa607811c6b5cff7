"""Compare the output that a page shows with what its command prints on other data."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d.,]*(?:e[-+]?\d+)?%?")


def assert_same_lines(shown: str, printed: str) -> None:
    """Assert that every line shown is printed, except for numbers. Lines with `...` are skipped."""
    lines = {_without_numbers(line) for line in printed.splitlines()}
    for line in shown.splitlines():
        assert "..." in line or _without_numbers(line) in lines, line


def _without_numbers(line: str) -> str:
    return _NUMBER.sub("N", line).strip()
