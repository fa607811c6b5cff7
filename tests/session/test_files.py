"""Files of trajectories by their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokentape
from tests.records import bits
from tests.session.trajectory_cases import drawn_trajectories, make_trajectory
from tokentape import Trajectory
from tokentape.errors import InvalidRequest


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl"])
def test_file_round_trips_bit_for_bit(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @given(st.lists(drawn_trajectories(), max_size=2))
    def check(written: list[Trajectory]) -> None:
        path = tmp_path_factory.mktemp("files") / name
        assert tokentape.write_trajectories(iter(written), path) == len(written)
        assert bits(tokentape.read_trajectories(path)) == bits(written)

    check()


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl"])
def test_another_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(InvalidRequest):
        tokentape.read_trajectories(tmp_path / name)


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl"])
def test_a_write_that_fails_leaves_no_file(name: str, tmp_path: Path) -> None:
    def interrupted() -> Iterator[Trajectory]:
        yield make_trajectory()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        tokentape.write_trajectories(interrupted(), tmp_path / name)
    assert not [*tmp_path.iterdir()]
