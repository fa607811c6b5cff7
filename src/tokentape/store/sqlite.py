"""The durable record in SQLite: one data directory, one writing process, one writing connection.

The database is in WAL mode with `synchronous=FULL`: what `write` has returned from survives a power cut. Only
the writing connection ever checkpoints, in the commit thread, so two checkpoints never meet (SQLite before
3.51.3 can corrupt a database when they do).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from sqlalchemy import Connection, Engine

from tokentape.errors import NotFound, StoreError
from tokentape.session.arrow import ExtraNames
from tokentape.store import reads, schema, writes
from tokentape.store.commit import CommitQueue, Failure, Work
from tokentape.store.driver import (
    Synchronous,
    explain,
    explain_wrapped,
    explained,
    one_state,
    reading_engine,
    writing_engine,
)
from tokentape.store.lock import DirectoryLock
from tokentape.store.reads import Extent, SessionSummary, StoredSession
from tokentape.store.rows import Record
from tokentape.types import Media

_log = logging.getLogger(__name__)

DATABASE_NAME = "tokentape.db"

CHECKPOINT_BYTES = 4 * 2**20
"""About how much the write-ahead log grows between checkpoints."""

_BYTES_PER_COMMIT = 4 * 4096
"""What a commit writes to the log besides the records: the tail and index pages that it touches again."""


class SqliteStore:
    """The record of a data directory. `open` makes one; it is a context manager that closes it.

    `write` and `delete_session` are for the event loop; the reads block and may be called from any thread.

        store = SqliteStore.open("runs/today")
        await store.write(SessionInfo("s1", time.time()), setup, seal(turn, None))
        store.load_session("s1").turns[0].completion_ids
    """

    def __init__(self, readers: Engine, writer: _Writer | None, release: ExitStack) -> None:
        self._readers = readers
        self._writer = writer
        self._release = release
        self._closed = False

    @classmethod
    def open(cls, directory: str | Path, *, synchronous: Synchronous = "FULL", read_only: bool = False) -> Self:
        """Open `directory`, making it and the database if they aren't there, migrating an older database.

        `synchronous="NORMAL"` flushes at checkpoints only: what was acknowledged survives the death of the
        process, but a power cut can take the last seconds. `read_only` opens an existing database beside a
        running writer and changes nothing.

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
                    undo.callback(DirectoryLock(directory).release)
                except OSError as error:
                    raise StoreError(f"{directory} can't be used as a data directory: {error.strerror}") from error
                writer = _Writer(path, synchronous)
                undo.callback(writer.close)
            readers = reading_engine(path)
            undo.callback(readers.dispose)
            with one_state(readers) as connection:
                schema.check(connection)
            release = undo.pop_all()
        return cls(readers, writer, release)

    @property
    def healthy(self) -> bool:
        """False once the store is closed or broken: then every write fails until a restart."""
        return not self._closed and (self._writer is None or not self._writer.commits.broken)

    async def write(self, *records: Record) -> None:
        """Record `records`, in the given order and all or none; return when they are durable.

        A setup or media that are already there are left alone. Records must not change until this returns. If the
        awaiting task is cancelled, the records may or may not become durable, but never a part of them.

        Raises `Conflict` if the session exists or the turn is not its next, `NotFound` if a record refers to
        a session or turn that isn't there, `InvalidRequest` or `InvariantViolation` if one is not fit to be
        recorded, `StoreFull` or `StoreError` if the disk is full or fails. After any of them nothing of this
        call is recorded.
        """
        if records:
            await self.transact(partial(writes.insert_records, records=records))

    async def delete_session(self, session_id: str, *, force: bool = False) -> None:
        """Delete a session with all that is recorded of it; return when that is durable.

        Raises `NotFound`, and unless `force` is given `Conflict` if a snapshot that nobody has confirmed holds it.
        """
        await self.transact(partial(writes.delete_session, session_id=session_id, force=force))

    def sessions(self, limit: int = 100, after: int = 0, owner: str | None = None) -> list[SessionSummary]:
        """Return up to `limit` sessions in order of creation, those behind the position `after`.

        With `owner` only those of one API key.
        """
        with self.reading() as connection:
            return reads.list_sessions(connection, limit, after, owner)

    def load_session(self, session_id: str, *, per_token: bool = False, extent: Extent | None = None) -> StoredSession:
        """Return a session with its hash chain checked; the arrays are read-only.

        With columns and payloads only if `per_token`: they can be many times larger than the ids. With an `extent`
        only what belongs to it. Raises `NotFound`, and `StoreCorrupt` if a record can't be read or doesn't fit the
        chain.
        """
        with self.reading() as connection:
            return reads.load_session(connection, session_id, per_token=per_token, extent=extent)

    def load_media(self, session_id: str, sha256: str) -> Media:
        """Return media that a session refers to: an image, or how images were processed.

        Raises `NotFound` if it refers to none of that hash, and `StoreCorrupt` if the bytes have another.
        """
        with self.reading() as connection:
            return reads.load_media(connection, session_id, sha256)

    def iter_sessions(self, *, per_token: bool = False) -> Iterator[StoredSession]:
        """Yield every session in order of creation, loading one at a time. Raises as `load_session`."""
        after = 0
        while page := self.sessions(after=after):
            for summary in page:
                try:
                    session = self.load_session(summary.info.session_id, per_token=per_token)
                except NotFound:
                    continue  # deleted since the page was read
                yield session
            after = page[-1].position

    def extra_names(self, session_ids: Collection[str] | None = None) -> ExtraNames:
        """Return the names of all columns and payloads of these sessions, of all if None."""
        with self.reading() as connection:
            return ExtraNames(
                tuple(reads.column_names(connection, session_ids)), tuple(reads.payload_names(connection, session_ids))
            )

    async def transact(self, work: Work) -> None:
        """Run `work` in the writing thread, all of it or nothing; return when it is durable. For this room."""
        if self._writer is None:
            raise StoreError("the store was opened read-only")
        await self._writer.commits.run(work)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that sees one state of the record. For this room."""
        if self._closed:
            raise StoreError("the store is closed")
        with one_state(self._readers) as connection:
            yield connection

    def close(self) -> None:
        """Write what is queued, checkpoint and release the directory. Later calls raise `StoreError`."""
        self._closed = True
        self._release.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Writer:
    """The one connection that writes, and the queue in front of it."""

    def __init__(self, path: Path, synchronous: Synchronous) -> None:
        self._log_bytes = 0
        with ExitStack() as undo, explained():
            self._connection = writing_engine(path, synchronous).connect()
            undo.callback(self._connection.close)
            with self._connection.begin():
                schema.prepare(self._connection)
            # A process that died may have left commits in the page cache only: flush before building on them.
            failure = self._checkpoint("PASSIVE")
            if failure is not None:
                raise failure.error()
            undo.pop_all()
        self.commits = CommitQueue(self._connection, explain_wrapped, self._after_commit)

    def close(self) -> None:
        """Run what is queued, checkpoint unless the store is broken, and let go of the database."""
        self.commits.close()
        failure = None if self.commits.broken else self._checkpoint("TRUNCATE")
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
