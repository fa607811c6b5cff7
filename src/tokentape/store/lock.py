"""One process per data directory: a lock file that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tokentape.errors import StoreLocked

LOCK_NAME = "tokentape.lock"


class DirectoryLock:
    """Holds `directory` for this process until `release` or the process's end. Raises `StoreLocked`.

    The file stays behind: removing it would let two processes hold locks on two files of the same name. It
    names the holder's pid for people; the lock itself is what counts.
    """

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise StoreLocked(
                f"{directory} is open for writing by process {holder}; stop it, or use another data directory"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        """Let other processes have the directory."""
        os.ftruncate(self._file, 0)
        os.close(self._file)
