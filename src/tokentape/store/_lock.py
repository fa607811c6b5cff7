"""Lock a data directory with file locks. The kernel releases them when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokentape.errors import StoreError, StoreLocked

LOCK_NAME = "tokentape.lock"
_FILES = ("tokentape.turn", "tokentape.next")


def make_directory(directory: Path) -> None:
    """Create a data directory unless it exists. Raises `StoreError` if that fails or the directory is not writable."""
    problem = ""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = "it is a file" if directory.is_file() else str(error.strerror)
    if not problem and not os.access(directory, os.W_OK | os.X_OK):
        problem = os.strerror(errno.EACCES)
    if problem:
        raise StoreError(
            f"{directory} can't be used as a data directory: {problem}; name a directory that this user may write to "
            "(tokentape serve --data)"
        )


class DirectoryLock:
    """Locks `directory` for this process until `release` or the process ends. Raises `StoreLocked`.

    The lock file is never removed; otherwise two processes could hold locks on two files with the same name. Its
    contents, the holder's pid, are only for people.
    """

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise StoreLocked(
                f"{directory} is open for writing by process {holder}; if that is a gateway, change its record "
                "through it: pass its URL as --url; otherwise stop the process, or serve with another --data"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def fileno(self) -> int:
        """Return the lock's file descriptor. A process that inherits it also holds the lock."""
        return self._file


class InterprocessLock:
    """Lets one process at a time write to `directory`. Use it from one thread per process.

    Of the waiting processes, one holds a second lock and is next. So a process that has just released the first lock
    can't take it again before the next process.
    """

    def __init__(self, directory: Path) -> None:
        self._turn, self._next = (
            os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for name in _FILES
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._turn)
        os.close(self._next)


class FilesInUse:
    """Detects that one of these files in `directory` was removed or replaced while processes have it open.

    A process can continue to write to a removed file, but the data are lost when the process ends.
    """

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        paths = {name: str(directory / name) for name in names}
        self._inodes = [(name, path, inode) for name, path in paths.items() if (inode := _inode(path)) is not None]

    def changed(self) -> list[str]:
        """Return the names of the files that were removed or replaced."""
        return [name for name, path, inode in self._inodes if _inode(path) != inode]


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
