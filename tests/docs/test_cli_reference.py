from __future__ import annotations

import runpy
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_the_reference_of_commands_is_up_to_date() -> None:
    """Run `make docs` if it is not."""
    script = runpy.run_path(str(PROJECT / "scripts" / "cli_reference.py"))
    assert script["page"]() == script["PAGE"].read_text(encoding="utf-8")
