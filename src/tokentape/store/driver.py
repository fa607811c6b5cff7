"""Connections to a SQLite file, and what the errors of SQLite mean to us."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from sqlalchemy import Connection, Engine, NullPool, QueuePool, create_engine, event
from sqlalchemy.exc import DBAPIError

from tokentape.errors import Conflict, NotFound, StoreCorrupt, StoreError, StoreFull, StoreLocked
from tokentape.store.commit import Failure

Synchronous: TypeAlias = Literal["FULL", "NORMAL"]

PAGE_BYTES = 1024
"""Of a new file; one that is there keeps its own. A turn takes a few kilobytes, and its last page is seldom
filled by another one: what is wasted goes with the size of a page."""


def writing_engine(path: Path, synchronous: Synchronous) -> Engine:
    """Return an engine for the one connection that writes; it makes the file if there is none."""
    engine = create_engine(
        "sqlite://",
        creator=partial(_connect_to_write, path, synchronous),
        poolclass=NullPool,
        hide_parameters=True,
    )
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def reading_engine(path: Path) -> Engine:
    """Return an engine whose connections can't change the file, not even by a checkpoint."""
    engine = create_engine(
        "sqlite://",
        creator=partial(_connect_to_read, path),
        poolclass=QueuePool,
        max_overflow=-1,
        hide_parameters=True,
    )
    # Without it each statement would see a state of its own.
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


@contextmanager
def one_state(engine: Engine) -> Iterator[Connection]:
    """Yield a connection that sees one state of the database, with SQLite's errors explained."""
    with explained(), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def explained() -> Iterator[None]:
    """Raise one of our errors for each of SQLite's."""
    try:
        yield
    except DBAPIError as error:
        # The driver's message may quote what it could not decode.
        raise explain_wrapped(error).error() from None


def explain_wrapped(error: DBAPIError) -> Failure:
    """Say what an error of SQLite that SQLAlchemy has wrapped means to us."""
    assert isinstance(error.orig, sqlite3.Error)
    return explain(error.orig)


def explain(error: sqlite3.Error) -> Failure:
    """Say what an error of SQLite means to us (https://www.sqlite.org/rescode.html).

    A write that failed is undone and may succeed later. Any other I/O error is fatal: after a failed fsync the
    kernel drops the pages, and the next fsync reports success.
    """
    # Errors that the Python module raises by itself have no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    name: str = getattr(error, "sqlite_errorname", type(error).__name__)
    match code:
        case sqlite3.SQLITE_FULL:
            return Failure(StoreFull, "the disk is full; nothing was recorded; make room and try again")
        case sqlite3.SQLITE_IOERR_WRITE:
            return Failure(
                StoreError,
                "the system refused a write to the data directory (disk, quota or file size limit); "
                "nothing was recorded; see to the disk and try again",
            )
        case sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY | sqlite3.SQLITE_CONSTRAINT_UNIQUE:
            return Failure(Conflict, "this is already recorded")
        case sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY:
            return Failure(NotFound, "this refers to a session, turn or setup that is not recorded")
    match code & 0xFF:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return Failure(StoreCorrupt, f"the database is damaged ({name}); `tokentape verify` says where", fatal=True)
        case sqlite3.SQLITE_IOERR:
            return Failure(
                StoreError,
                f"the disk failed ({name}); nothing can be acknowledged any more; "
                "check the disk, restart, then run `tokentape verify`",
                fatal=True,
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Failure(StoreLocked, "another program holds a lock on the database; stop it")
    return Failure(StoreError, f"the database refused ({name})")


def _connect_to_write(path: Path, synchronous: Synchronous) -> sqlite3.Connection:
    connection = _connect(path, "rwc")
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    # Checkpoints are explicit: the automatic ones swallow a failed fsync.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # macOS: fsync there doesn't reach the disk. Ignored elsewhere.
    connection.execute("PRAGMA fullfsync = ON")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    return _connect(path, "ro")


def _connect(path: Path, mode: Literal["ro", "rwc"]) -> sqlite3.Connection:
    # isolation_level None: the module starts no transactions of its own.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
