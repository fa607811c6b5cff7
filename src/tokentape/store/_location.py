"""Open records by location: a data directory, a database URL, or an archive. The location's form shows which."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tokentape.errors import InvalidRequest
from tokentape.store._archive import MARKER, archived_model, is_archive, open_archive, shown_archive
from tokentape.store._base import Store
from tokentape.store._lock import LOCK_NAME
from tokentape.store._postgres import PostgresStore, is_url, without_password
from tokentape.store._served_model import MODEL_NAME, ServedModel, write_served_model
from tokentape.store._sqlite import DATABASE_NAME, SqliteStore

EXPECTED = "a data directory, postgresql://user@host/database or an archive"
"""The kinds of locations, for error messages."""


def is_record(location: str | Path) -> bool:
    """Return whether `location` can be opened with `open_record`: a URL or a directory, not a file."""
    return "://" in str(location) or Path(location).is_dir()


def open_record(
    location: str | Path, *, synchronous: Literal["FULL", "NORMAL"] = "FULL", read_only: bool = False
) -> Store:
    """Open the record at `location`: a directory, `postgresql://...`, or, if `read_only`, an archive.

    Raises the errors of `SqliteStore.open`, `PostgresStore.open` or `open_archive`, and `InvalidRequest` for an archive
    without `read_only`.
    """
    if is_url(str(location)):
        return PostgresStore.open(str(location), synchronous=synchronous, read_only=read_only)
    if is_archive(location):
        if not read_only:
            raise InvalidRequest(
                f"{shown(location)} is an archive, which is read-only; name a data directory or database", "store"
            )
        return open_archive(str(location))
    return SqliteStore.open(location, synchronous=synchronous, read_only=read_only)


def open_existing(location: str | Path) -> Store:
    """Open a record for writing. Raises the errors of `open_record`, and `StoreError` if it does not exist."""
    if not is_archive(location):
        open_record(location, read_only=True).close()
    return open_record(location)


def refuse_output(path: Path | None, *inputs: str | Path | None) -> None:
    """Raise `InvalidRequest` if a command that reads `inputs` must not write to the file `path`, unless it is None.

    The folder of `path` must exist. The file must not replace an input, a record's file, or a file in an input folder
    (except lockfiles and reports).
    """
    if path is None:
        return
    target = path.resolve()
    folder = target.parent
    if not folder.is_dir():
        raise InvalidRequest(f"{path} can't be written: {folder} does not exist; create it, or name a different file")
    named = target.name in (DATABASE_NAME, LOCK_NAME, MODEL_NAME) or target.name.startswith(f"{DATABASE_NAME}-")
    if (named and (folder / DATABASE_NAME).exists()) or any((parent / MARKER).exists() for parent in target.parents):
        raise InvalidRequest(f"{path} would replace a record's file; name a different file")
    for source in (Path(name) for name in inputs if name):
        if not (target.exists() and source.exists()):
            continue
        inside = source.resolve() in target.parents and target.suffix not in (".lock", ".html")
        if inside or target.samefile(source):
            raise InvalidRequest(f"{path} is an input of this command, which would replace it; name a different file")


def shown(location: str | Path) -> str:
    return without_password(str(location)) if is_url(str(location)) else shown_archive(str(location))


def served_model(location: str | Path, store: Store) -> ServedModel | None:
    return archived_model(str(location)) if is_archive(location) else store.served_model()


async def note_served_model(location: str | Path, store: Store, model: ServedModel) -> None:
    if isinstance(store, PostgresStore):
        await store.note_served_model(model)
    else:
        write_served_model(location, model)
