"""Metadata filters match values in any spelling."""

from __future__ import annotations

from typing import Any

import pytest

from tokentape._canonical import canonical_json
from tokentape.store._listing import metadata_spellings


@pytest.mark.parametrize(
    ("value", "asked", "matches"),
    [
        ("É", "é", True),
        ("Éclair", "éclair", True),
        ("éclair", "ÉCLAIR", True),
        ("é", "e", False),
        ({"b": 1, "a": "é"}, '{"b": 1, "a": "é"}', True),
        ({"b": 1, "a": 2}, '{"b": 1}', False),
        ("NaN", "NaN", True),
    ],
)
def test_value_matches_in_another_case_and_order(value: Any, asked: str, matches: bool) -> None:
    kept = canonical_json({"k": value}).casefold()
    assert any(spelling.casefold() in kept for spelling in metadata_spellings("k", asked)) is matches
