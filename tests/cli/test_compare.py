"""`tokentape compare` on records and files, as a shell sees it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Record, Run
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.types import Provenance

USER = (Provenance.USER, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def data(record: Record) -> Path:
    return record([USER, (Provenance.SAMPLED, "They cost 12.<|im_end|>")])


@pytest.fixture
def exported(run: Run, data: Path, tmp_path: Path) -> Path:
    """Write the record as a file with a retokenized word in the answer."""
    path = tmp_path / "b.jsonl"
    assert run("export", data, "-o", path).exit_code == 0
    return path


def changed(renderer: Renderer, path: Path, old: str, *new: str) -> None:
    """Replace a text's ids with pieces, in a file with unknown columns."""
    row = json.loads(path.read_text())
    encode = renderer.tokenizer.encode_plain
    ids, gone = row["token_ids"], encode(old)
    at = next(n for n in range(len(ids)) if ids[n : n + len(gone)] == gone)
    ids[at : at + len(gone)] = [token_id for piece in new for token_id in encode(piece)]
    path.write_text(json.dumps({"session_id": "s:0", "token_ids": ids}) + "\n")


def test_record_equals_its_export(run: Run, data: Path, exported: Path) -> None:
    result = run("compare", data, exported)
    assert (result.exit_code, result.stdout) == (0, "0 of 1 rows differ\n")


@pytest.mark.parametrize(("column", "message"), [("loss_mask", "mask: 1 of"), ("logprobs", "logprobs: 1 of")])
def test_changed_mask_and_changed_logprob_are_reported(
    run: Run, data: Path, exported: Path, column: str, message: str
) -> None:
    row = json.loads(exported.read_text())
    at = row["loss_mask"].index(True) + 1
    row[column][at] = False if column == "loss_mask" else -1.5
    exported.write_text(json.dumps(row) + "\n")
    result = run("compare", data, exported, "--fail-on", "error")
    assert result.exit_code == 1
    assert message in result.stdout


def test_logprob_missing_on_a_side_is_not_reported_as_difference_0(run: Run, data: Path, exported: Path) -> None:
    row = json.loads(exported.read_text())
    row["logprobs"][row["loss_mask"].index(True)] = None
    exported.write_text(json.dumps(row) + "\n")
    result = run("compare", data, exported)
    assert result.exit_code == 1
    assert "tokens differ, where one side has no number, first at" in result.stdout


def test_retokenized_word_is_reported(run: Run, data: Path, exported: Path, renderer: Renderer) -> None:
    changed(renderer, exported, " cost", " co", "st")
    result = run("compare", data, exported)
    assert result.exit_code == 1
    assert "s:0: 1 difference, 1 of them errors (ids 1)" in result.stdout
    assert 'sampled: " cost"' in result.stdout


def test_different_ids_of_user_text_are_a_warning(run: Run, data: Path, exported: Path, renderer: Renderer) -> None:
    changed(renderer, exported, "user", "us", "er")
    for least, code in (("warning", 1), ("error", 0)):
        result = run("compare", data, exported, "--fail-on", least, "--format", "junit")
        assert (result.exit_code, ElementTree.fromstring(result.stdout).get("failures")) == (code, str(code))


@pytest.mark.parametrize("form", ["json", "junit", "sarif", "github"])
def test_every_format_reports_the_difference(
    run: Run, data: Path, exported: Path, renderer: Renderer, form: str
) -> None:
    changed(renderer, exported, " cost", " co", "st")
    result = run("compare", data, exported, "--format", form)
    assert result.exit_code == 1
    match form:
        case "json":
            (row,) = json.loads(result.stdout)["comparisons"]
            assert [difference["kind"] for difference in row["comparison"]["differences"]] == ["ids"]
        case "junit":
            assert ElementTree.fromstring(result.stdout).get("failures") == "1"
        case "sarif":
            assert json.loads(result.stdout)["runs"][0]["results"][0]["ruleId"] == "ids"
        case _:
            assert result.stdout.startswith("::error file=")


def test_single_session_is_compared_with_a_file(run: Run, data: Path, exported: Path, tmp_path: Path) -> None:
    ids = json.loads(exported.read_text())["token_ids"]
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(ids[:-1]))
    result = run("compare", f"{data}#s", path)
    assert (result.exit_code, "cut" in result.stdout) == (1, True)
    assert run("compare", f"{data}#s:0", path).exit_code == 1
    assert "has no row" in run("compare", data, f"{exported}#t").stderr


def test_missing_path_is_a_usage_error(run: Run, data: Path) -> None:
    assert run("compare", data, "nowhere").exit_code == 2


def test_json_is_a_format(run: Run, data: Path, exported: Path) -> None:
    assert run("compare", data, exported, "--json").stdout == run("compare", data, exported, "--format", "json").stdout


def test_branches_match_by_session_and_leaf(run: Run, data: Path, exported: Path, tmp_path: Path) -> None:
    row = json.loads(exported.read_text())
    branches = [row | {"leaf": leaf, "token_ids": [*row["token_ids"][:-1], leaf]} for leaf in (1, 3)]
    keys = ("session_id", "leaf", "token_ids")
    sides = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for side, order in zip(sides, (branches, branches[::-1]), strict=True):
        side.write_text("".join(json.dumps({key: branch[key] for key in keys}) + "\n" for branch in order))
    model = "--tokenizer", MODEL
    result = run("compare", *sides, *model)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "0 of 2 rows differ")
    result = run("compare", *(f"{side}#s:3" for side in sides), *model)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "0 of 1 rows differ")


def test_logprobs_of_another_length_are_refused(run: Run, data: Path, exported: Path, tmp_path: Path) -> None:
    row = json.loads(exported.read_text())
    batch = {"session_id": "s", "token_ids": row["token_ids"], "trainer_logprobs": row["logprobs"][1:]}
    (tmp_path / "c.jsonl").write_text(json.dumps(batch) + "\n")
    result = run("compare", data, tmp_path / "c.jsonl")
    assert result.exit_code == 2
    tokens = len(row["token_ids"])
    assert f"c.jsonl line 1: trainer_logprobs: {tokens - 1} values for {tokens} ids; expected one" in result.stderr


def test_options_for_columns_are_refused_for_two_records(run: Run, data: Path) -> None:
    done = run("compare", data, data, "--mask-column", "loss")
    assert done.exit_code == 2
    assert "options for columns need a file" in done.stderr
