from __future__ import annotations

from pathlib import Path

import pytest

from tokentape.errors import StoreCorrupt
from tokentape.store._served_model import ServedModel, read_served_model, write_served_model

FIRST = ServedModel("/models/a", "abc", "123")


def test_last_written_served_model_is_read(tmp_path: Path) -> None:
    write_served_model(tmp_path, FIRST)
    write_served_model(tmp_path, ServedModel("/models/b", "def", "456"))
    assert read_served_model(tmp_path) == ServedModel("/models/b", "def", "456")
    assert [path.name for path in tmp_path.iterdir()] == ["model.json"]


def test_directory_without_a_served_model_gives_none(tmp_path: Path) -> None:
    assert read_served_model(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"folder": "a"}'])
def test_damaged_served_model_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(StoreCorrupt, match=r"model\.json is damaged"):
        read_served_model(tmp_path)
