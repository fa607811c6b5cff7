"""`tokentape drift` on a record and on files, as a shell sees it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Record, Run
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.types import Provenance

USER = (Provenance.USER, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def ids(renderer: Renderer) -> list[int]:
    """Record They | co | st: it drifts."""
    encode = renderer.tokenizer.encode_plain
    return encode("They") + encode(" co") + encode("st")


def test_record_is_measured_with_its_served_tokenizer(run: Run, record: Record) -> None:
    result = run("drift", record([USER, (Provenance.SAMPLED, "They cost 12.<|im_end|>")]), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["completions"] == {
        "changed": 0,
        "total": 1,
        "low": None,
        "high": None,
        "clusters": 1,
        "share": 0.0,
    }
    assert {stratum["dimension"] for stratum in report["strata"]} == {
        "turn",
        "weights",
        "temperature",
        "script",
        "region",
    }


def test_a_different_tokenizer_than_the_served_one_is_named(run: Run, record: Record, tmp_path: Path) -> None:
    data = record([USER, (Provenance.SAMPLED, "They cost 12.<|im_end|>")])
    assert "different tokenizer.json" not in run("drift", data, "--tokenizer", MODEL).stderr
    other = shutil.copytree(MODEL, tmp_path / "other")
    with open(other / "tokenizer.json", "a") as file:
        file.write("\n")
    assert "was served with a different tokenizer.json" in run("drift", data, "--tokenizer", other).stderr


def test_without_drift_there_is_no_breakdown(run: Run, record: Record) -> None:
    output = run("drift", record([USER, (Provenance.SAMPLED, "They cost 12.<|im_end|>")])).stdout
    assert re.search(r"completions that drifted +0.000%, 0 of 1\b", output)
    assert "By turn" not in output


def test_example_shows_ids_of_both_sides(run: Run, tmp_path: Path, model_dir: Path, ids: list[int]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ids))
    output = run("drift", path, "--tokenizer", model_dir).stdout
    assert f"{ids[-2:]} -> [" in output


def test_a_foreign_file_is_measured_and_fails_above_a_rate(
    run: Run, tmp_path: Path, model_dir: Path, ids: list[int]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"out": ids, "step": 3}) + "\n")
    arguments = ["drift", path, "--tokenizer", model_dir, "--ids-column", "out", "--by", "step"]
    result = run(*arguments, "--fail-above", 0.5)
    assert result.exit_code == 1
    assert "drifted, limit 50.000%" in result.stderr
    for part in ("completions", "100.000%", "intra-word", "By step", '" co" "st" -> " cost"'):
        assert part in result.stdout
    assert run(*arguments, "--fail-above", 1).exit_code == 0


def test_the_report_is_written_as_a_page(run: Run, tmp_path: Path, model_dir: Path, ids: list[int]) -> None:
    path, page = tmp_path / "a.json", tmp_path / "drift.html"
    path.write_text(json.dumps(ids))
    assert run("drift", path, "--tokenizer", model_dir, "--html", page).exit_code == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_model_scores_the_other_ids(run: Run, tmp_path: Path, model_dir: Path, ids: list[int]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1], "completion_ids": ids}) + "\n")
    report = json.loads(run("drift", path, "--model", model_dir, "--json").stdout)
    assert report["logprobs"]["completions"] == 1
    assert report["logprobs"]["mean"] < 0  # the model was trained to prefer the whole word


def test_missing_tokenizer_error_contains_advice(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1]")
    result = run("drift", path)
    assert result.exit_code == 2
    assert "pass the model folder with --tokenizer" in result.stderr
    assert run("drift", path, "--fail-above", 2).exit_code == 2


def test_a_record_that_names_no_model_is_not_called_a_file(run: Run, tmp_path: Path) -> None:
    data = shutil.copytree(MODEL.parent / "recorded", tmp_path / "data")
    done = run("drift", data)
    assert done.exit_code == 2
    assert "the input names no model; pass the model folder with --tokenizer" in done.stderr


def test_options_for_columns_are_refused_for_a_record(run: Run, record: Record) -> None:
    done = run("drift", record([USER, (Provenance.SAMPLED, "They")]), "--by", "task")
    assert done.exit_code == 2
    assert "options for columns need a file" in done.stderr
