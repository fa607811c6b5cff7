"""The how-to's commands, run on what an agent recorded with the tiny model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokentape
from tests.docs.sample_output import assert_same_lines
from tests.test_client import talk
from tokentape._session.arrow import write_parquet
from tokentape.chat._renderer import Renderer
from tokentape.cli import app
from tokentape.store._served_model import ServedModel, write_served_model

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "check-logprobs.md"


def test_the_commands_of_the_how_to_find_the_tiny_model_right(
    gateway_url: str, model_dir: Path, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text("utf-8")
    blocks = dict(re.findall(r"<!-- executed by [\w/.]+: (\w+) -->\n```\w+\n(.*?)```", text, re.DOTALL))
    with tokentape.Client(gateway_url) as client:
        session = client.session("s")
        talk(session.base_url)
        (trajectory,) = session.trajectories()
    write_parquet([trajectory], "rollouts.parquet")
    names = {"ids": trajectory.token_ids.tolist(), "logprobs": trajectory.logprobs.tolist()}
    exec(blocks["batch"], names)
    Path("batch.jsonl").write_text(json.dumps(names["row"]), encoding="utf-8")
    write_served_model("data", ServedModel(str(model_dir), renderer.tokenizer.sha256, renderer.fingerprint))
    for name in ("model", "served", "trainer", "rerender"):
        command = (
            blocks[name]
            .removeprefix("$ tokentape ")
            .replace("path/to/model", str(model_dir))
            .replace("path/to/data", str(tmp_path / "data"))
        )
        done = CliRunner().invoke(app, shlex.split(command))
        expected = (
            f"model: {model_dir}, the one that {tmp_path / 'data'} was last recorded with\n" if name == "served" else ""
        )
        assert (done.exit_code, done.stderr) == (0, expected)
        if name == "model":
            (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
            assert_same_lines(shown, done.stdout)
