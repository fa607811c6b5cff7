"""Values of metadata are found however they are spelled."""

from __future__ import annotations

from typing import Any

import pytest

from tokentape._canonical import canonical_json
from tokentape.store._listing import metadata_spellings


@pytest.mark.parametrize(
    ("value", "asked", "found"),
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
def test_a_value_is_found_by_another_case_and_order(value: Any, asked: str, found: bool) -> None:
    kept = canonical_json({"k": value}).casefold()
    assert any(one.casefold() in kept for one in metadata_spellings("k", asked)) is found
