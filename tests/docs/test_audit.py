"""The how-to's commands and code, on a training folder with the three faults that it tells of."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.audit.skew.cases import CASES, TINY, healthy
from tests.audit.skew.fake_server import serving
from tokentape.cli.app import app
from tokentape.demo import MODEL

pytestmark = pytest.mark.usefixtures("quick_models")

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "audit.md").read_text("utf-8")


def blocks(name: str) -> list[str]:
    return re.findall(rf"<!-- executed by tests/docs/test_audit.py: {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    train = tmp_path / "path" / "to" / "train"
    shutil.copytree(MODEL, train)
    shutil.copytree(MODEL, train.parent / "serve")
    spec: dict[str, Any] = json.loads((train / "tokenizer.json").read_bytes())
    spec["normalizer"] = None
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] == "<tool_call>"
    (train / "tokenizer.json").write_text(json.dumps(spec))
    template = (train / "chat_template.jinja").read_text()
    (train / "chat_template.jinja").write_text(template.replace("'\\n</tool_response>'", "'</tool_response>'"))
    monkeypatch.chdir(tmp_path)
    return train


def test_the_command_finds_what_the_page_shows(folders: Path) -> None:
    (block,) = blocks("shell")
    _, *arguments = shlex.split(block.strip().removeprefix("$ "))
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert done.exit_code == 1
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    for line in shown[1].splitlines():
        if "..." not in line and line:
            assert line.rstrip() in [printed.rstrip() for printed in done.stdout.splitlines()], line


def test_the_python_example_runs(folders: Path) -> None:
    (block,) = blocks("python")
    exec(block, {})


def test_the_command_against_a_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks("server")
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "train").symlink_to(MODEL)
    monkeypatch.chdir(tmp_path)
    with serving("vllm", healthy(TINY), on_socket=True) as url:
        line = block.strip().removeprefix("$ ").replace("http://127.0.0.1:8000", url)
        done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "audit.html").is_file()


def test_table_lists_whether_each_known_bug_is_reproduced() -> None:
    rows = {int(n): rebuilt for n, rebuilt in re.findall(r"^\| (\d+) \|[^|]*\| (yes|no)", PAGE, re.MULTILINE)}
    assert sorted(rows) == list(range(1, 39))
    elsewhere = {7, 8, 14, 19, 25}  # built in test_backends, test_servers, test_causes and test_unknown_sides
    compared = {37, 38}  # built in tokendiff/test_comparing
    assert {n for n, rebuilt in rows.items() if rebuilt == "yes"} == {case.row for case in CASES} | elsewhere | compared
