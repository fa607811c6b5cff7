"""The guide to heads: its commands run as written, and find what the page shows."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import run as run
from tests.records import SETUP, make_chain
from tokentape.store import SqliteStore
from tokentape.types import Reward, SessionInfo

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "detect-tampering.md"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_commands_of_the_how_to_find_what_was_changed(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    with SqliteStore.open(Path("runs/serve")) as store:
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, *make_chain("s", 2), Reward("s", None, 1.0, 1.0)))
    commands = re.findall(r"^\$ (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        name, *arguments = shlex.split(command)
        if name == "tokentape":
            done = run(*arguments)
            assert (done.exit_code, "findings 0" in done.output) == (0, True), done.output
        else:
            subprocess.run([name, *arguments], check=True)
    with closing(sqlite3.connect("runs/serve/tokentape.db")) as connection, connection:
        connection.execute("UPDATE rewards SET value = 0")
    assert run("verify", "runs/serve").exit_code == 0
    done = run(*shlex.split(commands[-1])[1:])
    assert done.exit_code == 1
    first, *_, compared, added = done.output.splitlines()
    assert first == "session s: reward of the session was changed since the head"
    assert compared.endswith("its signature is valid")
    assert added == "added since: nothing"
