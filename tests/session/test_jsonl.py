from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import bits
from tests.searching import examples
from tests.session.trajectory_cases import drawn_trajectories, make_trajectory
from tokentape._session.arrow import trajectory_schema
from tokentape._session.jsonl import json_line, read_jsonl, trajectory_from_json, trajectory_to_json, write_jsonl
from tokentape.errors import InvalidRequest
from tokentape.types import TokenRows, Trajectory


@settings(max_examples=examples(50))
@given(st.lists(drawn_trajectories(), max_size=5))
def test_jsonl_gives_every_bit_back(tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory]) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "t.jsonl"
    assert write_jsonl(written, path) == len(written)
    assert bits(list(read_jsonl(path))) == bits(written)


def test_an_object_has_the_columns_of_the_table_and_the_version() -> None:
    value = trajectory_to_json(make_trajectory(role="main", adapters=("a",)))
    assert list(value) == ["schema_version", *trajectory_schema().names]
    assert value.keys() - trajectory_to_json(make_trajectory()).keys() == {"adapters", "role", "lineage"}
    assert value["schema_version"] == 1


def test_columns_and_payloads_have_the_names_of_the_table_s_columns() -> None:
    values = np.array([0, 0, 0, 1, np.nan, 2], np.float32)
    rows = TokenRows(np.zeros((6, 2), np.int16), np.ones(6, bool))
    value = trajectory_to_json(make_trajectory(columns={"advantages": values}, payloads={"experts": rows}))
    assert list(value)[-2:] == ["column_advantages", "payload_experts"]
    assert value["column_advantages"] == [0, 0, 0, 1, None, 2]
    assert (value["payload_experts"]["dtype"], value["payload_experts"]["shape"]) == ("<i2", [6, 2])


def test_older_line_without_turn_rewards_and_spans_is_read() -> None:
    value = trajectory_to_json(make_trajectory())
    del value["turn_rewards"], value["weight_spans"]
    assert bits(trajectory_from_json(value)) == bits(make_trajectory())


def test_older_line_reports_unknown_distributions_and_round_trips() -> None:
    old = replace(make_trajectory(), sampled_from=(None,), logprobs_of=(None,), finish_reasons=(None,))
    line = json_line(old)
    assert b"sampled_from" not in line
    assert b"finish_reasons" not in line
    assert b"adapters" not in line
    assert json.loads(line)["verdict"] == "exact"
    read = trajectory_from_json(json.loads(line))
    assert (read.verdict, read.sampled_from, read.logprobs_of) == ("exact, logprobs not known", (None,), (None,))
    assert json_line(read) == line


def test_partly_known_distributions_are_kept() -> None:
    partly = replace(make_trajectory(), logprobs_of=(None,), verdict="exact, logprobs not known")
    assert json.loads(json_line(partly))["verdict"] == partly.verdict
    assert bits(trajectory_from_json(json.loads(json_line(partly)))) == bits(partly)


def test_a_payload_of_objects_is_refused() -> None:
    value = trajectory_to_json(make_trajectory())
    value["payload_x"] = {"dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA=", "known": [True]}
    with pytest.raises(InvalidRequest, match="corrupt"):
        trajectory_from_json(value)


def test_datasets_reads_the_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_jsonl([make_trajectory(0), make_trajectory(1, reward=None)], tmp_path / "t.jsonl")
    loaded = datasets.Dataset.from_json(str(tmp_path / "t.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert loaded[0]["token_ids"] == [0, 1, 2, 3, 4, 5]
    assert loaded[1]["reward"] is None


def test_lines_are_written_as_trajectories_arrive() -> None:
    sink = io.BytesIO()
    write_jsonl([make_trajectory(0), make_trajectory(1)], sink)
    assert [json.loads(line)["session_id"] for line in sink.getvalue().splitlines()] == ["session-0", "session-1"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"schema_version": 99}', "line 2: a trajectory has schema version 99"),
        ('{"schema_version": 1}', "line 2: a trajectory is corrupt"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl([make_trajectory()], path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InvalidRequest, match=found):
        list(read_jsonl(path))
