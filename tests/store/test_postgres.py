"""Tests specific to PostgreSQL: several concurrent writers, lost connections, untrusted servers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, NullPool, create_engine, make_url, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from tests.postgres import Server
from tests.records import FROM_BEFORE, SETUP, bits, make_chain, make_turn
from tests.store.killed_migration import SINCE_4, check_kills
from tests.store.test_schema import with_migrations
from tokentape.errors import Conflict, InvalidRequest, StoreCorrupt, StoreError, StoreUnavailable
from tokentape.gateway._pausing import ALONE_SECONDS, BEAT_SECONDS
from tokentape.store import verify
from tokentape.store._gateways import change_gate, gate_state, leave
from tokentape.store._postgres import (
    PostgresStore,
    _claim,
    _url,
    _writing_engine,
    connect,
    explained,
    is_url,
    reading_engine,
    try_opening,
    without_password,
)
from tokentape.types import Reward, SessionInfo

run = asyncio.run
OURS = f"tokentape-test-{os.getpid()}"
"""Names of our connections, on a server that others may use."""
TURNS = make_chain("s", 3)


@pytest.fixture
def url(postgres: Server) -> Iterator[str]:
    made = postgres.new_place()
    yield make_url(made).update_query_dict({"application_name": OURS}).render_as_string(hide_password=False)
    postgres.drop(made)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with PostgresStore.open(url) as store:
        yield store


def disconnect(server: Server) -> None:
    """End all our connections, as a restarting server does."""
    server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{OURS}'")


# Several writers


def test_two_resumes_at_the_same_time_keep_the_versions_of_both_adapters(store: PostgresStore, url: str) -> None:
    run(store.transact(partial(change_gate, closed=False, weight_version="step-1")))
    server = create_engine(_url(url), poolclass=NullPool)
    with server.connect() as first, server.connect() as second:
        # Neither sees uncommitted changes of the other.
        change_gate(first, closed=False, weight_version="7", adapter="a")
        change_gate(second, closed=False, weight_version="9", adapter="b")
        second.commit()
        first.commit()
    with store.reading_once() as connection:
        state = gate_state(connection)
    assert (state.weight_version, state.adapter_versions) == ("step-1", {"a": "7", "b": "9"})


def test_only_one_of_two_writers_of_a_turn_succeeds(store: PostgresStore, url: str) -> None:
    run(store.write(SessionInfo("s", 1.0), SETUP, TURNS[0]))
    other = make_turn("s", 1, TURNS[0], engine="another")
    with PostgresStore.open(url) as second, ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(run, store.write(TURNS[1])), pool.submit(run, second.write(other))]
        failed = [outcome.exception() for outcome in outcomes]
    assert sorted(type(error) for error in failed if error is not None) == [Conflict]
    recorded = store.load_session("s").turns
    assert bits(recorded[1]) == bits(TURNS[1] if failed[0] is None else other)


def test_new_database_opened_twice_at_once_is_created_once(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        for opened in pool.map(lambda _: PostgresStore.open(url), range(4)):
            opened.close()
    with PostgresStore.open(url, read_only=True) as store:
        assert store.sessions() == []


def test_positions_grow_in_the_order_of_visibility(store: PostgresStore, url: str) -> None:
    """Otherwise a listing that continues from the last page misses a session."""
    done = threading.Event()

    def write(name: str, to: PostgresStore) -> None:
        for number in range(40):
            run(to.write(SessionInfo(f"{name}{number}", 1.0), Reward(f"{name}{number}", None, 1.0, 1.0)))

    with PostgresStore.open(url) as second, ThreadPoolExecutor(3) as pool:
        seen: list[str] = []

        def follow() -> None:
            after = 0
            while True:
                last = done.is_set()
                page = store.sessions(limit=7, after=after)
                seen.extend(session.info.session_id for session in page)
                if page:
                    after = page[-1].position
                elif last:
                    return

        following = pool.submit(follow)
        writing = [pool.submit(write, "a", store), pool.submit(write, "b", second)]
        for future in writing:
            future.result()
        done.set()
        following.result()
    assert sorted(seen) == sorted(f"{name}{number}" for name in "ab" for number in range(40))


# Connections


def test_cut_connection_is_reopened_silently(store: PostgresStore, postgres: Server) -> None:
    run(store.write(SessionInfo("s", 1.0), SETUP, TURNS[0]))
    disconnect(postgres)
    assert store.session_state("s", 0) is not None
    run(store.write(TURNS[1]))
    disconnect(postgres)
    state = store.session_state("s", 1)
    assert state is not None
    assert (state.turns, state.digest) == (2, TURNS[1].digest)
    disconnect(postgres)
    assert len(store.load_session("s").turns) == 2
    assert store.healthy


@pytest.mark.parametrize("committed", [False, True])
def test_commit_during_a_lost_connection_is_recorded_once(
    store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    run(store.write(SessionInfo("s", 1.0), SETUP, TURNS[0]))
    commit, lost = PGDialect_psycopg.do_commit, []

    def lose_first(self: Any, connection: Any) -> None:
        if lost:
            commit(self, connection)
            return
        lost.append(True)
        if committed:
            commit(self, connection)
        connection.dbapi_connection.close()
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(PGDialect_psycopg, "do_commit", lose_first)
    run(store.write(TURNS[1], Reward("s", 1, 1.0, 2.0)))
    assert lost
    stored = store.load_session("s")
    assert bits(stored.turns) == bits(TURNS[:2])
    assert len(stored.rewards) == 1
    assert verify(url).ok


def test_connection_that_became_read_only_is_replaced(store: PostgresStore) -> None:
    def become_read_only(connection: Connection) -> None:
        connection.exec_driver_sql("SET default_transaction_read_only = on")

    run(store.transact(become_read_only))
    run(store.write(SessionInfo("s", 1.0), SETUP, TURNS[0]))
    assert len(store.load_session("s").turns) == 1


def test_server_that_does_not_acknowledge_what_was_sent_is_given_up(store: PostgresStore) -> None:
    with store.reading() as connection:
        driver: Any = connection.connection.driver_connection
        assert driver.info.get_parameters()["tcp_user_timeout"] == "25000"


def test_unreachable_server_can_be_retried_later() -> None:
    with pytest.raises(StoreUnavailable) as raised:
        PostgresStore.open("postgresql://someone:secret@127.0.0.1:9/runs")
    assert raised.value.retry
    assert "127.0.0.1" in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("part", ["database", "username"])
def test_a_database_or_user_that_does_not_exist_is_named(url: str, part: str) -> None:
    wrong = make_url(url).set(**{part: "nosuchname", "password": "secret"}).render_as_string(hide_password=False)
    for opened in (
        lambda: PostgresStore.open(wrong, read_only=True),
        lambda: PostgresStore.open(wrong),
        lambda: verify(wrong),
    ):
        with pytest.raises(StoreUnavailable, match='"nosuchname" does not exist') as raised:
            opened()
        assert "secret" not in str(raised.value)


# Servers and schemas


def test_a_server_that_does_not_flush_is_refused(url: str) -> None:
    unsafe = make_url(url)
    options = f"{unsafe.query['options']} -csynchronous_commit=off"
    place = unsafe.update_query_dict({"options": options}).render_as_string(hide_password=False)
    with pytest.raises(StoreError, match="synchronous_commit off"):
        PostgresStore.open(place)
    PostgresStore.open(place, synchronous="NORMAL").close()


def test_an_empty_database_is_not_read(url: str) -> None:
    with pytest.raises(StoreCorrupt, match="empty"):
        PostgresStore.open(url, read_only=True)


def test_an_older_database_is_migrated_and_a_newer_one_refused(
    store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store.write(SessionInfo("s", 1.0), SETUP, *TURNS))
    with monkeypatch.context() as patched:
        with_migrations(patched, lambda connection: _add_note(connection))
        with pytest.raises(StoreError, match="run `tokentape serve` on the database once"):
            PostgresStore.open(url, read_only=True)
        with PostgresStore.open(url) as migrated:
            assert bits(migrated.load_session("s").turns) == bits(TURNS)
    with pytest.raises(StoreError, match="use the release that wrote it"):
        PostgresStore.open(url)


def _add_note(connection: Any) -> None:
    connection.execute(text("ALTER TABLE sessions ADD COLUMN note TEXT NOT NULL DEFAULT ''"))


def test_a_frozen_gateway_does_not_delay_the_heartbeats_of_others(store: PostgresStore, url: str) -> None:
    with connect(_writing_engine(_url(url), "FULL")) as frozen:
        frozen.begin()
        _claim(frozen, [None])
        began = time.monotonic()
        run(store.transact(partial(leave, gateway_id="g"), claims=frozenset()))
        assert time.monotonic() - began < ALONE_SECONDS - BEAT_SECONDS
        frozen.invalidate()


def test_the_log_has_the_reason_for_a_refused_connection(url: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = reading_engine(make_url(url).set(username="no-user").render_as_string(hide_password=False))
    with pytest.raises(StoreUnavailable), explained(), engine.connect():
        pass
    assert 'role "no-user" does not exist' in caplog.text


def test_trying_to_open_creates_no_tables(url: str) -> None:
    try_opening(url, "FULL")
    with pytest.raises(StoreCorrupt, match="empty"):
        PostgresStore.open(url, read_only=True)


def test_trying_to_open_migrates_nothing(store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        with_migrations(patched, _add_note)
        try_opening(url, "FULL")
    PostgresStore.open(url).close()


def test_failed_migration_leaves_the_database_unchanged(
    store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(connection: Any) -> None:
        raise StoreError("this migration fails")

    with monkeypatch.context() as patched:
        with_migrations(patched, _add_note, fail)
        with pytest.raises(StoreError, match="this migration fails"):
            PostgresStore.open(url)
    PostgresStore.open(url).close()


@pytest.mark.slow
def test_killed_migration_is_rolled_back_and_repeated_by_the_next_open(
    store: PostgresStore, postgres: Server, url: str
) -> None:
    run(store.write(SessionInfo("s", 1.0), SETUP, *make_chain("s", 3, **FROM_BEFORE)))
    store.close()
    name = str(make_url(url).query["options"]).partition("=")[2]
    for change in (
        f"DROP TABLE {name}.events",
        f"ALTER TABLE {name}.snapshot_sessions DROP COLUMN last_event",
        *(f"ALTER TABLE {name}.turns DROP COLUMN {column}" for column in SINCE_4),
        f"UPDATE {name}.meta SET value = '3' WHERE key = 'schema_version'",
    ):
        postgres.execute(change)
    check_kills(url)
    with PostgresStore.open(url) as migrated:
        run(migrated.write(make_turn("s", 3, migrated.load_session("s").turns[2])))
    assert verify(url).findings == ()


def test_foreign_tables_are_refused_and_left_alone(postgres: Server, url: str) -> None:
    schema = str(make_url(url).query["options"]).partition("=")[2]
    postgres.execute(f"CREATE TABLE {schema}.theirs (x int)")
    with pytest.raises(StoreCorrupt, match="no Tokentape tables"):
        PostgresStore.open(url)


def test_database_urls_are_recognized() -> None:
    assert is_url("postgresql://host/runs")
    assert is_url("postgres+psycopg://host/runs")
    assert not is_url("runs/postgresql")
    assert not is_url("s3://bucket/postgresql://")
    assert without_password("postgresql://me:secret@host/runs") == "postgresql://me:***@host/runs"
    with pytest.raises(InvalidRequest):
        PostgresStore.open("postgresql://host:notaport/runs")


def test_verify_finds_another_schema(url: str) -> None:
    with PostgresStore.open(url) as store:
        asyncio.run(store.write(SessionInfo("s", 1.0)))
    assert verify(url).findings == ()
    with psycopg.connect(url) as connection:
        for change in (
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.value = 0; RETURN NEW; END'",
            "CREATE TRIGGER t BEFORE INSERT ON rewards FOR EACH ROW EXECUTE FUNCTION nothing()",
            "CREATE RULE r AS ON INSERT TO events DO INSTEAD NOTHING",
            "DROP INDEX token_columns_of_turn",
            "ALTER TABLE gateways RENAME TO old",
            "CREATE VIEW gateways AS SELECT * FROM old",
        ):
            connection.execute(change)
    problems = "\n".join(map(str, verify(url).findings))
    for problem in ("trigger t", "rule r", "index token_columns_of_turn is missing", "table gateways is missing"):
        assert problem in problems
