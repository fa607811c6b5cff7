"""The page's table of edges of real harnesses has the recorded counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.harness.lineage.__main__ import COUNTS
from tests.session.lineage_traffic import KINDS

PAGE = Path(__file__).parents[2] / "docs/how-to/lineage.md"


def table() -> list[str]:
    """The rows of the table: edges, precision and recall of each kind, and the missed or wrong edges."""
    total: dict[str, Counter[str]] = {name: Counter() for name in ("right", "found", "true", "misses")}
    for counts in json.loads(COUNTS.read_text()).values():
        for name, harness_counts in total.items():
            harness_counts.update(counts[name])
    right, found, true = total["right"], total["found"], total["true"]
    rows = [
        f"| `{kind}` | {true[kind]} | {right[kind] / found[kind]:.2f} | {right[kind] / true[kind]:.2f} |"
        for kind in KINDS
    ]
    return [*rows, *(f"| {count} | {what} |" for what, count in sorted(total["misses"].items()))]


def test_the_page_has_the_counts_of_real_harnesses() -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    assert [row for row in table() if row not in lines] == []


def test_each_kind_is_found() -> None:
    for row in table()[: len(KINDS)]:
        edges, precision, recall = (float(cell) for cell in row.split("|")[2:5])
        assert edges >= 40, row
        assert min(precision, recall) >= 0.9, row
