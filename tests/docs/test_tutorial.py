"""The tutorial's code, run unchanged, except for ports and paths."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokentape
from tests.waiting import PATIENCE
from tokentape._session.arrow import write_parquet
from tokentape.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCKS = re.compile(r"<!-- executed by tests/docs/test_tutorial.py: ([\w.]+) -->\n```\w+\n(.*?)```", re.DOTALL)


def blocks() -> dict[str, str]:
    return dict(BLOCKS.findall(PAGE.read_text("utf-8")))


def run(code: str, gateway_url: str) -> str:
    """The output of a script, run as a user does: in its own Python process, in the folder with the other scripts."""
    code = code.replace("http://127.0.0.1:8800", gateway_url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(blocks()["shop.py"], encoding="utf-8")
    return tmp_path


def test_agent_runs_and_its_samples_pass_the_check(folder: Path, gateway_url: str, model_dir: Path) -> None:
    code = blocks()
    run(code["run.py"], gateway_url)  # Prints the sampled answer, which may be empty.
    printed = run(code["samples.py"], gateway_url)
    assert re.fullmatch(r"(exact|closed) [01]\.0 \d+ tokens, \d+ of them sampled\n", printed)
    with tokentape.Client(gateway_url) as client:
        write_parquet(client.session("first").trajectories(), folder / "rollouts.parquet")
    command = code["check"].removeprefix("$ tokentape ")
    command = command.replace("runs/serve", f"rollouts.parquet --model {model_dir}")
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_grpo_trains_and_records_its_rollouts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    assert "train_loss" in run(blocks()["grpo.py"], "")
    # As the page says: nothing but the record has to be named.
    measured = CliRunner().invoke(app, ["drift", "runs/grpo-record", "--rerender", "0"])
    assert measured.exit_code == 0, measured.output


def test_all_python_of_the_tutorial_is_executed() -> None:
    assert PAGE.read_text("utf-8").count("```python") == len([name for name in blocks() if name.endswith(".py")])
