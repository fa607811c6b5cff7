"""The experiments' pages match their data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "token_paths"))

import report

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
BLOCKS = report.blocks(FOLDER / "data")


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_the_tables_are_those_of_the_data(name: str) -> None:
    (page,) = (text for path in FOLDER.glob("*.md") if report.BEGIN.format(name) in (text := path.read_text("utf-8")))
    _, _, rest = page.partition(report.BEGIN.format(name))
    assert rest.partition(report.END)[0] == BLOCKS[name]


def test_the_table_of_models_is_that_of_its_rows() -> None:
    from benchmarks import served_drift

    lines = (FOLDER / "data" / "models-drift.jsonl").read_text("utf-8").splitlines()
    _, _, rest = (FOLDER / "models-drift.md").read_text("utf-8").partition(served_drift.BEGIN)
    assert rest.partition(served_drift.END)[0] == served_drift.table([json.loads(line) for line in lines])


def test_plot_shows_these_arms_and_follows_the_color_scheme() -> None:
    drawn = (FOLDER / "token-paths.svg").read_text("utf-8")
    assert "prefers-color-scheme: dark" in drawn
    for arm in report.PATHS:
        assert f">{arm}</text>" in drawn


@pytest.mark.parametrize(
    ("differences", "p"),
    [([0.1, 0.2, 0.3], 0.25), ([-0.1, -0.2, -0.3], 0.25), ([0.1, -0.1], 1.0), ([1.0, 1.0, 1.0, -0.5], 0.25)],
)
def test_sign_flips_count_means_at_least_as_far_from_zero(differences: list[float], p: float) -> None:
    assert report.sign_flip_p(differences) == p


def test_holm_corrects_the_smallest_p_most_and_keeps_the_order() -> None:
    assert report.holm([0.04, 0.01]) == [0.04, 0.02]
    assert report.holm([0.02, 0.03]) == [0.04, 0.04]
