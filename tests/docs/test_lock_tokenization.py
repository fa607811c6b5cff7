"""The how-to's commands, script and snippets, run on the tiny model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokentape.audit._lock.lockfile import TEXTS
from tokentape.cli import app
from tokentape.errors import TokenizationChanged

pytestmark = pytest.mark.usefixtures("quick_models")

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "lock-tokenization.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"<!-- executed by [\w/.]+: (\w+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"tokentape (?:lock|check) .*", "".join(BLOCKS.values()))


@pytest.fixture
def model(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the tiny model where the page has it."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(model_dir, "path/to/model", ignore=shutil.ignore_patterns("*.safetensors")))


def run(command: str) -> int:
    return CliRunner().invoke(app, shlex.split(command.removeprefix("tokentape "))).exit_code


def test_the_commands_and_the_snippets_lock_and_check(model: Path) -> None:
    assert [run(command) for command in COMMANDS] == [0] * 4
    template = model / "chat_template.jinja"
    template.write_text(template.read_text("utf-8") + "x", encoding="utf-8")
    assert [run(command) for command in COMMANDS[1:]] == [1] * 3


def test_the_script_runs_until_the_tokenizer_changes(model: Path) -> None:
    pytest.importorskip("transformers")
    assert run(COMMANDS[0]) == 0
    exec(BLOCKS["python"], {})
    with pytest.raises(TokenizationChanged, match="'<new>' is new"):
        exec(BLOCKS["python"].replace("tokentape.check", "tokenizer.add_tokens(['<new>'])\ntokentape.check"), {})


def test_the_audit_fails_if_transformers_loads_another_tokenizer(model: Path) -> None:
    pytest.importorskip("transformers")
    (audit,) = re.findall(r"run: tokentape (audit .*)", BLOCKS["upgrade"])
    assert run(audit) == 0
    config = model / "tokenizer_config.json"
    loaded = json.loads(config.read_bytes()) | {"additional_special_tokens": ["<new>"]}
    config.write_text(json.dumps(loaded), encoding="utf-8")
    assert run(audit) == 1


def test_the_page_counts_the_inputs_right() -> None:
    assert f"{len(TEXTS)} texts" in PAGE
