"""`samples.schema.json`, compared with written files, the fields of `Sample`, and the page that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest

from tests.json_schemas import validate
from tokentape._session.arrow import trajectory_schema
from tokentape.testing.golden import GOLDEN, GoldenSession
from tokentape.testing.samples import golden_samples
from tokentape.training._collate import with_column
from tokentape.training._samples import Sample, write_samples

SCHEMA = json.loads((package_files("tokentape.training") / "samples.schema.json").read_text())
PROPERTIES = SCHEMA["properties"]
SESSIONS = [session for golden in GOLDEN for session in golden.sessions]


def lines(session: GoldenSession, folder: Path) -> list[dict[str, Any]]:
    samples = [with_column(sample, "advantages", 0.5) for sample in golden_samples(session.trajectories())]
    write_samples(samples, folder / "samples.jsonl")
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def line(tmp_path: Path) -> dict[str, Any]:
    return lines(GOLDEN[1].sessions[0], tmp_path)[1]


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["title"] == "tokentape.samples/1"


def test_written_lines_match_the_schema(tmp_path: Path) -> None:
    for session in SESSIONS:
        for line in lines(session, tmp_path):
            validate(line, SCHEMA)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.pop("loss_mask"),
        lambda line: line.update(loss_mask=[0, 1]),
        lambda line: line.update(token_ids=["a"]),
        lambda line: line.update(samples_version=2),
        lambda line: line.update(mask=[True]),
        lambda line: line["weight_spans"][0].pop("version"),
        lambda line: line.update(finish_reasons=["eos"]),
        lambda line: line["sampled_from"][0].pop("temperature"),
        lambda line: line["logprobs_of"][0].update(top_p=0.9),
    ],
)
def test_lines_that_break_the_schema_are_refused(line: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> None:
    validate(line, SCHEMA)
    change(line)
    with pytest.raises(jsonschema.ValidationError):
        validate(line, SCHEMA)


def test_schema_names_every_field_of_a_sample() -> None:
    versions = {"schema_version", "samples_version"}
    assert {field.name for field in fields(Sample)} - {"columns", "payloads"} == {*PROPERTIES} - versions


def test_schema_dtypes_match_parquet() -> None:
    for column in trajectory_schema():
        kind = column.type.value_type if pa.types.is_list(column.type) else column.type
        named = {"double": "float64", "float": "float32", "bool": "bool"}.get(str(kind), str(kind).split("<")[0])
        expected = PROPERTIES[column.name]["x-dtype"]
        assert ("object" if column.name == "metadata" else named) == expected, column.name


def test_array_lengths_match_the_schema(tmp_path: Path) -> None:
    for session in SESSIONS:
        for line in lines(session, tmp_path):
            for name, about in PROPERTIES.items():
                if about.get("x-length") in ("tokens", "turns") and name in line:
                    assert len(line[name]) == len(line["token_ids" if about["x-length"] == "tokens" else "turns"]), name


def test_siblings_train_each_sampled_token_once(tmp_path: Path) -> None:
    for session in SESSIONS:
        made = lines(session, tmp_path)
        assert sum(sum(sample["loss_mask"]) for sample in made) == len(session.tokens())
        assert all(
            code == 1
            for sample in made
            for code, on in zip(sample["provenance"], sample["loss_mask"], strict=True)
            if on
        )
