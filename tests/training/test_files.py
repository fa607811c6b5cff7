from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import bits
from tests.searching import examples
from tests.session.trajectory_cases import drawn_trajectories, make_trajectory
from tokentape._session import arrow
from tokentape._session.arrow import write_parquet
from tokentape._session.files import read_trajectories
from tokentape._session.jsonl import write_jsonl
from tokentape.errors import InvalidRequest
from tokentape.training import _samples as files
from tokentape.training._collate import with_column
from tokentape.training._samples import Sample, assemble
from tokentape.types import TokenRows, Trajectory

FORMATS = ("s.parquet", "s.jsonl")


def as_sample(trajectory: Trajectory, group: str | None = None) -> Sample:
    return Sample(**{field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}, group=group)


def make_sample(**changes: Any) -> Sample:
    (sample,) = assemble([make_trajectory()], group="task").samples
    return replace(sample, **changes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(30))
@given(drawn=st.lists(st.tuples(drawn_trajectories(), st.none() | st.text("ab\u00e9", max_size=3)), max_size=2))
def test_files_round_trip_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, name: str, drawn: list[tuple[Trajectory, str | None]]
) -> None:
    # Payloads of one name have rows of one kind; drawn ones have any.
    samples = [as_sample(replace(trajectory, payloads={}), group) for trajectory, group in drawn]
    path = tmp_path_factory.mktemp("files") / name
    files.write_samples(samples, path)
    assert bits(list(files.read_samples(path))) == bits(samples)


@pytest.mark.parametrize("name", FORMATS)
def test_optional_fields_round_trip_with_their_samples(tmp_path: Path, name: str) -> None:
    experts = TokenRows(np.arange(12, dtype=np.uint8).reshape(6, 2), np.array([True] * 5 + [False]))
    samples = [make_sample(), with_column(make_sample(payloads={"experts": experts}), "advantages", [0.25])]
    files.write_samples(samples, tmp_path / name)
    assert bits(list(files.read_samples(tmp_path / name))) == bits(samples)


@pytest.mark.parametrize("name", FORMATS)
def test_unknown_logprobs_round_trip_as_nan(tmp_path: Path, name: str) -> None:
    logprobs = np.array([0, 0, 0, np.nan, np.nan, -1], np.float32)
    files.write_samples([make_sample(logprobs=logprobs)], tmp_path / name)
    (sample,) = files.read_samples(tmp_path / name)
    np.testing.assert_array_equal(sample.logprobs, logprobs)


def test_readers_of_trajectories_read_samples(tmp_path: Path) -> None:
    files.write_samples([make_sample()], tmp_path / "s.parquet")
    assert read_trajectories(tmp_path / "s.parquet")[0].token_ids.tolist() == make_sample().token_ids.tolist()


def test_files_of_trajectories_are_refused_as_samples(tmp_path: Path) -> None:
    write_parquet([make_trajectory()], tmp_path / "t.parquet")
    write_jsonl([make_trajectory()], tmp_path / "t.jsonl")
    with pytest.raises(InvalidRequest, match="does not contain samples"):
        list(files.read_samples(tmp_path / "t.parquet"))
    with pytest.raises(InvalidRequest, match=r"line 1.*does not contain samples"):
        list(files.read_samples(tmp_path / "t.jsonl"))


@pytest.mark.parametrize("name", FORMATS)
def test_samples_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "SAMPLES", replace(files.SAMPLES, version=2))
        files.write_samples([make_sample()], tmp_path / name)
    with pytest.raises(InvalidRequest, match="version 2, but this release reads 1"):
        list(files.read_samples(tmp_path / name))


def test_table_has_the_trajectory_columns_and_the_group(tmp_path: Path) -> None:
    files.write_samples([make_sample()], tmp_path / "s.parquet")
    write_parquet([make_trajectory()], tmp_path / "t.parquet")
    schema = pq.read_schema(tmp_path / "s.parquet")
    assert schema.names == [*pq.read_schema(tmp_path / "t.parquet").names, "group"]
    assert str(schema.field("group").type) == "string"


def test_row_groups_stay_small_and_have_a_page_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "ROW_GROUP_TOKENS", 12)
    files.write_samples([make_sample() for _ in range(5)], tmp_path / "s.parquet")
    metadata = pq.ParquetFile(tmp_path / "s.parquet").metadata
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [2, 2, 1]
    assert metadata.row_group(0).column(0).has_column_index


def test_dataset_rows_equal_samples() -> None:
    row = files.to_dataset([make_sample(), make_sample()]).with_format("torch")[0]
    assert row["token_ids"].tolist() == make_sample().token_ids.tolist()
    assert row["loss_mask"].tolist() == make_sample().loss_mask.tolist()
    assert row["group"] == "0"


def test_lines_are_json(tmp_path: Path) -> None:
    files.write_samples([make_sample()], tmp_path / "s.jsonl")
    (line,) = (tmp_path / "s.jsonl").read_text().splitlines()
    assert json.loads(line)["group"] == "0"
