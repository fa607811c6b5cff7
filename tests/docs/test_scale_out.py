"""docs/how-to/scale-out.md: its Python runs on a database, and its command lines exist."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from tests.postgres import Server
from tests.records import SETUP, make_chain
from tokentape.cli.app import app
from tokentape.store import open_record
from tokentape.types import SessionInfo

PAGE = (Path(__file__).parents[2] / "docs/how-to/scale-out.md").read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("$ tokentape ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ tokentape ")
]


def test_a_record_in_a_database_is_read_from_python(postgres: Server, capsys: pytest.CaptureFixture[str]) -> None:
    url = postgres.new_place()
    with open_record(url) as store:
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, *make_chain("s", 2)))
    (code,) = re.findall(r"<!-- executed by [\w/.]+ -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code.replace("postgresql://tokentape@db.internal/tokentape", url), {})
    assert capsys.readouterr().out == "s exact 16\n"
    postgres.drop(url)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_is_one(line: str, tmp_path: Path) -> None:
    name, *arguments = shlex.split(line.replace("/models/Qwen3-8B", str(tmp_path)))
    command = typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined]
    with command.make_context(name, arguments) as context:
        assert name == "doctor" or not context.args
