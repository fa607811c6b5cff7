"""Write files that survive a power cut."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import IO

PART = ".part"
"""Suffix of a file that is still being written. A killed process leaves one."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file, creating its folder if needed. It gets its name once it is complete and flushed to the disk.

    If the context raises, no file appears. If the path is a link, the file that it points to is replaced. Anything but
    a regular file, such as a FIFO or `/dev/stdout`, is written to directly.
    """
    try:
        with _durable_file(path) as file:
            yield file
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        # Unlike an error of `open`, an error of `write` doesn't name the file.
        reason = f"{os.strerror(error.errno)}; free up space, or write to another disk"
        raise OSError(error.errno, reason, str(path)) from error


@contextmanager
def _durable_file(path: Path) -> Iterator[IO[bytes]]:
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    path = path.resolve()
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may write to one path. If both parts had one name, the slower one would write to the finished file.
    part = path.with_name(f"{path.name}.{token_hex(4)}{PART}")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    for changed in (path.parent, *(folder.parent for folder in missing)):
        flush_directory(changed)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file like `durable_file`."""
    with durable_file(path) as file:
        file.write(data)


def flush_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
