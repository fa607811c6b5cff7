"""The generated reference pages match the code. Run `make docs` if one does not."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import tokentape._session.tree

PROJECT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(PROJECT / "scripts" / "reference_tables.py"))


@pytest.mark.parametrize("name", SCRIPT["PAGES"])
def test_the_page_is_up_to_date(name: str) -> None:
    assert SCRIPT["page"](name) == (SCRIPT["FOLDER"] / f"{name}.md").read_text(encoding="utf-8")


def test_every_setting_is_described() -> None:
    rows = [line for line in SCRIPT["setting_lines"]() if line.startswith("| `")]
    assert [row for row in rows if re.search(r"\|  ?(Default: [^|]*)?\|$", row)] == []


def test_every_cause_of_a_fork_is_explained() -> None:
    """Those that the code names: in the explanation of `fork_cause`, and where prompts fork."""
    named = set(re.findall(r"`(\w+)`[:,]", tokentape._session.tree.Session.fork_cause.__doc__ or ""))
    prompts = (PROJECT / "src/tokentape/gateway/_prompts.py").read_text(encoding="utf-8")
    named |= set(re.findall(r'fork\("(\w+)"', prompts))
    assert named
    assert named | {"drift"} == {name for name, _ in SCRIPT["_causes"]()}
