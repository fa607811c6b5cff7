"""Files that are there after a power cut."""

from __future__ import annotations

import os
from pathlib import Path

PART = ".part"
"""How the name of a file ends that is not whole yet; a process that is killed leaves it behind."""


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, making its folder if there is none. It appears under its name once it is whole and on the disk."""
    made = [one for one in path.parents if not one.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + PART)
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    for changed in (path.parent, *(one.parent for one in made)):
        flush_directory(changed)


def flush_directory(directory: Path) -> None:
    """Make the names in it durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
