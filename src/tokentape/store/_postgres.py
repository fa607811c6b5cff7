"""Keep the durable record in PostgreSQL, where any number of gateways can write to one database at the same time.

To avoid deadlocks, each transaction first takes advisory locks on what it changes, always in the same order: one lock
per session, or a lock on all sessions to number them or to take a consistent snapshot. A session's records are
therefore totally ordered, as with SQLite's single writer: positions grow in the order in which they become visible,
and each turn number is used once. Reads take no lock.

`psycopg` (extra `postgres`) is imported on first use.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, Self, TypeAlias

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url, select
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import ArgumentError, DBAPIError

from tokentape.errors import Conflict, InvalidRequest, NotFound, StoreError, StoreFull, StoreUnavailable
from tokentape.store import _schema as schema
from tokentape.store._base import Store
from tokentape.store._commit import Claims, CommitQueue, StoreFailure, explaining
from tokentape.store._reads import SessionProgress
from tokentape.store._served_model import ServedModel

Durability: TypeAlias = Literal["FULL", "NORMAL"]

RECORD_LOCK = 0x746F6B656E746170
"""The advisory lock for the whole record, `tokentap` in ASCII. Transactions that change sessions share it."""

LOCK_SECONDS = 30
"""How long to wait for other writers' locks."""

_IDLE_SECONDS = 5
"""How long an idle transaction may keep its locks. A gateway that is frozen in a transaction blocks all others so long,
and their heartbeats are late after 8 s."""

_SERVED_MODEL = "served_model"
_log = logging.getLogger(__name__)
_IS_POSTGRES = ("postgresql", "postgres")


def is_url(location: str) -> bool:
    """Return whether `location` is the URL of a PostgreSQL database."""
    return location.partition("://")[0].partition("+")[0] in _IS_POSTGRES and "://" in location


def without_password(location: str) -> str:
    url = _parsed(location).difference_update_query(["password", "passfile", "sslpassword"])
    return url.render_as_string(hide_password=True)


class PostgresStore(Store):
    """The record in a PostgreSQL database. Create one with `open`.

    The URL can contain `host`, `port`, `user`, `dbname` and so on. libpq's `PG*` variables supply missing parts. The
    tables are in the connection's `search_path`.

        store = PostgresStore.open("postgresql://tokentape@db.internal/runs")
        await store.write(SessionInfo("s1", time.time()), setup, seal(turn, None))
    """

    @classmethod
    def open(cls, url: str, *, synchronous: Durability = "FULL", read_only: bool = False) -> Self:
        """Open the database. Create its tables if it is empty, and migrate tables from older versions.

        `synchronous="NORMAL"` does not wait for the server's disk, so a server crash can lose the last records. With
        `read_only`, nothing is created or migrated.

        Raises `StoreUnavailable` if the server can't be reached, `InvalidRequest` if the URL is invalid or `psycopg` is
        missing, `StoreCorrupt` if the tables are not Tokentape's, and `StoreError` if their version is newer, the user
        lacks rights, or a setting of the server (`fsync`) makes commits unsafe.
        """
        address = _url(url)
        with ExitStack() as undo:
            commits = None
            if not read_only:
                writer = _writing_engine(address, synchronous)
                connection = undo.enter_context(connect(writer))
                with explained(), connection.begin():
                    _prepare(connection, synchronous)
                commits = CommitQueue(connection, explain, lambda _: None, claim=_claim)
                undo.callback(commits.close)
            readers = reading_engine(address)
            # For single statements, without the round trips of a transaction and of a connection check.
            once = _engine(address, "AUTOCOMMIT", max_overflow=20)
            undo.callback(readers.dispose)
            undo.callback(once.dispose)
            with connect(readers) as reading, explained(), reading.begin():
                schema.check(reading)
            release = undo.pop_all()
        store = cls(readers, commits, release, explain, shared=True)
        store._once = once
        return store

    def session_state(self, session_id: str, newest: int) -> SessionProgress | None:
        try:
            return super().session_state(session_id, newest)
        except StoreUnavailable:
            # After a closed connection, all idle connections are discarded, so the next connection is new.
            return super().session_state(session_id, newest)

    def served_model(self) -> ServedModel | None:
        with self.reading_once() as connection:
            value = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == _SERVED_MODEL)).scalar()
        return None if value is None else ServedModel(**json.loads(value))

    async def note_served_model(self, model: ServedModel) -> None:
        value = json.dumps(asdict(model))

        def note(connection: Connection) -> None:
            connection.execute(schema.meta.delete().where(schema.meta.c.key == _SERVED_MODEL))
            connection.execute(schema.meta.insert().values(key=_SERVED_MODEL, value=value))

        await self.transact(note, again=note)


def try_opening(url: str, synchronous: Durability) -> None:
    """Open the database as `PostgresStore.open` does, then undo its changes. Raises like it."""
    with connect(_writing_engine(_url(url), synchronous)) as connection, explained():
        # Closing the connection rolls the transaction back.
        connection.begin()
        _prepare(connection, synchronous)


def _prepare(connection: Connection, synchronous: Durability) -> None:
    _refuse_unsafe(connection, synchronous)
    _claim(connection, [None])
    schema.prepare(connection)


def explain(error: DBAPIError) -> StoreFailure:
    """Convert a PostgreSQL error (https://www.postgresql.org/docs/current/errcodes-appendix.html) to a failure.

    No failure is fatal: if a flush fails, the server restarts and recovers from its disk.
    """
    state: str = getattr(error.orig, "sqlstate", None) or ""
    if failure := _FAILURES.get(state):
        return failure
    if error.connection_invalidated or state[:2] in ("08", "57") or not state:
        # Only for the log: libpq's reason has the server's address, but never a password.
        _log.warning("the database server can't be used: %s", _reason(error))
        what = "the database server can't be reached or has closed the connection; try again"
        return StoreFailure(StoreUnavailable, what, lost=True)
    return StoreFailure(StoreError, f"the database refused the operation (SQLSTATE {state})")


_FAILURES = {
    "23505": StoreFailure(Conflict, "this is already recorded"),
    "23503": StoreFailure(NotFound, "this refers to a session, turn or setup that is not recorded"),
    "53100": StoreFailure(
        StoreFull, "the database server's disk is full; nothing was recorded; free up space and try again"
    ),
    "55P03": StoreFailure(
        StoreUnavailable, f"another gateway has been writing for {LOCK_SECONDS} s; nothing was recorded; try again"
    ),
    "42501": StoreFailure(StoreError, "the database refuses this user (SQLSTATE 42501)"),
    # After a failover the connection may be to the old primary; a new connection leads to the new one.
    "25006": StoreFailure(
        StoreUnavailable, "the database is read-only (SQLSTATE 25006); nothing was recorded; try again", lost=True
    ),
}

explained = partial(explaining, explain)


def connect(engine: Engine) -> Connection:
    """Return a connection. Raises `StoreUnavailable` with libpq's reason, which never quotes a password."""
    try:
        return engine.connect()
    except DBAPIError as error:
        # The error has no SQLSTATE, so `explain` can't tell a wrong password from a server that is down.
        raise StoreUnavailable(f"the database can't be opened: {_reason(error)}") from None


def _reason(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]


def reading_engine(url: str | URL) -> Engine:
    """Return an engine for read-only transactions that each see one state of the database."""
    url = _url(url) if isinstance(url, str) else url
    # Ping connections to detect a restarted server before a request fails.
    engine = _engine(url, "REPEATABLE READ", max_overflow=20, pool_pre_ping=True)
    return engine.execution_options(postgresql_readonly=True)


def _writing_engine(url: URL, synchronous: Durability) -> Engine:
    engine = _engine(url, "READ COMMITTED", poolclass=NullPool)
    # Set per transaction, because the connection may come from a pooler. All settings take one round trip.
    begin = (
        f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'; "
        f"SET LOCAL idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s'; "
        + ("SET LOCAL synchronous_commit = off" if synchronous == "NORMAL" else "")
    )
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _engine(url: URL, isolation_level: IsolationLevel, **options: Any) -> Engine:
    return create_engine(
        url, isolation_level=isolation_level, hide_parameters=True, connect_args=_CONNECTION, **options
    )


def _claim(connection: Connection, claims: Sequence[Claims]) -> None:
    names: set[str] = set()
    for claim in claims:
        if claim is None:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({RECORD_LOCK})")
            return
        names |= claim
    # Two names share a number, and so a lock, with probability 2^-63.
    hashes = [hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest() for name in names]
    keys = sorted(int.from_bytes(digest[:8], "big", signed=True) for digest in hashes)
    locks = [f"pg_advisory_xact_lock_shared({RECORD_LOCK})", *(f"pg_advisory_xact_lock({key})" for key in keys)]
    # One statement per lock, because within a statement the server chooses the order.
    connection.exec_driver_sql("; ".join(f"SELECT {lock}" for lock in locks))


_CONNECTION = {
    "connect_timeout": 10,
    # Give up on a server that does not respond after about 25 s. Keepalives detect that only if nothing was sent.
    "tcp_user_timeout": 25_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}


def _refuse_unsafe(connection: Connection, synchronous: Durability) -> None:
    """Raise `StoreError` if, with the server's settings, a power cut could lose acknowledged turns."""
    if synchronous == "NORMAL":
        return
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        if connection.exec_driver_sql(f"SHOW {setting}").scalar_one() == "off":
            raise StoreError(
                f"the database server has {setting} off: acknowledged turns can be lost; set it to on, or accept that "
                "with synchronous = normal"
            )


def _url(location: str) -> URL:
    """Return the URL for SQLAlchemy. Raises `InvalidRequest` if it is invalid or `psycopg` is missing."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise InvalidRequest("a PostgreSQL store needs psycopg: pip install 'tokentape[postgres]'", "store") from None
    url = _parsed(location)
    return url.set(drivername="postgresql+psycopg", query={"application_name": "tokentape", **url.query})


def _parsed(location: str) -> URL:
    expected = "expected postgresql://user@host:port/database"
    try:
        url = make_url(location)
    except (ArgumentError, ValueError):
        raise InvalidRequest(f"the store's URL is invalid; {expected}", "store") from None
    if url.drivername.partition("+")[0] not in _IS_POSTGRES:
        raise InvalidRequest(f"the store's URL is not a PostgreSQL URL; {expected}", "store")
    return url
