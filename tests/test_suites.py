"""The Makefile's suites and the markers: every test that `make test` leaves out is in another suite."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OPTIONS = tomllib.loads((TESTS.parent / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
MARKERS = {marker.partition(":")[0] for marker in OPTIONS["markers"]} - {"real", "sampled(count)"}
COMMANDS = [
    line
    for line in (TESTS.parent / "Makefile").read_text("utf-8").replace("\\\n", "").splitlines()
    if "/pytest" in line
]


def test_make_test_leaves_out_every_marker() -> None:
    (everything,) = (line for line in COMMANDS if "--hypothesis-profile=same" in line)
    assert set(re.findall(r"not (\w+)", everything)) == MARKERS


@pytest.mark.parametrize("marker", sorted(MARKERS - {"slow"}))
def test_suite_covers_every_file_with_its_marker(marker: str) -> None:
    commands = [line for line in COMMANDS if re.search(rf"-m {marker}\b", line)]
    pointed_at = [TESTS.parent / path for line in commands for path in re.findall(r"\btests/\S+", line)]
    marked = [
        path for path in TESTS.rglob("*.py") if f"mark.{marker}" in path.read_text("utf-8") and path != Path(__file__)
    ]
    assert marked
    for path in marked:
        assert any(path.is_relative_to(folder) for folder in pointed_at), path
