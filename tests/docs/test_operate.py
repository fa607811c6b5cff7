"""The commands of docs/how-to/operate.md do what the page says, in its order."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest
from sqlalchemy import Connection, make_url, text

from tests.cli.conftest import Run
from tests.cli.conftest import run as run
from tests.postgres import Server, binary
from tests.records import SETUP, make_chain
from tokentape.config import read_keys
from tokentape.gateway._keys import Caller, Keys
from tokentape.store import SqliteStore, open_record
from tokentape.store import _schema as schema
from tokentape.types import Reward, SessionInfo

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/operate.md").read_text(encoding="utf-8")
BLOCKS = re.compile(r"<!-- executed by tests/docs/test_operate.py: (\w+) -->\n( *```console\n.*?)```", re.DOTALL)


@pytest.fixture
def execute(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Executes a block of the page in its own folder; the output begins as the page shows."""
    monkeypatch.chdir(tmp_path)

    def execute(name: str, change: Callable[[str], str] = lambda text: text) -> None:
        (block,) = [dedent(found) for block, found in BLOCKS.findall(PAGE) if block == name]
        for command, shown in re.findall(r"^\$ (.*)\n((?:[^$\n].*\n)*)", block, re.MULTILINE):
            program, *arguments = shlex.split(change(command))
            if program != "tokentape":
                subprocess.run([binary(program) or program, *arguments], check=True, capture_output=True)
                continue
            done = run(*arguments)
            assert done.output.startswith(shown), (command, done.output)
            assert shown or "findings 0" in done.output, (command, done.output)

    return execute


def records(name: str, user: str) -> list[object]:
    return [SessionInfo(name, 1.0, {"user": user}), SETUP, *make_chain(name, 2), Reward(name, None, 1.0, 1.0)]


def fill(store: object) -> None:
    for name, user in (("task-1", "u-17"), ("task-2", "u-18")):
        asyncio.run(store.write(*records(name, user)))  # type: ignore[attr-defined]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[SqliteStore]:
    """A record that a process has open for writing; its newest turns are in the log only."""
    with SqliteStore.open(tmp_path / "data") as store:
        fill(store)
        (tmp_path / "data/model.json").write_text("{}")
        yield store


def add_note(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE sessions ADD COLUMN note TEXT NOT NULL DEFAULT ''"))


def schema_version(directory: Path) -> int | None:
    with closing(sqlite3.connect(directory / "tokentape.db")) as connection:
        return int(connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0])


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs sqlite3")
def test_upgrade_and_roll_back(
    execute: Callable[..., None], run: Run, live: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    live.close()
    execute("before")
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, add_note))
        SqliteStore.open(data).close()
        assert (schema_version(data), schema_version(backup)) == (schema.VERSION + 1, schema.VERSION)
        execute("after")
    assert run("verify", backup, "--against", "before.json").exit_code == 0


def test_an_older_release_refuses_the_record_and_changes_nothing(
    execute: Callable[..., None], live: SqliteStore, tmp_path: Path
) -> None:
    live.close()
    with closing(sqlite3.connect(tmp_path / "data/tokentape.db")) as connection, connection:
        newer = str(schema.VERSION + 1)
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", [newer])
    before = (tmp_path / "data/tokentape.db").read_bytes()
    execute("refused")
    assert (tmp_path / "data/tokentape.db").read_bytes() == before


def test_sessions_of_a_user_are_deleted(
    execute: Callable[..., None], run: Run, live: SqliteStore, tmp_path: Path
) -> None:
    live.close()
    assert run("verify", tmp_path / "data", "--head-out", tmp_path / "before.json").exit_code == 0
    execute("erase")
    execute("head")
    assert run("verify", tmp_path / "data", "--against", tmp_path / "after.json").exit_code == 0


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs sqlite3")
def test_a_backup_of_a_live_record_is_restored(execute: Callable[..., None], live: SqliteStore, tmp_path: Path) -> None:
    execute("restore")
    with SqliteStore.open(tmp_path / "restored") as restored:
        assert restored.load_session("task-2").turns[-1].digest == live.load_session("task-2").turns[-1].digest
        asyncio.run(restored.write(*records("task-3", "u-19")))


def test_a_backup_of_postgresql_is_restored(execute: Callable[..., None], postgres: Server) -> None:
    if binary("pg_dump") is None:
        pytest.skip("needs PostgreSQL's programs")
    url = make_url(postgres.url)
    names = {name: f"tokentape_test_{name}" for name in ("production", "restored")}

    def change(command: str) -> str:
        command = re.sub(r"\b(production|restored)\b", lambda found: names[found[0]], command)
        return re.sub(
            r"postgresql://tokentape@/(\w+)",
            lambda found: url.set(database=found[1]).render_as_string(hide_password=False),
            command,
        )

    try:
        postgres.execute(f"CREATE DATABASE {names['production']}")
        with open_record(change("postgresql://tokentape@/production")) as store:
            fill(store)
        execute("postgres", change)
        with open_record(change("postgresql://tokentape@/restored")) as restored:
            # Numbers that the database gives go on after the restored ones.
            asyncio.run(restored.write(*records("task-3", "u-19")))
            assert list(restored.session_ids()) == ["task-1", "task-2", "task-3"]
    finally:
        for name in names.values():
            postgres.execute(f"DROP DATABASE IF EXISTS {name}")


def test_two_keys_of_a_name_are_valid(tmp_path: Path) -> None:
    (shown,) = re.findall(r"<!-- read by tests/docs/test_operate.py -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "keys"
    file.write_text(shown, encoding="utf-8")
    keys = Keys(read_keys(file))
    for key in shown.strip().partition("=")[2].split():
        assert keys.caller({"x-api-key": key}) == Caller("alice")
