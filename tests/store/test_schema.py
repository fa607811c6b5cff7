from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect, text

from tests.records import FROM_BEFORE, SETUP, bits, make_chain, make_turn
from tests.store.killed_migration import check_kills
from tokentape.errors import StoreCorrupt, StoreError
from tokentape.store import SqliteStore, verify
from tokentape.store import _schema as schema
from tokentape.types import SessionInfo

TURNS = make_chain("s", 2)
RELEASED = schema.MIGRATIONS
NOW = schema.VERSION
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a data directory of the current version with a session."""
    with SqliteStore.open(tmp_path) as store:
        asyncio.run(store.write(SETUP, SessionInfo("s", 1.0), *TURNS))
    return tmp_path


def execute(directory: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(directory / "tokentape.db", isolation_level=None)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def add_note(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE sessions ADD COLUMN note TEXT NOT NULL DEFAULT ''"))


def fill_note(connection: Connection) -> None:
    connection.execute(text("UPDATE sessions SET note = 'from ' || session_id"))


def fail(connection: Connection) -> None:
    raise StoreError("this migration fails")


def version(directory: Path) -> object:
    return execute(directory, "SELECT value FROM meta WHERE key = 'schema_version'")[0][0]


def with_migrations(monkeypatch: pytest.MonkeyPatch, *migrations: schema.Migration) -> None:
    monkeypatch.setattr(schema, "MIGRATIONS", (*RELEASED, *migrations))


def test_a_new_database_has_the_current_version(directory: Path) -> None:
    assert version(directory) == str(NOW)


def test_an_older_database_is_migrated_step_by_step_with_its_records(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_migrations(monkeypatch, add_note)
    SqliteStore.open(directory).close()
    assert version(directory) == str(NOW + 1)
    with_migrations(monkeypatch, add_note, fill_note)
    with SqliteStore.open(directory) as store:
        assert bits(store.load_session("s").turns) == bits(TURNS)
    assert version(directory) == str(NOW + 2)
    assert execute(directory, "SELECT note FROM sessions") == [("from s",)]


def test_failed_migration_leaves_the_database_unchanged(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_migrations(monkeypatch, add_note, fail)
    with pytest.raises(StoreError, match="this migration fails"):
        SqliteStore.open(directory)
    assert version(directory) == str(NOW)
    with_migrations(monkeypatch)
    with SqliteStore.open(directory) as store:
        assert len(store.load_session("s").turns) == 2


@pytest.mark.parametrize("written", range(schema.OLDEST, NOW))
def test_database_of_every_earlier_version_migrates_and_verifies(written: int, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / f"schema-{written}.db", tmp_path / "tokentape.db")
    with SqliteStore.open(tmp_path) as store:
        plain, forked = store.load_session("plain"), store.load_session("forked")
        asyncio.run(store.write(make_turn("plain", 3, plain.turns[2])))
    assert bits(plain.turns) == bits(make_chain("plain", 3, **FROM_BEFORE))
    assert (plain.info.metadata, plain.info.owner, len(plain.rewards)) == ({"task": 7}, "", 2)
    # A turn's reward was then that of the trajectory that ended there.
    assert [(reward.turn, reward.leaf, reward.value) for reward in plain.rewards] == [
        (None, None, 0.5),
        (None, 1, -1.0),
    ]
    assert [turn.finish_reason for turn in forked.turns] == ["stop", "stop", "stop", "abort"]
    assert verify(tmp_path).findings == ()


def test_killed_migration_is_rolled_back_and_repeated_by_the_next_open(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "schema-3.db", tmp_path / "tokentape.db")
    check_kills(str(tmp_path))
    with SqliteStore.open(tmp_path) as store:
        asyncio.run(store.write(make_turn("plain", 3, store.load_session("plain").turns[2])))
    assert verify(tmp_path).findings == ()


@pytest.mark.parametrize("written", range(schema.OLDEST, NOW))
def test_a_migrated_database_has_the_tables_of_a_new_one(written: int, directory: Path, tmp_path: Path) -> None:
    def tables(of: Path) -> dict[object, list[tuple[object, ...]]]:
        names = execute(of, "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        # Name, type and whether it may be null; added columns stand last.
        return {name: sorted(row[1:4] for row in execute(of, f"PRAGMA table_info({name})")) for (name,) in names}

    older = tmp_path / "older"
    older.mkdir()
    shutil.copy(GOLDEN / f"schema-{written}.db", older / "tokentape.db")
    SqliteStore.open(older).close()
    assert tables(older) == tables(directory)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_database_is_refused_and_left_alone(directory: Path, read_only: bool) -> None:
    execute(directory, "UPDATE meta SET value = '99'")
    with pytest.raises(StoreError, match="schema version 99"):
        SqliteStore.open(directory, read_only=read_only)
    assert version(directory) == "99"


def test_a_database_of_a_development_version_is_refused_and_left_alone(directory: Path) -> None:
    execute(directory, "UPDATE meta SET value = '2'")
    with pytest.raises(StoreError, match="schema version 2, but this Tokentape knows 3 to 4"):
        SqliteStore.open(directory)
    assert version(directory) == "2"


def test_older_database_opened_read_only_is_unchanged(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_migrations(monkeypatch, add_note)
    with SqliteStore.open(directory, read_only=True) as store, store.reading() as connection:
        assert "note" in {column["name"] for column in inspect(connection).get_columns("sessions")}
    assert version(directory) == str(NOW)


@pytest.mark.parametrize("value", ["", "0", "one", "²"])
def test_version_that_is_not_a_number_is_damage(directory: Path, value: str) -> None:
    execute(directory, f"UPDATE meta SET value = '{value}'")
    with pytest.raises(StoreCorrupt):
        SqliteStore.open(directory)


def test_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    execute(tmp_path, "CREATE TABLE theirs (x)")
    with pytest.raises(StoreCorrupt, match="no Tokentape tables"):
        SqliteStore.open(tmp_path)
    assert execute(tmp_path, "SELECT name FROM sqlite_master") == [("theirs",)]
