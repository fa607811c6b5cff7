"""Model folders by path and by Hub name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokentape._hub import find_model, is_hub_name
from tokentape.errors import InvalidRequest

NAME = Path("org/Model-1B")


def cache(root: Path, *revisions: str, main: str | None = None) -> Path:
    repository = root / "models--org--Model-1B"
    for revision in revisions:
        (repository / "snapshots" / revision).mkdir(parents=True)
        (repository / "snapshots" / revision / "tokenizer.json").touch()
    if main is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(f"{main}\n", encoding="utf-8")
    return repository / "snapshots"


def test_folder_resolves_to_itself(tmp_path: Path) -> None:
    assert find_model(tmp_path, weights=False) == tmp_path
    assert not is_hub_name(tmp_path)


def test_hub_name_resolves_to_the_snapshot_of_its_main_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshots = cache(tmp_path, "a", "b", main="b")
    assert find_model(NAME, weights=False) == snapshots / "b"
    assert is_hub_name(NAME)


def test_a_single_snapshot_needs_no_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshots = cache(tmp_path / "hub", "a")
    assert find_model(NAME, weights=False) == snapshots / "a"


def test_ambiguous_snapshots_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cache(tmp_path, "a", "b", main="c")
    with pytest.raises(InvalidRequest, match="hf download org/Model-1B"):
        find_model(NAME, weights=True)


@pytest.mark.parametrize("name", ["nowhere", "/models/none", "a/b/c"])
def test_name_that_is_not_a_hub_name_is_a_missing_folder(name: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no model folder"):
        find_model(Path(name), weights=False)
