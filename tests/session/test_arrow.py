from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import bits
from tests.searching import examples
from tests.session.trajectory_cases import drawn_trajectories, make_trajectory
from tokentape._session import arrow
from tokentape._session.arrow import (
    ExtraNames,
    read_rows,
    trajectories_table,
    trajectory_schema,
    write_parquet,
)
from tokentape._session.files import read_trajectories, write_trajectories
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.types import TokenRows, Trajectory


@settings(max_examples=examples(50))
@given(st.lists(drawn_trajectories(), max_size=3))
def test_parquet_gives_every_bit_back(tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory]) -> None:
    path = tmp_path_factory.mktemp("parquet") / "t.parquet"
    assert write_parquet(written, path) == len(written)
    assert bits(read_trajectories(path)) == bits(written)


def damage(path: Path, column: int) -> None:
    """Change the last byte of a column in the first row group."""
    chunk = pq.read_metadata(path).row_group(0).column(column)
    starts = [at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at]
    data = bytearray(path.read_bytes())
    data[min(starts) + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("column", ["token_ids", "provenance", "loss_mask", "logprobs", "session_id", "reward"])
def test_a_changed_byte_of_a_column_is_found(tmp_path: Path, column: str) -> None:
    path = tmp_path / "t.parquet"
    write_parquet([make_trajectory(number, 500) for number in range(3)], path)
    names = pq.read_metadata(path).schema
    damage(path, next(i for i in range(len(names)) if names.column(i).path.split(".")[0] == column))
    with pytest.raises(InvalidRequest, match=r"t\.parquet: .*corrupt"):
        read_trajectories(path)


def test_a_damaged_parquet_file_of_others_is_called_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "theirs.parquet"
    pq.write_table(pa.table({"text": ["a" * 500]}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[data.index(b"\x28\xb5\x2f\xfd")] ^= 1  # how Zstandard's frames begin
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match=r"theirs\.parquet: the file is corrupt"):
        list(read_rows(path, ["text"]))


def test_a_file_that_may_not_be_opened_is_not_called_corrupt(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trajectories(tmp_path / "missing.parquet")
    folder = tmp_path / "folder.parquet"
    folder.mkdir()
    with pytest.raises(InvalidRequest, match=r"folder\.parquet is a folder, expected a Parquet file"):
        list(read_rows(folder, ["text"]))


def test_the_schema_is_pinned() -> None:
    """A change here is a change of the file format: see the module's docstring for what raises the version."""
    distribution = "struct<penalties: bool, temperature: double, truncation: bool, grammar: bool>"
    edge = (
        "struct<kind: string, turn: int32, parent_session: string, parent: int32, evidence: string, confidence: double>"
    )
    assert trajectory_schema().remove_metadata().to_string(element_size_limit=200) == "\n".join(
        [
            "session_id: string not null",
            "leaf: int32 not null",
            "token_ids: list<element: int32 not null> not null",
            "  child 0, element: int32 not null",
            "provenance: list<element: uint8 not null> not null",
            "  child 0, element: uint8 not null",
            "loss_mask: list<element: bool not null> not null",
            "  child 0, element: bool not null",
            "logprobs: list<element: float not null> not null",
            "  child 0, element: float not null",
            "turns: list<element: int32 not null> not null",
            "  child 0, element: int32 not null",
            "completion_starts: list<element: int32 not null> not null",
            "  child 0, element: int32 not null",
            "completion_ends: list<element: int32 not null> not null",
            "  child 0, element: int32 not null",
            "weight_versions: list<element: string not null> not null",
            "  child 0, element: string not null",
            "reward: double",
            "verdict: string not null",
            "metadata: string not null",
            "turn_rewards: list<element: double not null> not null",
            "  child 0, element: double not null",
            "weight_spans: list<element: struct<start: int32 not null, end: int32 not null, version: string not null> "
            "not null> not null",
            "  child 0, element: struct<start: int32 not null, end: int32 not null, version: string not null> not null",
            "      child 0, start: int32 not null",
            "      child 1, end: int32 not null",
            "      child 2, version: string not null",
            "media: list<element: struct<start: int32 not null, length: int32 not null, sha256: string not null, "
            "settings: string not null> not null> not null",
            "  child 0, element: struct<start: int32 not null, length: int32 not null, sha256: string not null, "
            "settings: string not null> not null",
            "      child 0, start: int32 not null",
            "      child 1, length: int32 not null",
            "      child 2, sha256: string not null",
            "      child 3, settings: string not null",
            *(
                line
                for name in ("sampled_from", "logprobs_of")
                for line in (
                    f"{name}: list<element: {distribution}> not null",
                    f"  child 0, element: {distribution}",
                    "      child 0, penalties: bool",
                    "      child 1, temperature: double",
                    "      child 2, truncation: bool",
                    "      child 3, grammar: bool",
                )
            ),
            "finish_reasons: list<element: string> not null",
            "  child 0, element: string",
            "adapters: list<element: string> not null",
            "  child 0, element: string",
            "role: string not null",
            f"lineage: list<element: {edge}> not null",
            f"  child 0, element: {edge}",
            "      child 0, kind: string",
            "      child 1, turn: int32",
            "      child 2, parent_session: string",
            "      child 3, parent: int32",
            "      child 4, evidence: string",
            "      child 5, confidence: double",
        ]
    )


def test_older_file_reports_unknown_distributions(tmp_path: Path) -> None:
    table = trajectories_table([make_trajectory()]).drop_columns(["sampled_from", "logprobs_of", "finish_reasons"])
    pq.write_table(table, tmp_path / "t.parquet")
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert (read.verdict, read.sampled_from, read.logprobs_of) == ("exact, logprobs not known", (None,), (None,))
    assert (read.finish_reasons, read.truncated) == ((None,), None)


def with_extras(number: int = 0) -> Trajectory:
    experts = TokenRows(np.arange(24, dtype=np.uint8).reshape(6, 2, 2), np.array([True] * 5 + [False]))
    advantages = np.array([0, 0, 0, 0.5, np.nan, -1], np.float32)
    return make_trajectory(number, columns={"advantages": advantages}, payloads={"experts": experts})


def test_columns_and_payloads_have_own_nullable_table_columns() -> None:
    table = trajectories_table([with_extras(), make_trajectory(1)])
    assert table.schema.names[-2:] == ["column_advantages", "payload_experts"]
    assert str(table.schema.field("column_advantages").type) == "list<element: float not null>"
    assert [row is None for row in table["column_advantages"].to_pylist()] == [False, True]
    assert [row is None for row in table["payload_experts"].to_pylist()] == [False, True]


def test_pandas_reads_columns_as_arrays_and_payloads_from_their_bytes(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    trajectory = with_extras()
    write_parquet([trajectory, make_trajectory(1)], tmp_path / "t.parquet")
    frame = pandas.read_parquet(tmp_path / "t.parquet")
    np.testing.assert_array_equal(frame.column_advantages[0], trajectory.columns["advantages"])
    payload = frame.payload_experts[0]
    rows = np.frombuffer(payload["data"], payload["dtype"]).reshape(payload["shape"])
    np.testing.assert_array_equal(rows, trajectory.payloads["experts"].rows)
    np.testing.assert_array_equal(payload["known"], trajectory.payloads["experts"].known)


def test_datasets_reads_columns_and_payloads(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    trajectory = with_extras()
    write_parquet([trajectory, make_trajectory(1)], tmp_path / "t.parquet")
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "t.parquet"), cache_dir=str(tmp_path / "cache"))
    np.testing.assert_array_equal(
        np.array(loaded[0]["column_advantages"], np.float32), trajectory.columns["advantages"]
    )
    assert loaded[0]["payload_experts"]["data"] == trajectory.payloads["experts"].rows.tobytes()
    assert loaded[0]["weight_spans"] == [{"start": 3, "end": 6, "version": "step-1"}]
    assert loaded[1]["column_advantages"] is None


def test_a_generator_s_columns_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="advantages, experts"):
        write_parquet((trajectory for trajectory in [with_extras()]), tmp_path / "t.parquet")
    names = ExtraNames(("advantages",), ("experts", "routes"))
    assert write_parquet((trajectory for trajectory in [with_extras()]), tmp_path / "t.parquet", names) == 1
    assert bits(read_trajectories(tmp_path / "t.parquet")) == bits([with_extras()])


def test_older_file_without_turn_rewards_and_spans_is_read(tmp_path: Path) -> None:
    table = trajectories_table([make_trajectory()]).drop_columns(["turn_rewards", "weight_spans", "media"])
    pq.write_table(table, tmp_path / "t.parquet")
    assert bits(read_trajectories(tmp_path / "t.parquet")) == bits([make_trajectory()])


def test_the_file_names_its_version_and_provenance_codes(tmp_path: Path) -> None:
    write_parquet([make_trajectory()], tmp_path / "t.parquet")
    metadata = pq.read_metadata(tmp_path / "t.parquet").metadata
    assert metadata[b"tokentape.schema_version"] == b"1"
    assert json.loads(metadata[b"tokentape.provenance"]) == {
        "sampled": 1,
        "template": 2,
        "system": 3,
        "user": 4,
        "tool": 5,
        "assistant": 6,
        "close": 7,
        "media": 8,
    }


def test_pyarrow_reads_the_table_as_it_was_built(tmp_path: Path) -> None:
    # Arrow finds that no NaN equals another.
    rewards = np.array([0.5])
    trajectories = [make_trajectory(0, turn_rewards=rewards), make_trajectory(1, reward=None, turn_rewards=rewards)]
    write_parquet(trajectories, tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.equals(trajectories_table(trajectories), check_metadata=True)
    assert table["reward"].to_pylist() == [1.0, None]


def test_datasets_reads_the_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_parquet([make_trajectory(0), make_trajectory(1, tokens=9, reward=None)], tmp_path / "t.parquet")
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "t.parquet"), cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 2
    row = loaded.with_format("numpy")[1]
    assert row["token_ids"].tolist() == list(range(9))
    assert row["loss_mask"].dtype == np.bool_
    assert row["logprobs"].dtype == np.float32
    assert loaded[1]["reward"] is None


def test_row_groups_are_written_while_trajectories_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "ROW_GROUP_TOKENS", 10)
    sink = io.BytesIO()
    sizes: list[int] = []

    def arriving() -> Iterator[Trajectory]:
        for number in range(6):
            sizes.append(len(sink.getvalue()))
            yield make_trajectory(number, tokens=6)

    write_parquet(arriving(), sink)
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3] < sizes[4]
    file = pq.ParquetFile(io.BytesIO(sink.getvalue()))
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [2, 2, 2]


def test_there_is_a_page_index(tmp_path: Path) -> None:
    write_parquet([make_trajectory()], tmp_path / "t.parquet")
    column = pq.read_metadata(tmp_path / "t.parquet").row_group(0).column(2)
    assert column.has_offset_index
    assert column.has_column_index


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    table = trajectories_table([make_trajectory()]).replace_schema_metadata({arrow.VERSION_KEY: "99"})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(InvalidRequest, match="version 99, but this release reads 1"):
        read_trajectories(tmp_path / "t.parquet")


def test_a_parquet_file_of_something_else_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "t.parquet")
    with pytest.raises(InvalidRequest, match="does not contain trajectories"):
        read_trajectories(tmp_path / "t.parquet")


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(InvalidRequest, match="not a Parquet file"):
        read_trajectories(tmp_path / "t.parquet")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_without_pyarrow_only_parquet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    trajectory, path = make_trajectory(), tmp_path / f"t.{suffix}"
    write_trajectories([trajectory], path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for use in (lambda: write_trajectories([trajectory], path), lambda: read_trajectories(path)):
        refused = pytest.raises(UnsupportedParameter, match=r"pip install 'tokentape\[parquet\]'")
        with refused if suffix == "parquet" else nullcontext():
            use()


def test_importing_the_module_does_not_import_pyarrow() -> None:
    code = "import sys, tokentape._session.arrow; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
