"""The experiment's page says what its data say."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "token_paths"))

import report

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"


def test_the_tables_are_those_of_the_data() -> None:
    with open(FOLDER / "data" / "token-paths.csv", encoding="utf-8", newline="") as source:
        rows = list(csv.DictReader(source))
    page = (FOLDER / "token-paths.md").read_text("utf-8")
    _, _, behind = page.partition("compared by tests/docs/test_token_paths.py -->\n")
    assert behind.partition("<!-- end -->")[0].strip() == "\n".join(report.tables(rows)).strip()


def test_the_plot_is_of_these_arms_and_follows_the_reader_s_colours() -> None:
    drawn = (FOLDER / "token-paths.svg").read_text("utf-8")
    assert "prefers-color-scheme: dark" in drawn
    for arm in ("recorded", "retokenized", "rerendered"):
        assert f">{arm}</text>" in drawn
