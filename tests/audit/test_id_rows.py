"""Rows of ids from every place that they are read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.records import SETUP, make_chain, make_turn
from tokentape._session.arrow import iter_parquet, write_parquet
from tokentape._session.jsonl import write_jsonl
from tokentape.audit._id_rows import Columns, IdRow, iter_rows, session_rows
from tokentape.errors import InvalidRequest
from tokentape.store import StoredSession
from tokentape.types import Provenance, SessionInfo


@pytest.fixture
def stored() -> StoredSession:
    """A branch of two turns, and another that shares the first of them."""
    first, second = make_chain("s", 2, sampling={"temperature": 0.5})
    other = make_turn("s", 2, first, fork="branched", sampling={})
    return StoredSession(SessionInfo("s", 0.0), {SETUP.digest: SETUP}, (first, second, other), (), ())


def spans(rows: list[IdRow]) -> list[list[tuple[int, int]]]:
    return [[(span.start, span.end) for span in row.spans] for row in rows]


def test_a_turn_that_branches_share_is_sampled_once(stored: StoredSession) -> None:
    rows = list(session_rows(stored))
    assert [row.name for row in rows] == ["s:1", "s:2"]
    assert spans(rows) == [[(4, 8), (12, 16)], [(12, 16)]]
    assert [dict(span.labels) for span in rows[0].spans] == [
        {"turn": "1", "weights": "step-1", "temperature": "0.5"},
        {"turn": "2", "weights": "step-1", "temperature": "0.5"},
    ]
    assert rows[1].spans[0].labels["temperature"] == "unknown"


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_files_of_trajectories_give_the_same_rows(stored: StoredSession, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    (write_parquet if suffix == "parquet" else write_jsonl)(stored.trajectories(), path)
    rows, expected = list(iter_rows(path)), list(session_rows(stored))
    assert [row.name for row in rows] == [row.name for row in expected]
    assert spans(rows) == spans(expected)
    for row, expected_row in zip(rows, expected, strict=True):
        assert np.array_equal(row.ids, expected_row.ids)
        assert row.provenance is not None
        assert np.array_equal(row.provenance, expected_row.provenance)


def test_metadata_and_payloads_of_trajectories_are_not_read(stored: StoredSession, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_parquet(stored.trajectories(), path)
    table = pq.read_table(path)
    damaged = pa.array(["{"] * table.num_rows)
    table = table.set_column(table.schema.get_field_index("metadata"), "metadata", damaged)
    pq.write_table(table.append_column("payload_experts", damaged), path)
    with pytest.raises(InvalidRequest):
        list(iter_parquet(path))
    assert [row.name for row in iter_rows(path)] == [row.name for row in session_rows(stored)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_files_of_other_tools_are_read_by_common_names(tmp_path: Path, suffix: str) -> None:
    masked = write(tmp_path / f"a{suffix}", [{"uid": "x", "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 0, 1]}])
    (row,) = iter_rows(masked)
    assert (row.name, row.ids.tolist(), spans([row])) == ("x", [1, 2, 3, 4, 5], [[(1, 3), (4, 5)]])
    assert row.provenance is not None
    assert (row.provenance == Provenance.SAMPLED).tolist() == [False, True, True, False, True]
    paired = write(
        tmp_path / f"b{suffix}",
        [
            {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "completion_mask": [1, 0, 1]},
            {"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1]},
        ],
    )
    rows = list(iter_rows(paired))
    assert [row.name for row in rows] == ["1", "2"]
    assert (rows[0].ids.tolist(), spans(rows)) == ([1, 2, 3, 4, 5], [[(2, 3), (4, 5)], [(1, 2)]])


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_columns_can_be_named(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", [{"out": [3, 4], "in": [1], "step": 7, "who": "r"}])
    (row,) = iter_rows(path, Columns(ids="out", prompt="in", name="who", by=("step",)))
    assert (row.name, row.ids.tolist(), spans([row])) == ("r", [1, 3, 4], [[(1, 3)]])
    assert row.spans[0].labels == {"step": "7"}


def test_json_may_be_a_bare_list(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1, 2]")
    (row,) = iter_rows(tmp_path / "a.json")
    assert (row.ids.tolist(), spans([row])) == ([1, 2], [[(0, 2)]])


def own_row(**damage: Any) -> str:
    """A trajectory of two tokens, with other values for some of its fields."""
    whole = {
        "schema_version": 1,
        "session_id": "s",
        "leaf": 0,
        "token_ids": [1, 2],
        "loss_mask": [False, True],
        "provenance": [2, 1],
        "completion_starts": [1],
        "completion_ends": [2],
        "weight_versions": ["0"],
        "turns": [0],
        "logprobs": [0.0, -1.0],
        "verdict": "exact",
        "metadata": {},
        "reward": None,
    }
    return json.dumps({**whole, **damage})


def test_a_trajectory_is_read_from_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(own_row())
    (row,) = iter_rows(tmp_path / "a.jsonl")
    assert (row.name, spans([row])) == ("s:0", [[(1, 2)]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("3", "expected an object or a list"),
        ('{"text": "a"}', "no column of ids: expected one of token_ids"),
        ('{"ids": ["a"]}', "expected a list of token ids"),
        ('{"ids": [1.5]}', "expected a list of token ids"),
        ('{"ids": [-1]}', "expected a list of token ids"),
        ('{"ids": [4, -3]}', r"integers from 0 to 2147483647; found -3 \(int\) at position 1"),
        ('{"ids": [1, 2.5]}', r"found 2.5 \(float\) at position 1"),
        ('{"ids": [100000000000000000000]}', r"found 100000000000000000000 \(int\) at position 0"),
        ('{"ids": "abc"}', "found str"),
        ('{"ids": [1, 2], "mask": [1]}', "1 values of mask for 2 ids"),
        ('{"ids": [1, 2], "mask": 1}', "mask: expected a list of numbers"),
        ('{"ids": [1, 2], "mask": ["a", "b"]}', "mask: expected a list of numbers"),
        ('{"ids": [1, 2], "mask": [1, null]}', "mask: expected 1 .* else 0; found None at position 1"),
        ('{"ids": [1, 2], "mask": [-1, 1]}', "found -1 at position 0"),
        pytest.param("[" * 100_000, "is not JSON", id="nested"),
        ('{"schema_version": 1, "token_ids": [1]}', "a trajectory is corrupt"),
        (own_row(completion_starts=[1, 1]), "a trajectory is corrupt"),
        (own_row(weight_versions=[]), "a trajectory is corrupt"),
        (own_row(provenance=[2, -1]), "a trajectory is corrupt"),
        (own_row(provenance=[2, 77]), "a trajectory is corrupt"),
    ],
)
def test_invalid_row_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"[1]\n{line}\n")
    with pytest.raises(InvalidRequest, match=f"line 2.*{message}"):
        list(iter_rows(path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InvalidRequest, match=r"expected a data directory, .* or an archive, or a file named"):
        list(iter_rows(tmp_path / "a.txt"))
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(InvalidRequest, match="is not a Parquet file"):
        list(iter_rows(tmp_path / "a.parquet"))
    with pytest.raises(InvalidRequest, match="no column who"):
        list(iter_rows(write(tmp_path / "b.parquet", [{"ids": [1]}]), Columns(name="who")))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_leaf_is_part_of_the_name(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", [{"session_id": "s", "leaf": leaf, "token_ids": [leaf]} for leaf in (1, 3)])
    assert [(row.name, row.session) for row in iter_rows(path)] == [("s:1", "s"), ("s:3", "s")]
    assert [row.name for row in iter_rows(path, Columns(name="session_id"))] == ["s", "s"]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    "names",
    [("prompt_ids", "response_mask", "response_logprobs"), ("prompt_token_ids", "loss_masks", "rollout_logprobs")],
    ids=["verl", "skyrl"],
)
def test_rows_of_trainers_have_prompt_mask_and_logprobs(tmp_path: Path, suffix: str, names: tuple[str, ...]) -> None:
    prompt, mask, logprobs = names
    values = {prompt: [1], "response_ids": [2, 3], mask: [1, 0], logprobs: [-1.0, 0.0]}
    (row,) = iter_rows(write(tmp_path / f"a{suffix}", [values]))
    assert (row.ids.tolist(), spans([row])) == ([1, 2, 3], [[(1, 2)]])
    assert row.logprobs is not None
    np.testing.assert_array_equal(row.logprobs, np.array([np.nan, -1, 0], np.float32))


@pytest.mark.parametrize(
    ("logprobs", "why"),
    [([-1.0], "1 values for 2 ids"), ([["a"], ["b"]], "expected a list of numbers, one per id; found list")],
)
def test_unusable_logprobs_are_named(tmp_path: Path, logprobs: Any, why: str) -> None:
    (row,) = iter_rows(write(tmp_path / "a.jsonl", [{"ids": [1, 2], "logprobs": logprobs}]))
    assert row.logprobs is None
    assert f"a.jsonl line 1: logprobs: {why}" in row.unread_logprobs


def test_rows_can_be_grouped_by_a_column_of_structs(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"ids": [[1, 2]], "task": [{"name": "a"}]}), path)
    (row,) = iter_rows(path, Columns(by=("task",)))
    assert row.spans[0].labels["task"] == "{'name': 'a'}"


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_row_without_the_first_column_of_logprobs_has_the_next(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", [{"ids": [1, 2], "logprobs": None, "trainer_logprobs": [-1.0, -2.0]}])
    (row,) = iter_rows(path)
    assert row.logprobs is not None
    assert row.logprobs.tolist() == [-1.0, -2.0]
