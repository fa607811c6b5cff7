from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.data import REAL

PROJECT = Path(__file__).parents[2]


@pytest.mark.real
@pytest.mark.slow
def test_the_table_of_models_is_up_to_date() -> None:
    """Run `python scripts/models_table.py` if it is not."""
    script = runpy.run_path(str(PROJECT / "scripts" / "models_table.py"))

    def unversioned(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith(script["MADE_WITH"])]

    written = script["PAGE"].read_text(encoding="utf-8")
    assert unversioned(script["page"](script["certificates"](REAL))) == unversioned(written)
