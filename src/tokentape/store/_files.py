"""Access folders and files at any path or URL that `fsspec` supports, and keep payloads there.

A payload outside the record is one file. Its row contains the file's location, which ends with the bytes' SHA-256, and
`packed` is `EXTERNAL` followed by the bytes' encoding. `fsspec` (extra `archive`) is imported on use.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar
from urllib.parse import quote
from zlib import crc32

from tokentape._durable import durable_file
from tokentape._session.payloads import narrowest, rows_as_bytes
from tokentape.errors import InvalidRequest, StoreCorrupt, StoreError
from tokentape.types import TurnPayload

if TYPE_CHECKING:
    from fsspec.implementations.dirfs import DirFileSystem

INSTALL = "pip install 'tokentape[archive]'"

EXTERNAL = "external 1 "
"""The prefix of `packed` for payloads whose bytes are in a file."""

_Record = TypeVar("_Record")


def open_folder(location: str, option: str = "to") -> DirFileSystem:
    """Return the folder at a path or URL. Raises `InvalidRequest` if a package to access it is missing."""
    try:
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem
    except ImportError:
        raise InvalidRequest(f"{location} needs fsspec, which is not installed; run: {INSTALL}", option) from None
    try:
        files, path = fsspec.core.url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise InvalidRequest(f"{location.partition('://')[0]}:// can't be reached: {error}", option) from None
    return DirFileSystem(path.rstrip("/"), files)


def write_file(folder: DirFileSystem, name: str, source: IO[bytes]) -> None:
    """Write `source` to the file `name`. On a local disk it is durable (fsynced) when this returns."""
    path = f"{folder.path}/{name}"
    if "file" in folder.fs.protocol:
        with durable_file(Path(path)) as sink:
            shutil.copyfileobj(source, sink)
    else:
        folder.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with folder.fs.open(path, "wb") as sink:
            shutil.copyfileobj(source, sink)


@dataclass(frozen=True, slots=True)
class ExternalPayload(TurnPayload):
    """A payload whose bytes are already in a file."""

    address: str = ""
    packed: str = ""
    crc32: int = 0


class PayloadFolder:
    """Writes payloads to a folder, before the rows that refer to them."""

    def __init__(self, location: str) -> None:
        """Raise `InvalidRequest` if a package is missing, or if a URL has a password, which every row would contain."""
        if re.search(r"://[^/@]*:[^/@]*@", location):
            message = "the URL has a password, which would be recorded; remove it, and set it in the environment"
            raise InvalidRequest(message, "payloads_to")
        self._folder = open_folder(location, "payloads_to")
        self._location = (location if "://" in location else str(Path(location).resolve())).rstrip("/")

    def write(self, records: Iterable[_Record]) -> list[_Record | ExternalPayload]:
        """Write the payloads among the records to files, and return the records. Raises `StoreError`."""
        return [self._write_payload(record) if isinstance(record, TurnPayload) else record for record in records]

    def _write_payload(self, record: TurnPayload) -> ExternalPayload:
        packed, data = rows_as_bytes(narrowest(record.rows))
        digest = hashlib.sha256(data).hexdigest()
        name = f"{_prefix(record.session_id)}{record.turn}-{quote(record.name, safe='')}-{digest}"
        try:
            write_file(self._folder, name, BytesIO(data))
        except Exception as error:  # each package has its own errors
            raise StoreError(f"can't write a payload to {self._location}; nothing was recorded: {error}") from error
        own = {field.name: getattr(record, field.name) for field in fields(record)}
        return ExternalPayload(**own, address=f"{self._location}/{name}", packed=packed, crc32=crc32(data))


def _prefix(session_id: str) -> str:
    return f"{hashlib.sha256(session_id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}-"


def read_payload(address: str) -> bytes:
    """Return the bytes in a payload's file. Raises `StoreCorrupt` if it is missing or was changed."""
    folder, _, name = address.rpartition("/")
    try:
        data: bytes = open_folder(folder).cat_file(name)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreCorrupt(f"the payload {address} is missing; restore it from a backup") from None
    except Exception as error:
        raise StoreError(f"the payload {address} can't be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != name.rpartition("-")[2]:
        raise StoreCorrupt(f"the payload {address} is not the file that was written: its hash is different")
    return data


def remove_payloads(session_id: str, addresses: Iterable[str]) -> None:
    """Remove a session's payload files, ignoring missing files. Raises `StoreError`."""
    parts = [address.rpartition("/") for address in addresses]
    for folder, _, name in parts:
        if not name.startswith(_prefix(session_id)):
            raise StoreCorrupt(
                f"session {session_id!r} was not deleted: its record names another session's file, {folder}/{name}"
            )
    for folder, _, name in parts:
        try:
            open_folder(folder).rm_file(name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Exception as error:
            raise StoreError(f"{folder}/{name} can't be removed, so the session was not deleted: {error}") from error
