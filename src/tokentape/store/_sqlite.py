"""Keep the durable record in SQLite: one data directory, one writing process, one writing connection.

The database is in WAL mode with `synchronous=FULL`, so records survive a power cut once `write` has returned. Only the
writing connection checkpoints, in the commit thread, so two checkpoints never run at once (which can corrupt a database
before SQLite 3.51.3). If several processes write, an `InterprocessLock` lets one at a time write or checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from sqlalchemy import Engine, NullPool, QueuePool, create_engine, event
from sqlalchemy.exc import DBAPIError

from tokentape.errors import Conflict, InvalidRequest, NotFound, StoreCorrupt, StoreError, StoreFull, StoreLocked
from tokentape.store import _schema as schema
from tokentape.store._base import Store
from tokentape.store._commit import CommitQueue, StoreFailure, explaining
from tokentape.store._lock import LOCK_NAME, DirectoryLock, FilesInUse, InterprocessLock, make_directory
from tokentape.store._served_model import ServedModel, read_served_model
from tokentape.store._writes import execute_directly

_log = logging.getLogger(__name__)

Synchronous: TypeAlias = Literal["FULL", "NORMAL"]

DATABASE_NAME = "tokentape.db"
_LOG_NAME = f"{DATABASE_NAME}-wal"

PAGE_BYTES = 1024
"""The page size of new files. Small pages waste less: a turn takes a few kilobytes; its last page is seldom full."""

_LEAST_ROOM = 2**20
"""The free bytes on disk below which a gateway is not ready, because a long turn may not fit."""

CHECKPOINT_BYTES = 2**20
"""The approximate growth of the write-ahead log between two checkpoints."""

_BYTES_PER_COMMIT = 4 * PAGE_BYTES
"""The bytes that a commit adds to the log in addition to its records: the tail and index pages that it rewrites."""


class SqliteStore(Store):
    """The record in a data directory. Create one with `open`.

    store = SqliteStore.open("runs/today")
    await store.write(SessionInfo("s1", time.time()), setup, seal(turn, None))
    store.load_session("s1").turns[0].completion_ids
    """

    _directory: Path

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        synchronous: Synchronous = "FULL",
        read_only: bool = False,
        writers: InterprocessLock | None = None,
    ) -> Self:
        """Open `directory`. Create it and its database if they are missing, and migrate an older database.

        `synchronous="NORMAL"` flushes only at checkpoints: acknowledged records survive the death of the process, but a
        power cut can lose the last seconds. `read_only` opens an existing database, even while a writer runs, and
        changes nothing. If `writers` is passed, the caller holds the directory lock, and this process is one of several
        that take turns writing.

        Raises `StoreLocked` if another process writes there, `StoreCorrupt` if the file is not a Tokentape
        database, and `StoreError` if the database's version is newer or it can't be opened.
        """
        directory = Path(directory)
        path = directory / DATABASE_NAME
        if synchronous not in get_args(Synchronous):
            # SQLite takes a word that it does not know for NORMAL.
            raise InvalidRequest(f"synchronous is {synchronous!r}: expected FULL or NORMAL", "synchronous")
        with ExitStack() as undo:
            writer = None
            if read_only:
                if not path.is_file():
                    raise StoreError(no_database(directory))
            else:
                make_directory(directory)
                refuse_links(path)
                try:
                    if writers is None:
                        undo.callback(DirectoryLock(directory).release)
                except OSError as error:
                    raise StoreError(f"{directory} can't be used as a data directory: {error.strerror}") from error
                writer = _Writer(path, synchronous, nullcontext if writers is None else writers.held)
                undo.callback(writer.close)
            readers = reading_engine(path)
            undo.callback(readers.dispose)
            with explained(), readers.connect() as connection, connection.begin():
                schema.check(connection)
            release = undo.pop_all()
        commits = None if writer is None else writer.commits
        store = cls(readers, commits, release, explain, shared=writers is not None)
        store._directory = directory
        return store

    def check(self) -> None:
        """Raise `StoreError` if nothing can be recorded now, or if the disk has less than 1 MiB free."""
        super().check()
        if shutil.disk_usage(self._directory).free < _LEAST_ROOM:
            raise StoreError("the disk is full: less than 1 MiB is left for the record; free up space")

    def served_model(self) -> ServedModel | None:
        """Return the model that `model.json` names; None if it is not known."""
        return read_served_model(self._directory)


class _Writer:
    def __init__(
        self, path: Path, synchronous: Synchronous, exclusive: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._log_bytes = 0
        self._exclusive = exclusive
        self._directory = path.parent
        with suppress(FileExistsError):
            # SQLite would make the file readable by other users. The log and its index get the database's mode.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
        with ExitStack() as undo, explained():
            with exclusive():
                if fault := log_fault(path):
                    raise StoreCorrupt(
                        f"{fault}. Copy {path.parent}, then restore a backup; or, to continue without them, run "
                        f"sqlite3 {path} 'PRAGMA wal_checkpoint(TRUNCATE)'"
                    )
                self._connection = writing_engine(path, synchronous).connect()
                undo.callback(self._connection.close)
                with self._connection.begin():
                    schema.prepare(self._connection)
            # A dead process may have left commits only in the page cache: flush them first.
            failure = self._checkpoint("PASSIVE")
            if failure is not None:
                raise failure.error()
            undo.pop_all()
        self._files = FilesInUse(path.parent, (DATABASE_NAME, _LOG_NAME, f"{DATABASE_NAME}-shm", LOCK_NAME))
        self.commits = CommitQueue(self._connection, explain, self._after_commit, self._writing, check=self._lost_files)

    def close(self) -> None:
        """Run the queued calls, checkpoint unless the store is broken, and close the database."""
        self.commits.close()
        failure = None if self.commits.broken else self._checkpoint("TRUNCATE")
        with self._exclusive():
            # Closing the last connection also checkpoints.
            self._connection.close()
        if failure is not None:
            raise failure.error()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._exclusive():
            try:
                yield
            except DBAPIError as error:
                if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_FSYNC:
                    # The log has the whole commit, which was not acknowledged, and a restart would take it up.
                    # The next commit overwrites its first page, also if its own flush fails, and so makes it invalid.
                    with suppress(DBAPIError):
                        execute_directly(self._connection, "PRAGMA user_version = 0")
                raise

    def _lost_files(self) -> StoreFailure | None:
        """Return a failure if a file was removed or replaced. First save the record, if that is safe."""
        changed = self._files.changed()
        if not changed:
            return None
        if changed == [_LOG_NAME] and self._exclusive is nullcontext and not (self._directory / _LOG_NAME).exists():
            # The log, which is still open, has all records, and no other process writes.
            self._checkpoint("PASSIVE")
        return StoreFailure(
            StoreError,
            f"{', '.join(changed)} was removed or replaced in the data directory while the gateway ran; nothing more "
            "can be acknowledged; restart, then run `tokentape verify`",
            fatal=True,
        )

    def _after_commit(self, size: int) -> StoreFailure | None:
        self._log_bytes += size + _BYTES_PER_COMMIT
        return self._checkpoint("PASSIVE") if self._log_bytes >= CHECKPOINT_BYTES else None

    def _checkpoint(self, mode: Literal["PASSIVE", "TRUNCATE"]) -> StoreFailure | None:
        """Checkpoint the log into the database, or leave that for later. Return a failure only if it is fatal."""
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        try:
            with self._exclusive():
                driver.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        except sqlite3.Error as error:
            failure = explain(error)
            if failure.fatal:
                return failure
            # Nothing is lost: the log keeps the records, so a record on a full disk can still be opened and read.
            _log.warning("a checkpoint failed (%s); it will be retried", error)
            self._log_bytes = CHECKPOINT_BYTES // 2
            return None
        self._log_bytes = 0
        return None


def writing_engine(path: Path, synchronous: Synchronous) -> Engine:
    """Return an engine for the only writing connection. It creates the file if it is missing."""
    engine = create_engine(
        "sqlite://", creator=partial(_connect_to_write, path, synchronous), poolclass=NullPool, hide_parameters=True
    )
    event.listen(engine, "begin", lambda connection: execute_directly(connection, "BEGIN IMMEDIATE"))
    return engine


def reading_engine(path: Path) -> Engine:
    """Return an engine for connections that can't change the file, not even by a checkpoint.

    If the record's version is older, they read a temporary, migrated copy.
    """
    folder = _migrated_copy(path)
    path = path if folder is None else Path(folder.name, DATABASE_NAME)
    engine = create_engine(
        "sqlite://", creator=partial(_connect, path, "ro"), poolclass=QueuePool, max_overflow=-1, hide_parameters=True
    )
    # Without a transaction, each statement could see a different state.
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    if folder is not None:
        event.listen(engine, "engine_disposed", lambda _: folder.cleanup())
    return engine


def _migrated_copy(path: Path) -> TemporaryDirectory[str] | None:
    """Return a folder with a migrated copy if the record's version is older, else None. Raises `StoreCorrupt`."""
    try:
        with closing(_connect(path, "ro")) as source:
            (version,) = source.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() or ("",)
    except (sqlite3.Error, UnicodeDecodeError):
        return None  # `schema.check` reports what is wrong
    if version not in map(str, range(schema.OLDEST, schema.OLDEST + len(schema.MIGRATIONS))):
        return None
    folder = TemporaryDirectory(prefix="tokentape-")
    copy = Path(folder.name, DATABASE_NAME)
    _log.info("%s has schema version %s; reading a migrated copy", path, version)
    with ExitStack() as undo:
        undo.callback(folder.cleanup)
        try:
            with closing(_connect(path, "ro")) as source, closing(sqlite3.connect(copy)) as target:
                source.backup(target)
            with writing_engine(copy, "NORMAL").begin() as connection:
                schema.prepare(connection)
        except (sqlite3.Error, DBAPIError) as error:
            reason = getattr(error, "orig", error)
            raise StoreCorrupt(f"the database, with schema version {version}, can't be migrated: {reason}") from None
        undo.pop_all()
    return folder


def refuse_links(path: Path) -> None:
    """Raise `StoreError` if the database at `path` has another name: names have their own locks and logs."""
    if path.is_symlink():
        raise StoreError(f"{path} is a link to {path.resolve()}; name that file's directory, or link the directory")
    if path.is_file() and (names := path.stat().st_nlink) > 1:
        raise StoreError(
            f"{path} has {names} names (hard links), and a record must have one; stop gateways that use the others, "
            "then remove the others, or replace this one with a copy"
        )


def no_database(directory: str | Path) -> str:
    """Return the error message for a directory without a database."""
    return (
        f"{Path(directory) / DATABASE_NAME} does not exist: {directory} is not a data directory; name the folder that "
        "was passed to `tokentape serve --data`"
    )


def file_faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with the header and the size of a damaged database (https://www.sqlite.org/fileformat.html).

    SQLite itself reports only that such a file is damaged.
    """
    with open(path, "rb") as file:
        header = file.read(100)
    if not header.startswith(_MAGIC):
        yield f"{path.name} begins with {header[:16]!r}; expected {_MAGIC!r}: it was overwritten, or is no database"
        return
    page_bytes, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    size, expected = path.stat().st_size, (65536 if page_bytes == 1 else page_bytes) * pages
    if size < expected:
        yield f"{path.name} has {size} bytes; expected {expected}, as its header says: the end is missing"


def log_fault(path: Path) -> str | None:
    """Return what is wrong with the write-ahead log of a database; None if no fault is found. A writer may be running.

    SQLite ignores a damaged frame of the log (https://www.sqlite.org/walformat.html) and all frames after it. One
    ignored commit may be one that never ended, and the remains of several may lie there. But if the checksums of a
    commit continue those of another, the other one was durable.
    """
    valid = ignored = chained = 0
    with suppress(FileNotFoundError), open(path.with_name(_LOG_NAME), "rb") as file:
        header = file.read(32)
        size, salts = 24 + int.from_bytes(header[8:12], "big"), header[16:24]
        if len(header) < 32 or not file.peek(1):
            return None
        order = "<>"[header[3] & 1]
        sums = _log_sums((0, 0), header[:24], order)
        intact = header_intact = _SUMS.pack(*sums) == header[24:]
        while header_intact and len(frame := file.read(size)) == size:
            own = frame[8:16] == salts
            follows = own and _SUMS.pack(*_log_sums(sums, frame[:8] + frame[24:], order)) == frame[16:24]
            sums = _SUMS.unpack(frame[16:24])
            intact = intact and follows
            valid += intact
            if not intact:
                chained = (chained if follows else 0) + (own and any(frame[4:8]))
                ignored = max(ignored, chained)
        file.seek(0)
        if file.read(32) != header:
            return None  # the writer began the log again
        if not header_intact:
            return f"the header of {_LOG_NAME} is damaged, so SQLite ignores the log: acknowledged turns are missing"
    missing = f"SQLite ignores {ignored} commits: acknowledged turns are missing"
    return None if ignored < 2 else f"{_LOG_NAME} is damaged after frame {valid}, so {missing}"


_SUMS = struct.Struct(">II")


def _log_sums(sums: tuple[int, int], data: bytes, order: str) -> tuple[int, int]:
    """Continue the checksums of the log's format.

    The log's index has the number of valid frames, but closing that file would release SQLite's locks on it.
    """
    words = np.frombuffer(data, f"{order}u4").astype(np.uint32).reshape(-1, 2)
    words[:, 1] += words[:, 0]
    whole, each = _log_powers(len(words))
    first, second = whole @ np.array(sums, np.uint32) + each @ words.ravel()
    return int(first), int(second)


@cache
def _log_powers(count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return what `count` steps of the checksums do to the sums before them, and to the words of each step.

    A step adds its first word and the second sum to the first sum, then its second word and the first sum to the second
    sum. With a product of matrices, a page is summed 15 times as fast as in a loop.
    """
    powers = [np.eye(2, dtype=np.uint32)]
    for _ in range(count):
        powers.append(np.array([[1, 1], [1, 2]], np.uint32) @ powers[-1])
    return powers[-1], np.concatenate(powers[-2::-1], axis=1)


_MAGIC = b"SQLite format 3\0"


def explain(error: DBAPIError | sqlite3.Error) -> StoreFailure:
    """Convert a SQLite error (https://www.sqlite.org/rescode.html) to a failure.

    A failed write is undone and may succeed later. Any other I/O error is fatal: after a failed fsync, the kernel drops
    the pages, and the next fsync reports success.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    # Errors raised by the Python module itself have no code.
    code: int = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    name: str = getattr(cause, "sqlite_errorname", type(cause).__name__)
    failure = _FAILURES.get(code) or _FAILURES.get(code & 0xFF) or StoreFailure(StoreError, "SQLite failed ({})")
    if str(cause) == "unsupported file format":
        failure = _DAMAGED  # this damage of the file's header has no code
    return replace(failure, message=failure.message.format(name))


explained = partial(explaining, explain)

SHOWN_BY_VERIFY = "; `tokentape verify` shows where"
"""The end of the message of damage, which verify itself replaces."""

_DAMAGED = StoreFailure(StoreCorrupt, f"the database is damaged ({{}}){SHOWN_BY_VERIFY}", fatal=True)
_LOCKED = StoreFailure(StoreLocked, "another program holds a lock on the database; stop it")
_RECORDED = StoreFailure(Conflict, "this is already recorded")
_FAILURES = {
    sqlite3.SQLITE_FULL: StoreFailure(StoreFull, "the disk is full; nothing was recorded; free up space and try again"),
    sqlite3.SQLITE_IOERR_WRITE: StoreFailure(
        StoreError,
        "the system refused a write to the data directory (disk, quota or file size limit); nothing was recorded; "
        "check the disk and try again",
    ),
    sqlite3.SQLITE_IOERR: StoreFailure(
        StoreError,
        "the disk failed ({}); nothing more can be acknowledged; check the disk, restart, then run `tokentape verify`",
        fatal=True,
    ),
    sqlite3.SQLITE_CANTOPEN: StoreFailure(
        StoreError,
        f"{DATABASE_NAME} can't be opened; expected a file that this account may read and write, in a folder that it "
        "may write to",
    ),
    sqlite3.SQLITE_READONLY: StoreFailure(
        StoreError,
        "the data directory is not writable, which SQLite needs even for reading; use a different account, or copy "
        "the directory",
    ),
    sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY: _RECORDED,
    sqlite3.SQLITE_CONSTRAINT_UNIQUE: _RECORDED,
    sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY: StoreFailure(
        NotFound, "this refers to a session, turn or setup that is not recorded"
    ),
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
}
"""Failures by extended or primary code; `{}` is replaced by the code's name."""


def _connect_to_write(path: Path, synchronous: Synchronous) -> sqlite3.Connection:
    with ExitStack() as undo:
        connection = undo.enter_context(closing(_connect(path, "rwc")))
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        # Checkpoints are explicit because automatic checkpoints swallow a failed fsync.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        # On macOS, plain fsync doesn't reach the disk. Ignored elsewhere.
        connection.execute("PRAGMA fullfsync = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        # Overwrite deleted data, so that free pages don't keep it.
        connection.execute("PRAGMA secure_delete = ON")
        undo.pop_all()
    return connection


def _connect(path: Path, mode: Literal["ro", "rwc"]) -> sqlite3.Connection:
    # isolation_level None keeps the module from starting transactions.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
