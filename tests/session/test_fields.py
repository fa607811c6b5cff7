"""What both readers refuse: values of other types, lengths or bounds than those of the fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.records import bits
from tests.session.trajectory_cases import make_trajectory
from tokentape import read_trajectories
from tokentape._session.arrow import trajectories_table
from tokentape._session.jsonl import trajectory_to_json
from tokentape.errors import InvalidRequest
from tokentape.types import TokenRows, Trajectory

ROWS = TokenRows(np.zeros((6, 2), np.uint8), np.ones(6, np.bool_))

FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "one logprob too few": ("logprobs", lambda values: values[:-1]),
    "one id too few": ("token_ids", lambda values: values[:-1]),
    "one mask bit too many": ("loss_mask", lambda values: [*values, True]),
    "one provenance too few": ("provenance", lambda values: values[:-1]),
    "one column value too few": ("column_advantages", lambda values: values[:-1]),
    "one row too few": ("payload_experts", lambda value: value | {"shape": [5, 2], "data": value["data"][:-2]}),
    "one known too few": ("payload_experts", lambda value: value | {"known": value["known"][:-1]}),
    "one turn too many": ("turns", lambda values: [*values, 1]),
    "no version": ("weight_versions", lambda values: []),
    "fractional ids": ("token_ids", lambda values: [number + 0.5 for number in values]),
    "ids as text": ("token_ids", lambda values: list(map(str, values))),
    "negative ids": ("token_ids", lambda values: [-1, *values[1:]]),
    "ids beyond 32 bits": ("token_ids", lambda values: [2**31, *values[1:]]),
    "missing ids": ("token_ids", lambda values: [None, *values[1:]]),
    "logprobs above 0": ("logprobs", lambda values: [5.0] * len(values)),
    "logprobs as text": ("logprobs", lambda values: list(map(str, values))),
    "infinite logprobs": ("logprobs", lambda values: [-np.inf] * len(values)),
    "a mask of numbers": ("loss_mask", lambda values: [int(number) for number in values]),
    "a mask shifted by one token": ("loss_mask", lambda values: [*values[1:], False]),
    "an unknown provenance": ("provenance", lambda values: [99] * len(values)),
    "a completion beyond the end": ("completion_ends", lambda values: [7]),
    "a completion that ends before it starts": ("completion_ends", lambda values: [2]),
    "a reward of text": ("reward", lambda value: "big"),
    "a number for a verdict": ("verdict", lambda value: 1),
    "a turn of text": ("turns", lambda values: ["0"]),
    "a span without end": ("weight_spans", lambda values: [{"start": 3, "version": "step-1"}]),
}


def trajectory() -> Trajectory:
    return make_trajectory(columns={"advantages": np.ones(6, np.float32)}, payloads={"experts": ROWS})


def as_jsonl(path: Path, name: str, fault: Callable[[Any], Any]) -> Path:
    value = json.loads(json.dumps(trajectory_to_json(trajectory())))
    if name == "payload_experts" and "shape" in fault({"data": b"12", "known": []}):
        value[name] |= {"shape": [5, 2], "data": "AAAAAAAAAAAAAA=="}  # ten bytes in base64
    else:
        value[name] = fault(value[name])
    path = path / "t.jsonl"
    path.write_text(json.dumps(value) + "\n")
    return path


def as_parquet(path: Path, name: str, fault: Callable[[Any], Any]) -> Path:
    table = trajectories_table([trajectory()])
    at = table.schema.get_field_index(name)
    values = pa.array([fault(table[name][0].as_py())])
    pq.write_table(table.set_column(at, pa.field(name, values.type), values), path / "t.parquet")
    return path / "t.parquet"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("write", [as_jsonl, as_parquet])
def test_a_damaged_field_is_refused_by_its_name(
    tmp_path: Path, write: Callable[[Path, str, Callable[[Any], Any]], Path], fault: str
) -> None:
    name, change = FAULTS[fault]
    path = write(tmp_path, name, change)
    with pytest.raises(InvalidRequest, match="corrupt") as error:
        read_trajectories(path)
    assert path.name in str(error.value)
    # All lengths are compared with the number of ids.
    known_as = {"turns": "turns|starts", "token_ids": "ids|provenance", "weight_spans": "spans|end"}
    called = name.removeprefix("payload_").removeprefix("column_").removesuffix("_ends")
    assert re.search(known_as.get(name, called), str(error.value))


@pytest.mark.parametrize("write", [as_jsonl, as_parquet])
def test_undamaged_fields_are_read(tmp_path: Path, write: Callable[[Path, str, Callable[[Any], Any]], Path]) -> None:
    assert bits(read_trajectories(write(tmp_path, "verdict", lambda value: value))) == bits([trajectory()])
