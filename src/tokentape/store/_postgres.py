"""The durable record in PostgreSQL: any number of gateways over one database, that write at the same time.

Each transaction begins by claiming what it changes, by advisory locks in one order, so that none waits for another in a
circle: sessions, each on its own; all of them together, where their numbers are given or a snapshot is to be a moment.
What is in one session is therefore totally ordered, as with the one writer of SQLite: positions grow in the order in
which they come to be seen, and a turn number is given once. Reads take no lock.

`psycopg` (extra `postgres`) is imported on first use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Literal, Self, TypeAlias

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError

from tokentape.errors import Conflict, InvalidRequest, NotFound, StoreError, StoreFull, StoreUnavailable
from tokentape.store import _schema as schema
from tokentape.store._base import Store
from tokentape.store._commit import Claims, CommitQueue, StoreFailure
from tokentape.store._reads import SessionProgress
from tokentape.store._served_model import ServedModel

Durability: TypeAlias = Literal["FULL", "NORMAL"]

RECORD_LOCK = 0x746F6B656E746170
"""The advisory lock of the record as a whole, `tokentap` in ASCII: shared by those that change sessions."""

LOCK_SECONDS = 30
"""How long to wait for others that write, and how long the server lets one of them stand still meanwhile."""

_SERVED_MODEL = "served_model"
_IS_POSTGRES = ("postgresql", "postgres")


def is_url(location: str) -> bool:
    """Say whether `location` is the URL of a PostgreSQL database."""
    return location.partition("://")[0].partition("+")[0] in _IS_POSTGRES and "://" in location


def without_password(location: str) -> str:
    url = _parsed(location).difference_update_query(["password", "passfile", "sslpassword"])
    return url.render_as_string(hide_password=True)


class PostgresStore(Store):
    """The record of a PostgreSQL database. `open` makes one.

    The database may be named by `host`, `port`, `user`, `dbname` and so on in the URL, or by libpq's `PG*` variables.
    Tables are those of the connection's `search_path`.

        store = PostgresStore.open("postgresql://tokentape@db.internal/runs")
        await store.write(SessionInfo("s1", time.time()), setup, seal(turn, None))
    """

    def __init__(self, readers: Engine, once: Engine, commits: CommitQueue | None, release: ExitStack) -> None:
        super().__init__(readers, commits, release, explain, shared=True)
        self._once = once

    @classmethod
    def open(cls, url: str, *, synchronous: Durability = "FULL", read_only: bool = False) -> Self:
        """Open the database, making its tables if it is empty, migrating those of an older version.

        `synchronous="NORMAL"` does not wait for the server's disk: a crash of the server can take the last moments.
        `read_only` changes nothing. Raises `StoreUnavailable` if the server can't be reached, `InvalidRequest` for a
        URL that is none and where `psycopg` is missing, `StoreCorrupt` if the tables are not Tokentape's, and
        `StoreError` for those of a newer version, a user without rights, and a server that does not flush.
        """
        address = _url(url)
        with ExitStack() as undo:
            commits = None
            if not read_only:
                writer = _writing_engine(address, synchronous)
                with explained():
                    connection = undo.enter_context(writer.connect())
                    with connection.begin():
                        _refuse_unsafe(connection, synchronous)
                        _claim(connection, [None])
                        schema.prepare(connection)
                commits = CommitQueue(connection, explain, lambda _: None, claim=_claim)
                undo.callback(commits.close)
            readers, once = reading_engine(address), _asking_engine(address)
            undo.callback(readers.dispose)
            undo.callback(once.dispose)
            with explained(), readers.connect() as reading, reading.begin():
                schema.check(reading)
            release = undo.pop_all()
        return cls(readers, once, commits, release)

    def session_state(self, session_id: str, newest: int) -> SessionProgress | None:
        try:
            return super().session_state(session_id, newest)
        except StoreUnavailable:
            # Idle connections that the server has closed are all found out at once: the next one is new.
            return super().session_state(session_id, newest)

    @contextmanager
    def reading_once(self) -> Iterator[Connection]:
        """A connection for one statement, without a transaction around it. For this room."""
        with self._connected(self._once) as connection:
            yield connection

    def served_model(self) -> ServedModel | None:
        with self.reading_once() as connection:
            value = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == _SERVED_MODEL)).scalar()
        return None if value is None else ServedModel(**json.loads(value))

    async def note_served_model(self, model: ServedModel) -> None:
        value = json.dumps(asdict(model))

        def note(connection: Connection) -> int:
            connection.execute(schema.meta.delete().where(schema.meta.c.key == _SERVED_MODEL))
            connection.execute(schema.meta.insert().values(key=_SERVED_MODEL, value=value))
            return len(value)

        await self.transact(note, again=note)


def explain(error: DBAPIError) -> StoreFailure:
    """Say what an error of PostgreSQL means to us (https://www.postgresql.org/docs/current/errcodes-appendix.html).

    None is fatal: where a flush fails, the server stops itself, and what it says after that is read from its disk.
    """
    state: str = getattr(error.orig, "sqlstate", None) or ""
    match state:
        case "23505":
            return StoreFailure(Conflict, "this is already recorded")
        case "23503":
            return StoreFailure(NotFound, "this refers to a session, turn or setup that is not recorded")
        case "53100":
            return StoreFailure(
                StoreFull, "the database server's disk is full; nothing was recorded; make room and try again"
            )
        case "55P03":
            return StoreFailure(
                StoreUnavailable,
                f"another gateway has been writing for {LOCK_SECONDS} s; nothing was recorded; try again",
            )
        case "42501" | "25006":
            return StoreFailure(StoreError, f"the database refuses this user or takes no writes (SQLSTATE {state})")
        case "28000" | "28P01" | "3D000":
            return StoreFailure(
                StoreError, f"the database server refuses the user, password or database (SQLSTATE {state})"
            )
    if error.connection_invalidated or state[:2] in ("08", "57") or not state:
        return StoreFailure(
            StoreUnavailable,
            "the database server can't be reached or has closed the connection; try again",
            lost=True,
        )
    return StoreFailure(StoreError, f"the database refused (SQLSTATE {state})")


@contextmanager
def explained() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise explain(error).error() from None


def reading_engine(url: str | URL) -> Engine:
    """Return an engine whose transactions see one state of the database and can't change it."""
    url = _url(url) if isinstance(url, str) else url
    engine = create_engine(
        url,
        isolation_level="REPEATABLE READ",
        max_overflow=20,
        # A server that was restarted is noticed before a request fails on it.
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args=_CONNECTION,
    )
    return engine.execution_options(postgresql_readonly=True)


def _asking_engine(url: URL) -> Engine:
    """Return an engine for single statements: no transaction and no look whether the connection lives, each a trip."""
    return create_engine(
        url, isolation_level="AUTOCOMMIT", max_overflow=20, hide_parameters=True, connect_args=_CONNECTION
    )


def _writing_engine(url: URL, synchronous: Durability) -> Engine:
    engine = create_engine(
        url, isolation_level="READ COMMITTED", poolclass=NullPool, hide_parameters=True, connect_args=_CONNECTION
    )
    # Of one transaction, not of the connection: that may be a pooler's. One trip to the server for all of it.
    begin = (
        f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'; "
        f"SET LOCAL idle_in_transaction_session_timeout = '{LOCK_SECONDS}s'; "
        + ("SET LOCAL synchronous_commit = off" if synchronous == "NORMAL" else "")
    )
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _claim(connection: Connection, claims: Sequence[Claims]) -> None:
    names: set[str] = set()
    for one in claims:
        if one is None:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({RECORD_LOCK})")
            return
        names |= one
    locks = [f"pg_advisory_xact_lock_shared({RECORD_LOCK})"]
    locks += [f"pg_advisory_xact_lock({key})" for key in sorted(map(_key, names))]
    # One statement per lock: within a statement the server chooses the order.
    connection.exec_driver_sql("; ".join(f"SELECT {lock}" for lock in locks))


def _key(name: str) -> int:
    """A number for a name, which others have by a chance of 1 in 2^63 only; then they wait for each other too."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big", signed=True)


_CONNECTION = {
    "connect_timeout": 10,
    # A server that has gone without a word is given up after about 25 s.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}


def _refuse_unsafe(connection: Connection, synchronous: Durability) -> None:
    """Raise `StoreError` if an acknowledged turn could be lost although it is to survive a power cut."""
    if synchronous == "NORMAL":
        return
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        if connection.exec_driver_sql(f"SHOW {setting}").scalar_one() == "off":
            raise StoreError(
                f"the database server has {setting} off: what it has acknowledged can be lost; set it to on, or accept "
                "that with synchronous = normal"
            )


def _url(location: str) -> URL:
    """Return the URL for SQLAlchemy. Raises `InvalidRequest` if it can't be read or `psycopg` is missing."""
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
        raise InvalidRequest(f"the store's URL can't be read; {expected}", "store") from None
    if url.drivername.partition("+")[0] not in _IS_POSTGRES:
        raise InvalidRequest(f"the store's URL is not one of PostgreSQL; {expected}", "store")
    return url
