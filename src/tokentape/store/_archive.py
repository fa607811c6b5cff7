"""Archive a record: write snapshots as Parquet files, one per table, to a folder or object storage.

    TARGET/tokentape-archive.json       names the format
    TARGET/RUN/turns.parquet            a snapshot's rows, a file per table in `schema` that has rows
    TARGET/RUN/manifest.json            written last: sessions, digests, model

A run without a manifest was interrupted and is not read. For writing, sessions are copied to a temporary record, and
its tables to the files. For reading, the files are loaded into a temporary record, so every reader of records works.
`fsspec` and `pyarrow` (extra `archive`) are imported on use.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine, NullPool, create_engine, insert, select

from tokentape._batches import batched
from tokentape._durable import PART
from tokentape._session.arrow import parquet_library
from tokentape._session.jsonl import json_line
from tokentape._version import __version__
from tokentape.chat._media import image_parts
from tokentape.errors import InvalidRequest, StoreCorrupt
from tokentape.store import _schema as schema
from tokentape.store._base import Store
from tokentape.store._files import INSTALL, open_folder, write_file
from tokentape.store._postgres import is_url
from tokentape.store._reads import StoredSession
from tokentape.store._rows import Record
from tokentape.store._served_model import ServedModel, stored_vocabulary
from tokentape.store._snapshots import Selection, Snapshot, Snapshots
from tokentape.store._sqlite import DATABASE_NAME, SqliteStore

if TYPE_CHECKING:
    from fsspec.implementations.dirfs import DirFileSystem

MARKER, MANIFEST = "tokentape-archive.json", "manifest.json"
FORMAT = {"format": "tokentape-archive", "version": 2}

GROUP_BYTES = 16 * 2**20
"""The approximate size of a row group; only one is in memory at a time."""


def _below(folder: DirFileSystem, name: str) -> DirFileSystem:
    return type(folder)(f"{folder.path}/{name}", folder.fs)


def _names(folder: DirFileSystem) -> list[str]:
    return sorted(name.strip("/") for name in folder.ls("", detail=False)) if folder.exists("") else []


def _write_json(folder: DirFileSystem, name: str, value: Any) -> None:
    write_file(folder, name, BytesIO(json.dumps(value, indent=1).encode()))


def _read_json(folder: DirFileSystem, name: str) -> Any:
    """Return the contents of a JSON file; None if it does not exist. Raises `StoreCorrupt` if it is damaged."""
    try:
        return json.loads(folder.cat_file(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise StoreCorrupt(f"{folder.path}/{name} is damaged: it is not JSON; restore it from a backup") from None


def _manifests(folder: DirFileSystem) -> dict[str, Any]:
    """Return each finished run's manifest, oldest first. Raises `StoreCorrupt` if a manifest is damaged."""
    manifests = {}
    for name in _names(folder):
        manifest = None if name == MARKER else _read_json(_below(folder, name), MANIFEST)
        match manifest:
            case None:
                continue
            case {"schema_version": int(), "sessions": [*_], "files": dict(files), "model": None | dict()}:
                if all(isinstance(entry, dict) and "sha256" in entry for entry in files.values()):
                    manifests[name] = manifest
                    continue
        raise StoreCorrupt(f"{folder.path}/{name}/{MANIFEST} is damaged: it is not what `tokentape archive` writes")
    return manifests


def runs_without_manifest(location: str) -> list[str]:
    """Return the folders of runs that were interrupted, or that lost their manifest, which look the same."""
    folder = open_folder(location)
    finished = _manifests(folder)
    names = (name for name in _names(folder) if name not in finished and folder.isdir(name))
    return [name for name in names if any(file.endswith(".parquet") for file in _names(_below(folder, name)))]


def is_archive(location: str | Path) -> bool:
    """Return whether `location` is a URL that is not a database's, or a folder with an archive."""
    if is_url(str(location)):
        return False
    return "://" in str(location) or (Path(location) / MARKER).is_file()


def shown_archive(location: str) -> str:
    """Return the location with its password hidden. FTP and SSH URLs may contain one."""
    return re.sub(r"^(\w+://[^/:]*):[^/]*@", r"\1:***@", location)


class SnapshotClient:
    """Takes snapshots and drops sessions in a store that this process has open for writing."""

    def __init__(self, store: Store) -> None:
        self._snapshots = Snapshots(store)

    def take(self, selection: Selection, owner: str) -> int:
        return asyncio.run(self._snapshots.take(selection, owner, None)).snapshot_id

    def drop(self, snapshot_id: int, digest: str) -> tuple[list[str], dict[str, str]]:
        asyncio.run(self._snapshots.confirm(snapshot_id, None, digest))
        return asyncio.run(self._snapshots.drop(snapshot_id, None))

    def release(self, snapshot_id: int) -> None:
        asyncio.run(self._snapshots.release(snapshot_id, None))


@dataclass(frozen=True, slots=True)
class Archived:
    run: str | None = None
    """The folder that was written; None if no sessions needed archiving."""
    sessions: int = 0
    deleted: Sequence[str] = ()
    kept: Sequence[tuple[str, str]] = ()
    """(session id, reason) for each session that should have been deleted but was kept."""


def archive_sessions(
    store: Store,
    client: SnapshotClient,
    target: str,
    *,
    idle_seconds: float,
    delete: bool,
    model: ServedModel | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Archived:
    """Archive sessions with no new turn for `idle_seconds`, and then, with `delete`, delete them from `store`.

    `model` is the record's model. Without `delete`, sessions are skipped if the archive has their current state. If
    interrupted, call it again. Don't run two calls with the same target at once: the second call releases the first
    call's snapshot as a leftover, and the first call raises `Conflict` and deletes nothing.

    Raises `InvalidRequest` if the target can't be reached, is not an archive, has token ids of another vocabulary or
    another record's sessions with the same ids, and `StoreCorrupt` if the written files differ from the snapshot. In
    both cases nothing is deleted.
    """
    folder = open_folder(target)
    marker, begun = _read_json(folder, MARKER), _names(folder)
    killed = [name for name in begun if name.startswith(MARKER) and name.endswith(PART)]
    if marker not in (None, FORMAT) or (marker is None and killed != begun):
        raise InvalidRequest(f"{shown_archive(target)} is neither an archive nor empty; use an empty place", "to")
    if marker is None:
        for name in killed:
            folder.rm_file(name)
        _write_json(folder, MARKER, FORMAT)
    owner = f"archive {folder.fs.unstrip_protocol(folder.path)}"
    finished, newest = _manifests(folder), None
    with store.reading() as connection:
        vocabulary = stored_vocabulary(connection)
    others = {manifest.get("vocabulary") for manifest in finished.values()} - {None, vocabulary}
    if vocabulary is not None and others:
        raise InvalidRequest(
            f"{shown_archive(target)} has sessions of another tokenizer ({others.pop()}); this record's has "
            f"{vocabulary}. An archive keeps one vocabulary, so that its ids keep their meaning: use another place",
            "to",
        )
    of_others = dict(finished)
    for snapshot in Snapshots(store).all(None):
        name = _run_name(snapshot)
        of_others.pop(name, None)
        if snapshot.state == "held" and (snapshot.owner == owner or name in begun):
            # It is left over from an interrupted run. Its sessions are still in the record.
            client.release(snapshot.snapshot_id)
            if name in begun and name not in finished:
                folder.rm(name, recursive=True)
        newest = snapshot.snapshot_id if name in finished else newest
    try:
        snapshot_id = client.take(Selection(idle_seconds=idle_seconds, since=None if delete else newest), owner)
    except InvalidRequest:
        return Archived()
    snapshot = Snapshots(store).find(snapshot_id, None)
    assert snapshot.digest is not None
    session_ids = {session["session_id"] for session in (snapshot.contents or {})["sessions"]}
    same_ids = sorted(session_ids.intersection(chain.from_iterable(run["sessions"] for run in of_others.values())))
    if same_ids:
        client.release(snapshot_id)
        raise InvalidRequest(
            f"{shown_archive(target)} has {len(same_ids)} sessions with ids of this record that were not archived from "
            f"it, such as {same_ids[0]!r}. Only one of each could be read: use another place",
            "to",
        )
    name = _run_name(snapshot)
    _write_run(store, snapshot, _below(folder, name), model, vocabulary, progress)
    if not delete:
        client.release(snapshot_id)
        return Archived(name, len(session_ids))
    dropped, kept = client.drop(snapshot_id, snapshot.digest)
    return Archived(name, len(session_ids), dropped, tuple(kept.items()))


def _run_name(snapshot: Snapshot) -> str:
    """Return the folder name for a snapshot's run. Snapshots of other stores have different digests."""
    return f"{snapshot.snapshot_id:08d}-{(snapshot.digest or '')[:16]}"


def _write_run(
    store: Store,
    snapshot: Snapshot,
    run: DirFileSystem,
    model: ServedModel | None,
    vocabulary: str | None,
    progress: Callable[[str], None],
) -> None:
    with TemporaryDirectory(prefix="tokentape-archive-") as directory:
        session_ids = []
        with SqliteStore.open(directory, synchronous="NORMAL") as copy:
            for stored in Snapshots(store).sessions(snapshot.snapshot_id):
                session_ids.append(stored.info.session_id)
                progress(f"copying session {len(session_ids)}")
                asyncio.run(copy.write(*_records(store, stored)))
        manifest = {
            "schema_version": schema.VERSION,
            "snapshot_id": snapshot.snapshot_id,
            "digest": snapshot.digest,
            "sessions": session_ids,
            "files": _write_tables(Path(directory), run),
            "archived_at": time.time(),
            "tokentape": __version__,
            "model": model and asdict(model),
            "vocabulary": vocabulary,
        }
    progress("reading back")
    with TemporaryDirectory(prefix="tokentape-archive-") as directory:
        _load(Path(directory), [(run, manifest, set(session_ids))])
        _check_copy(Path(directory), session_ids, snapshot.digest, run.path)
    _write_json(run, MANIFEST, manifest)


def _check_copy(directory: Path, session_ids: Sequence[str], digest: str | None, where: str) -> None:
    """Raise `StoreCorrupt` unless the record has these sessions and this digest, and passes `verify`."""
    from tokentape.store._verify import verify  # it reads archives too

    hasher, copied_ids = hashlib.sha256(), []
    with SqliteStore.open(directory, read_only=True) as read:
        for stored in read.iter_sessions(per_token=True, together=True):
            copied_ids.append(stored.info.session_id)
            for trajectory in stored.trajectories():
                hasher.update(json_line(trajectory))
    problems = [str(finding) for finding in verify(directory).findings]
    if copied_ids != session_ids or hasher.hexdigest() != digest or problems:
        raise StoreCorrupt(
            f"the sessions in {where} have digest {hasher.hexdigest()}, but the snapshot has {digest}; "
            f"{'; '.join([*problems[:3], 'nothing was deleted'])}. Delete that folder and archive again"
        )


def _records(store: Store, stored: StoredSession) -> list[Record]:
    """Return all records in a session, in an order in which they can be written."""
    images = image_parts(message for turn in stored.turns for message in turn.messages)
    hashes = dict.fromkeys(part[name] for part in images for name in ("sha256", "settings"))
    media = [store.load_media(stored.info.session_id, sha256) for sha256 in hashes]
    later: tuple[Record, ...] = *stored.answers, *stored.rewards, *stored.events, *stored.columns, *stored.payloads
    return [stored.info, *stored.setups.values(), *media, *stored.turns, *later]


def _write_tables(directory: Path, run: DirFileSystem) -> dict[str, Any]:
    """Write the tables in the database in `directory` to a run. Return the row count and SHA-256 of each file."""
    pq = parquet_library(INSTALL)
    import pyarrow as pa

    files = {}
    types = {int: pa.int64(), float: pa.float64(), bytes: pa.large_binary(), str: pa.large_string()}
    with _engine(directory).connect() as connection:
        for table in schema.metadata.sorted_tables:
            rows = connection.execution_options(yield_per=100).execute(select(table).order_by(*table.primary_key))
            path, count = directory / f"{table.name}.parquet", 0
            kinds = pa.schema([(column.name, types[column.type.python_type]) for column in table.columns])
            with pq.ParquetWriter(path, kinds, compression="zstd") as writer:
                for group in batched(map(dict, rows.mappings()), GROUP_BYTES, _size_of):
                    writer.write_table(pa.Table.from_pylist(group, kinds))
                    count += len(group)
            if count and table is not schema.meta:
                with open(path, "rb") as file:
                    files[path.name] = {"rows": count, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
                    file.seek(0)
                    write_file(run, path.name, file)
            path.unlink()
    return files


def _size_of(row: Mapping[str, Any]) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str | bytes))


def _engine(directory: Path) -> Engine:
    return create_engine(URL.create("sqlite", database=str(directory / DATABASE_NAME)), poolclass=NullPool)


@contextmanager
def restored(location: str) -> Iterator[Path]:
    """Yield a temporary data directory with an archive's sessions.

    A session that was archived several times has its last state. Raises `InvalidRequest` if there is no archive, and
    `StoreCorrupt` if it is damaged or in an unsupported version.
    """
    target = open_folder(location)
    marker = _read_json(target, MARKER)
    where = shown_archive(location)
    if marker is None:
        message = f"{where} is not an archive: it has no {MARKER}; name the target of `tokentape archive --to`"
        raise InvalidRequest(message, "store")
    if marker != FORMAT:
        raise StoreCorrupt(f"{where} is an archive in format {marker}, but this Tokentape reads {FORMAT}")
    runs: list[tuple[DirFileSystem, Any, set[str]]] = []
    seen: set[str] = set()
    for name, manifest in reversed(_manifests(target).items()):
        runs.insert(0, (_below(target, name), manifest, set(manifest["sessions"]) - seen))
        seen.update(manifest["sessions"])
    with TemporaryDirectory(prefix="tokentape-archive-") as directory:
        _load(Path(directory), runs)
        yield Path(directory)


def archived_model(location: str) -> ServedModel | None:
    """Return the newest run's model; None if it is unknown. Raises `InvalidRequest` if a package is missing."""
    models = [manifest["model"] for manifest in _manifests(open_folder(location)).values()]
    return ServedModel(**models[-1]) if models and models[-1] else None


def open_archive(location: str) -> SqliteStore:
    """Return a read-only store over a temporary copy of the archive. Raises the errors of `restored`."""
    with ExitStack() as undo:
        store = SqliteStore.open(undo.enter_context(restored(location)), read_only=True)
        store.keep_until_closed(undo.pop_all())
    return store


def _load(directory: Path, runs: Sequence[tuple[DirFileSystem, Any, set[str]]]) -> None:
    """Create a database with the given sessions of each run."""
    with _engine(directory).begin() as connection:
        schema.prepare(connection)
        expected: set[str] = set()
        for run, manifest, session_ids in runs:
            if (version := manifest["schema_version"]) > schema.VERSION:
                later = f"was written by a later release, with schema version {version}"
                raise StoreCorrupt(f"{run.path} {later}; this release reads {schema.VERSION}; upgrade Tokentape")
            expected |= session_ids
            for table in schema.metadata.sorted_tables:
                name = f"{table.name}.parquet"
                # Runs can share setups and media.
                shared = "session_id" not in table.c
                for rows in _read(run, name, manifest["files"].get(name), directory):
                    own = [row for row in rows if shared or row["session_id"] in session_ids]
                    for row in own:
                        # Rows get new positions in this database.
                        row.pop("position", None)
                    if own:
                        connection.execute(insert(table).prefix_with("OR IGNORE" if shared else ""), own)
        missing = sorted(expected - set(connection.execute(select(schema.sessions.c.session_id)).scalars()))
        if missing:
            raise StoreCorrupt(
                f"the archive is incomplete: {len(missing)} sessions of its manifests are in no file, such as "
                f"{missing[0]!r}; restore it from a backup"
            )


def _read(run: DirFileSystem, name: str, about: Any, directory: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield a file's rows, one row group at a time. Raises `StoreCorrupt` if its hash differs from the manifest's."""
    pq = parquet_library(INSTALL)
    if about is None:
        return
    path = directory / name
    try:
        run.get_file(name, str(path))
    except FileNotFoundError:
        raise StoreCorrupt(f"{run.path}/{name} is missing; restore it from a backup") from None
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
            raise StoreCorrupt(f"{run.path}/{name} is not the file that was written: its hash is different")
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group).to_pylist()
    path.unlink()
