"""An archive of a record: Parquet files with hashes, in a folder or on object storage, written from snapshots.

    TARGET/tokentape-archive.json       says what this is
    TARGET/RUN/begun.json               a run: one snapshot, named by its id and its digest
    TARGET/RUN/00000/turns.parquet      a part: the rows of some sessions, a file per table
    TARGET/RUN/00000.json               its manifest, written behind its files: sessions, SHA-256 of each file
    TARGET/RUN/manifest.json            written when all parts have been read back and were found to be the snapshot

A run that was cut off goes on at the part that it had come to. Rows are those of `schema`, so an archive is read by
putting them into a database again: whatever reads a record reads an archive.

`fsspec` (extra `archive`) and `pyarrow` are imported on first use.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Column, Connection, Double, Integer, LargeBinary, Table, insert, select

from tokentape.durable import write_durably
from tokentape.errors import Conflict, InvalidRequest, StoreCorrupt
from tokentape.session.jsonl import json_line
from tokentape.store import schema
from tokentape.store.driver import passing_engine
from tokentape.store.reads import batched
from tokentape.store.served_model import ServedModel
from tokentape.store.snapshots import Entry
from tokentape.store.sqlite import DATABASE_NAME, SqliteStore

if TYPE_CHECKING:
    import pyarrow as pa
    from fsspec import AbstractFileSystem

MARKER = "tokentape-archive.json"
FORMAT = {"format": "tokentape-archive", "version": 1}

PART_BYTES = 64 * 2**20
"""About how many bytes of rows a part has."""

_SHARED = (schema.setups, schema.media)
_OF_SESSION = (
    schema.sessions,
    schema.turns,
    schema.answers,
    schema.rewards,
    schema.events,
    schema.token_columns,
    schema.token_payloads,
    schema.turn_media,
)
TABLES = (*_SHARED, *_OF_SESSION)
"""In an order in which each refers to those before it only."""

Rows = dict[str, list[dict[str, Any]]]
"""Rows of a part, by table."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A place on a file system or object storage."""

    files: AbstractFileSystem
    path: str

    @classmethod
    def at(cls, location: str) -> Folder:
        """The folder that a path or URL names. Raises `InvalidRequest` if there is nothing to reach it by."""
        try:
            import fsspec
        except ImportError:
            raise InvalidRequest("archives need fsspec: pip install 'tokentape[archive]'", "to") from None
        try:
            files, path = fsspec.core.url_to_fs(location)
        except (ImportError, ValueError) as error:
            raise InvalidRequest(f"{location.partition('://')[0]}:// can't be reached: {error}", "to") from None
        return cls(files, path.rstrip("/"))

    @property
    def url(self) -> str:
        """Where it is, however it was named."""
        found: str = self.files.unstrip_protocol(self.path)
        return found

    def below(self, name: str) -> Folder:
        """A folder in this one."""
        return Folder(self.files, f"{self.path}/{name}")

    def write(self, name: str, data: bytes) -> None:
        """Write a file, all of it or, on storage that can, nothing. On a disk it is durable when this returns."""
        from fsspec.implementations.local import LocalFileSystem

        path = f"{self.path}/{name}"
        if isinstance(self.files, LocalFileSystem):
            write_durably(Path(path), data)
            return
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(path, data)

    def read(self, name: str) -> bytes | None:
        """A file's bytes; None if there is none."""
        try:
            data: bytes = self.files.cat_file(f"{self.path}/{name}")
        except FileNotFoundError:
            return None
        return data

    def read_json(self, name: str) -> Any:
        """What a JSON file holds; None if there is none. Raises `StoreCorrupt` if it is damaged."""
        data = self.read(name)
        try:
            return None if data is None else json.loads(data)
        except ValueError:
            raise StoreCorrupt(f"{self.path}/{name} is damaged") from None

    def folders(self) -> list[str]:
        """Names of the folders in this one, sorted."""
        if not self.files.exists(self.path):
            return []
        found = self.files.ls(self.path, detail=True)
        return sorted(one["name"].rstrip("/").rpartition("/")[2] for one in found if one["type"] == "directory")


def is_archive(location: str | Path) -> bool:
    """Say whether `location` is one of an archive: a URL, or a folder that says so."""
    return "://" in str(location) or (Path(location) / MARKER).is_file()


def shown_archive(location: str) -> str:
    """The location without a password, as URLs of FTP or SSH may have one."""
    scheme, mark, rest = location.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    name, colon, _ = user.partition(":")
    return f"{scheme}{mark}{name}:***@{host}{slash}{path}" if at and colon else location


def run_name(snapshot_id: int, digest: str) -> str:
    """The folder of a snapshot's run. Snapshots of another store have another digest."""
    return f"{snapshot_id:08d}-{digest[:16]}"


# Writing


def write_parts(connection_rows: Iterator[tuple[str, Rows]], run: Folder, skip: Collection[str]) -> Iterator[list[str]]:
    """Write the rows of sessions in parts; yields the ids of the sessions of each part once it is written.

    `connection_rows` gives session ids with their rows. Sessions in `skip` are in earlier parts.
    """
    number = _parts(run)
    some: Rows = {table.name: [] for table in TABLES}
    ids: list[str] = []
    size = 0
    for session_id, rows in connection_rows:
        if session_id in skip:
            continue
        ids.append(session_id)
        for name, more in rows.items():
            some[name] += more
            size += sum(len(value) for row in more for value in row.values() if isinstance(value, str | bytes))
        if size >= PART_BYTES:
            _write_part(run, number, ids, some)
            yield ids
            number, ids, size, some = number + 1, [], 0, {table.name: [] for table in TABLES}
    if ids:
        _write_part(run, number, ids, some)
        yield ids


def _write_part(run: Folder, number: int, session_ids: Sequence[str], rows: Rows) -> None:
    import pyarrow.parquet as pq
    from pyarrow import BufferOutputStream
    from pyarrow import Table as ArrowTable

    files = []
    for table in TABLES:
        key = [column.name for column in table.primary_key]
        # What sessions share is there once.
        own = list({tuple(row[name] for name in key): row for row in rows[table.name]}.values())
        sink = BufferOutputStream()
        pq.write_table(ArrowTable.from_pylist(own, _arrow_schema(table)), sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        name = f"{number:05d}/{table.name}.parquet"
        run.write(name, data)
        files.append({"name": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "rows": len(own)})
    manifest = {"schema_version": len(schema.MIGRATIONS) + 1, "sessions": list(session_ids), "files": files}
    run.write(f"{number:05d}.json", json.dumps(manifest, indent=1).encode())


def session_rows(connection: Connection, entry: Entry) -> Rows:
    """The rows of one session of a snapshot, as they were then. Raises `Conflict` if it has been deleted."""
    extent = entry.extent
    limits = {
        schema.sessions: schema.sessions.c.position == extent.position,
        schema.turns: schema.turns.c.seq < extent.turns,
        schema.answers: schema.answers.c.first_turn < extent.turns,
        schema.rewards: schema.rewards.c.position <= extent.last_reward,
        schema.events: schema.events.c.position <= extent.last_event,
        schema.token_columns: schema.token_columns.c.position <= extent.last_column,
        schema.token_payloads: schema.token_payloads.c.turn < extent.turns,
        schema.turn_media: schema.turn_media.c.turn < extent.turns,
    }
    rows: Rows = {}
    for table in _OF_SESSION:
        statement = select(table).where(table.c.session_id == entry.session_id, limits[table])
        rows[table.name] = [dict(row) for row in connection.execute(statement.order_by(*table.primary_key)).mappings()]
    if not rows[schema.sessions.name]:
        raise Conflict(f"session {entry.session_id!r} was deleted since the snapshot was taken")
    for table, column, of in (
        (schema.setups, schema.setups.c.digest, {row["setup"] for row in rows[schema.turns.name]}),
        (schema.media, schema.media.c.sha256, {row["sha256"] for row in rows[schema.turn_media.name]}),
    ):
        rows[table.name] = [
            dict(row)
            for some in batched(sorted(of), 500)
            for row in connection.execute(select(table).where(column.in_(some))).mappings()
        ]
    return rows


# Reading back


def _parts(run: Folder) -> int:
    """How many parts of a run are written."""
    number = 0
    while run.files.exists(f"{run.path}/{number:05d}.json"):
        number += 1
    return number


def written_sessions(run: Folder) -> list[str]:
    """The sessions of all parts that are written, in order."""
    return [one for number in range(_parts(run)) for one in _part_manifest(run, number)["sessions"]]


def contents_digest(run: Folder) -> str:
    """Read a run back, file by file against its hashes, and return the digest of its trajectories.

    Raises `StoreCorrupt` for a file that is missing or is not the one that was written.
    """
    hasher = hashlib.sha256()
    for number in range(_parts(run)):
        with tempfile.TemporaryDirectory(prefix="tokentape-archive-") as directory:
            manifest = _part_manifest(run, number)
            _make_database(Path(directory), [(run, number, set(manifest["sessions"]))])
            with SqliteStore.open(directory, read_only=True) as store:
                for session_id in manifest["sessions"]:
                    for one in store.load_session(session_id, per_token=True).trajectories():
                        hasher.update(json_line(one))
    return hasher.hexdigest()


@contextmanager
def restored(location: str, session_ids: Collection[str] | None = None) -> Iterator[Path]:
    """A data directory with the sessions of an archive, of all if None, for as long as the context lasts.

    Of a session that was archived several times it has what was archived last. Raises `InvalidRequest` if there is no
    archive, and `StoreCorrupt` for one that is damaged.
    """
    target = Folder.at(location)
    found = target.read_json(MARKER)
    if found is None:
        raise InvalidRequest(
            f"{shown_archive(location)} is no archive: it has no {MARKER}; name what `tokentape archive --to` wrote to",
            "store",
        )
    if found != FORMAT:
        raise StoreCorrupt(
            f"{shown_archive(location)} is an archive of another version: {found}, this Tokentape reads {FORMAT}"
        )
    chosen: list[tuple[Folder, int, set[str]]] = []
    seen: set[str] = set()
    for name in reversed(target.folders()):
        run = target.below(name)
        if run.read_json("manifest.json") is None:
            continue  # not finished
        for number in reversed(range(_parts(run))):
            wanted = set(_part_manifest(run, number)["sessions"]) - seen
            seen |= wanted
            if session_ids is not None:
                wanted &= set(session_ids)
            if wanted:
                chosen.append((run, number, wanted))
    with tempfile.TemporaryDirectory(prefix="tokentape-archive-") as directory:
        _make_database(Path(directory), chosen[::-1])
        yield Path(directory)


def archived_model(location: str) -> ServedModel | None:
    """Which model the newest run's record was made with; None if nothing says so. Raises `InvalidRequest`."""
    target = Folder.at(location)
    manifests = (target.below(name).read_json("manifest.json") for name in reversed(target.folders()))
    newest = next((manifest for manifest in manifests if manifest is not None), None)
    return ServedModel(**newest["model"]) if newest is not None and "model" in newest else None


def open_archive(location: str) -> SqliteStore:
    """A store that can only be read, over a copy of the archive that goes away with it. Raises as `restored`."""
    with ExitStack() as undo:
        directory = undo.enter_context(restored(location))
        store = SqliteStore.open(directory, read_only=True)
        store.keep_until_closed(undo.pop_all())
    return store


def _make_database(directory: Path, parts: Sequence[tuple[Folder, int, set[str]]]) -> None:
    """Put the rows of some sessions of some parts into the database of a new data directory."""
    known: set[tuple[str, str]] = set()
    with passing_engine(directory / DATABASE_NAME).connect() as connection:
        with connection.begin():
            schema.prepare(connection)
        for run, number, wanted in parts:
            with connection.begin():
                files = {one["name"].rpartition("/")[2]: one for one in _part_manifest(run, number)["files"]}
                for table in TABLES:
                    if table is schema.events and f"{table.name}.parquet" not in files:
                        continue  # archived before there were any
                    rows = _rows(run, files[f"{table.name}.parquet"])
                    if table in _SHARED:
                        (key,) = table.primary_key
                        rows = [row for row in rows if (table.name, row[key.name]) not in known]
                        known |= {(table.name, row[key.name]) for row in rows}
                    else:
                        rows = [_unplaced(row) for row in rows if row["session_id"] in wanted]
                    if rows:
                        connection.execute(insert(table), rows)


def _unplaced(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without its rank among all rows of its table, which is another one here."""
    return {name: value for name, value in row.items() if name != "position"}


def _rows(run: Folder, file: Mapping[str, Any]) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq
    from pyarrow import BufferReader

    data = run.read(file["name"])
    if data is None:
        raise StoreCorrupt(f"{run.path}/{file['name']} is missing")
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise StoreCorrupt(f"{run.path}/{file['name']} is not the file that was written: its hash is another")
    rows: list[dict[str, Any]] = pq.read_table(BufferReader(data)).to_pylist()
    return rows


def _part_manifest(run: Folder, number: int) -> Any:
    manifest = run.read_json(f"{number:05d}.json")
    current = len(schema.MIGRATIONS) + 1
    if manifest is None or manifest["schema_version"] > current:
        raise StoreCorrupt(
            f"part {number} of {run.path} is missing, or was written by a later release than this one, "
            f"which reads schema version {current}"
        )
    return manifest


def _arrow_schema(table: Table) -> pa.Schema:
    import pyarrow as pa

    def kind(column: Column[Any]) -> pa.DataType:
        match column.type:
            case Integer() | BigInteger():
                return pa.int64()
            case Double():
                return pa.float64()
            case LargeBinary():
                return pa.large_binary()
        return pa.string()

    return pa.schema([pa.field(column.name, kind(column), nullable=bool(column.nullable)) for column in table.columns])
