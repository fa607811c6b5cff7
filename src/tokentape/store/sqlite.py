"""The durable record in SQLite: one data directory, one writing process, one writing connection.

The database is in WAL mode with `synchronous=FULL`: what `write` has returned from survives a power cut. Only
the writing connection ever checkpoints, in the commit thread, so two checkpoints never meet (SQLite before
3.51.3 can corrupt a database when they do). Where several processes write, each does so behind a turnstile: one writes
or checkpoints at a time, whoever it is.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Literal, Self

from tokentape.errors import StoreError
from tokentape.store import schema
from tokentape.store.base import Store
from tokentape.store.commit import CommitQueue, Failure
from tokentape.store.driver import (
    PAGE_BYTES,
    Synchronous,
    explain,
    explain_wrapped,
    explained,
    one_state,
    reading_engine,
    writing_engine,
)
from tokentape.store.lock import DirectoryLock, Turnstile

_log = logging.getLogger(__name__)

DATABASE_NAME = "tokentape.db"

CHECKPOINT_BYTES = 2**20
"""About how much the write-ahead log grows between checkpoints; it keeps that room."""

_BYTES_PER_COMMIT = 4 * PAGE_BYTES
"""What a commit writes to the log besides the records: the tail and index pages that it touches again."""


class SqliteStore(Store):
    """The record of a data directory. `open` makes one.

    store = SqliteStore.open("runs/today")
    await store.write(SessionInfo("s1", time.time()), setup, seal(turn, None))
    store.load_session("s1").turns[0].completion_ids
    """

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        synchronous: Synchronous = "FULL",
        read_only: bool = False,
        turnstile: Turnstile | None = None,
    ) -> Self:
        """Open `directory`, making it and the database if they aren't there, migrating an older database.

        `synchronous="NORMAL"` flushes at checkpoints only: what was acknowledged survives the death of the
        process, but a power cut can take the last seconds. `read_only` opens an existing database beside a
        running writer and changes nothing. With a `turnstile` the caller holds the directory, and this process is one
        of several that write there in turn.

        Raises `StoreLocked` if another process writes there, `StoreCorrupt` if the file is not a Tokentape
        database, and `StoreError` for one of a newer version or one that can't be opened.
        """
        directory = Path(directory)
        path = directory / DATABASE_NAME
        with ExitStack() as undo:
            writer = None
            if read_only:
                if not path.is_file():
                    raise StoreError(f"{path} does not exist: {directory} is not a data directory")
            else:
                try:
                    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                    if turnstile is None:
                        undo.callback(DirectoryLock(directory).release)
                except OSError as error:
                    raise StoreError(f"{directory} can't be used as a data directory: {error.strerror}") from error
                writer = _Writer(path, synchronous, nullcontext if turnstile is None else turnstile.alone)
                undo.callback(writer.close)
            readers = reading_engine(path)
            undo.callback(readers.dispose)
            with one_state(readers) as connection:
                schema.check(connection)
            release = undo.pop_all()
        commits = None if writer is None else writer.commits
        return cls(readers, commits, release, explain_wrapped, shared=turnstile is not None)


class _Writer:
    """The one connection that writes, and the queue in front of it."""

    def __init__(
        self, path: Path, synchronous: Synchronous, exclusive: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._log_bytes = 0
        self._exclusive = exclusive
        with ExitStack() as undo, explained():
            with exclusive():
                self._connection = writing_engine(path, synchronous).connect()
                undo.callback(self._connection.close)
                with self._connection.begin():
                    schema.prepare(self._connection)
            # A process that died may have left commits in the page cache only: flush before building on them.
            failure = self._checkpoint("PASSIVE")
            if failure is not None:
                raise failure.error()
            undo.pop_all()
        self.commits = CommitQueue(self._connection, explain_wrapped, self._after_commit, exclusive)

    def close(self) -> None:
        """Run what is queued, checkpoint unless the store is broken, and let go of the database."""
        self.commits.close()
        failure = None if self.commits.broken else self._checkpoint("TRUNCATE")
        with self._exclusive():
            # The last connection to close checkpoints too.
            self._connection.close()
        if failure is not None:
            raise failure.error()

    def _after_commit(self, written: int) -> Failure | None:
        self._log_bytes += written + _BYTES_PER_COMMIT
        return self._checkpoint("PASSIVE") if self._log_bytes >= CHECKPOINT_BYTES else None

    def _checkpoint(self, mode: Literal["PASSIVE", "TRUNCATE"]) -> Failure | None:
        """Flush the log into the database, if need be later. Return what makes the store unusable, if anything."""
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        try:
            with self._exclusive():
                driver.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        except sqlite3.Error as error:
            failure = explain(error)
            if failure.fatal:
                return failure
            # Nothing is lost, the log keeps it: a full disk must not keep anybody from opening and reading.
            _log.warning("a checkpoint failed (%s); it is tried again later", error)
            self._log_bytes = CHECKPOINT_BYTES // 2
            return None
        self._log_bytes = 0
        return None
