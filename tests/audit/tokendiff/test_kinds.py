"""Objects in a text are found, in time that is linear in its length."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tokentape.audit._tokendiff.kinds import Region


def test_objects_are_found_in_both_spellings() -> None:
    found = Region(b"""f({x}) {"a": 1} {'b': True} { "c": {}}""").values
    assert [value for _, _, value in found] == [{"a": 1}, {"b": True}, {"c": {}}]


@pytest.mark.parametrize("opening", ['{"a": [1, {"b": 2}, ', "{'a': {'b': 2}, "])
def test_unclosed_braces_are_scanned_once(opening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    evaluate = ast.literal_eval

    def counted(text: str) -> Any:
        nonlocal read
        read += len(text)
        return evaluate(text)

    monkeypatch.setattr(ast, "literal_eval", counted)
    text = opening * 400
    assert len(Region(text.encode()).values) <= 800
    assert read <= 25 * len(text)
