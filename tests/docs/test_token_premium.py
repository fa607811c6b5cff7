"""The how-to's command, on two tokenizers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokentape.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "token-premium.md").read_text("utf-8")


def test_the_command_of_the_how_to_compares_two_tokenizers(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("path/to").mkdir(parents=True)
    for name in ("model", "other"):
        Path("path/to", name).symlink_to(model_dir)
    Path("corpus").mkdir()
    Path("corpus/en.txt").write_text("free and equal\n", encoding="utf-8")
    Path("corpus/de.txt").write_text("frei und gleich\n", encoding="utf-8")
    (command,) = re.findall(r"<!-- executed by [\w/.]+ -->\n```console\n\$ tokentape (.*?)\n```", PAGE)
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0
    assert done.stdout.count("premium") == 2
    assert "<svg" in Path("premium.html").read_text("utf-8")
