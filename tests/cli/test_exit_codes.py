"""Each command that counts something has a separate exit code for nothing to measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokentape.cli.output import NOTHING_MEASURED
from tokentape.store import SqliteStore


@pytest.fixture
def empty(tmp_path: Path, model_dir: Path) -> dict[str, Path]:
    """Write a record without sessions, files without rows, lines or sentences, and a model folder."""
    SqliteStore.open(tmp_path / "record").close()
    rows, text = tmp_path / "rows.jsonl", tmp_path / "de.txt"
    rows.touch()
    text.write_text("\n \n")
    row = {"session_id": "s", "leaf": 0, "trainer_logprobs": [0.0]}
    (tmp_path / "batch.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "out.jsonl"
    return {"record": tmp_path / "record", "rows": rows, "text": text, "model": model_dir, "out": out} | {
        "batch": tmp_path / "batch.jsonl"
    }


@pytest.mark.parametrize(
    "line",
    [
        "audit {model} {model} --corpus {rows}",
        "check-logprobs {rows} --batch {batch}",
        "check-logprobs {record} --model {model}",
        "compare {rows} {rows} --tokenizer {model}",
        "drift {rows} --tokenizer {model}",
        "drift {rows} --tokenizer {model} --fail-above 0.5",
        "drift {record} --tokenizer {model}",
        "export {record} -o {out}",
        "premium {model} --corpus {text}",
        "probe {model} --texts {text}",
        "score {record} --model {model}",
        "score {record} --model {model} --teacher",
        "verify {record}",
        "verify {record} --json",
    ],
)
def test_nothing_to_measure_is_exit_code_3(run: Run, empty: dict[str, Path], line: str) -> None:
    done = run(*line.format(**empty).split())
    assert done.exit_code == NOTHING_MEASURED, done.output
    assert "no" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "check-logprobs {rows} --batch {batch} --max-mean nan",
        "compare {rows} {rows} --tokenizer {model} --max-delta nan",
        "drift {rows} --tokenizer {model} --fail-above nan",
    ],
)
def test_limit_that_no_value_can_exceed_is_exit_code_2(run: Run, empty: dict[str, Path], line: str) -> None:
    done = run(*line.format(**empty).split())
    assert (done.exit_code, "nan is not a number" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "command", ["audit", "check", "check-logprobs", "compare", "drift", "export", "premium", "probe", "score", "verify"]
)
def test_help_of_the_command_names_exit_code_3(run: Run, command: str) -> None:
    assert " 3 if " in " ".join(run(command, "--help").stdout.split())
