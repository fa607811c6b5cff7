"""Adapters inside the trainers' own entries of rollouts: each runs an agent over an engine that keeps a ledger."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.training import live
from tests.training.interpreters import REPOSITORY, answered

PAGE = (REPOSITORY / "docs/how-to/train-live.md").read_text()

ROWS = {0: "refused", 2: "two rows", 3: "three rows"}
"""The table's cell for a session with a fork."""

TRAINERS = {
    "verl": ("verl", "failure"),
    "slime": ("slime", "aborted"),
    "miles": ("Miles", "aborted"),
    "skyrl": ("SkyRL", "error"),
    "verifiers": ("verifiers, prime-rl", "HarnessError"),
    "tinker_cookbook": ("Tinker cookbook", "skipped"),
    "agent_lightning": ("Agent Lightning", "failed"),
    "art": ("ART (no adapter)", ""),
    "nemo_gym": ("NeMo-RL with NeMo-Gym", "Non-contiguous messages found"),
    "trl": ("TRL's `GRPOTrainer`", "has 2 branches"),
    "trl_async": ("TRL's `AsyncGRPOTrainer`", ""),
    "openenv": ("TRL's `HarnessRolloutWorker`", ""),
}
"""For each trainer, its name on the page and the cell for a failed agent or a refused session."""


def table_after(header: str) -> dict[str, list[str]]:
    """Return the rows of a table of the page, by their first cell without the version."""
    (table,) = re.findall(rf"^\| trainer \| {re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in table.splitlines()]
    return {name: cells for name, *cells in rows}


def cells(made: dict[str, Any]) -> list[str]:
    """Return the beginnings of the first cells of the page's row, from the measured result."""
    whole = {made["sessions"][kind] for kind in ("exact", "truncated at the end", "truncated inside")}
    exact_column, versions, resumed = (
        "yes" if flag else "no" for flag in (whole == {1}, made["versions"], made["resumed"])
    )
    return [exact_column, ROWS[made["sessions"]["forked"]], versions, resumed]


@pytest.mark.differential
@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_trainer_rows_of_live_agents_equal_the_sampled_tokens(
    trainer: str, record_property: Callable[[str, object], None]
) -> None:
    name, failed = TRAINERS[trainer]
    begun = time.monotonic()
    made = answered(trainer, "trainer_live")
    counts = {"planted": f"{made['noticed']} of {made['noticed'] + len(made['unnoticed'])}"}
    record_property("trainer", [name, *cells(made), counts["planted"], f"{time.monotonic() - begun:.0f}"])
    assert (made["failed"], made["found"], made["unnoticed"]) == (failed, [], [])
    assert made["sessions"]["two versions"] == 1
    assert made["noticed"] >= 13
    page = table_after("exact")[name]
    assert [cell for cell, begin in zip(page, cells(made), strict=False) if not cell.startswith(begin)] == []
    assert failed in " ".join(page)


def test_the_page_has_a_row_for_each_trainer_that_is_run() -> None:
    assert list(table_after("exact")) == [name for name, _ in TRAINERS.values()]
    assert set(live.KINDS) == {"exact", "forked", "truncated at the end", "truncated inside", "two versions"}


def test_classes_named_on_the_page_are_in_the_trainer_tests() -> None:
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests/training").glob("t*.py"))
    for name, (ran, *_) in table_after("its classes").items():
        for part in re.findall(r"`([\w.]+)`", ran):
            assert re.search(rf"\b{part.split('.')[-1]}\b", tests), f"{name}: {part}"


def test_modules_run_by_trainer_interpreters_do_not_import_pytest() -> None:
    """CONTRIBUTING.md installs no pytest beside trainers."""
    modules = sorted(path.stem for path in (REPOSITORY / "tests/training").glob("trainer_*.py"))
    code = f"import sys; sys.modules['pytest'] = None; from tests.training import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
