"""Taking sessions out of a record into an archive: frozen, written, read back, and only then deleted.

It is custody's protocol with an archive as the consumer: a snapshot holds the sessions until what was written has been
read back and has the snapshot's digest. Cut off anywhere, the next call goes on where that one was.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from tokentape.durable import PART
from tokentape.errors import InvalidRequest, StoreCorrupt
from tokentape.store import snapshots
from tokentape.store.archive import (
    FORMAT,
    MARKER,
    Folder,
    Rows,
    contents_digest,
    run_name,
    session_rows,
    shown_archive,
    write_parts,
    written_sessions,
)
from tokentape.store.base import Store
from tokentape.store.custody import Custody
from tokentape.store.served_model import ServedModel
from tokentape.store.snapshots import Selection, Snapshot
from tokentape.version import __version__


class Custodian(Protocol):
    """Who takes snapshots of the record and drops sessions: this process, or a gateway that has the record open."""

    def take(self, selection: Selection, owner: str) -> int:
        """Freeze the selected sessions, for `owner` unless a key says whose they are; returns the snapshot's id.

        Raises `InvalidRequest` if there are none.
        """
        ...

    def confirm(self, snapshot_id: int, digest: str) -> None:
        """Say that the contents are safe."""
        ...

    def drop(self, snapshot_id: int) -> tuple[list[str], dict[str, str]]:
        """Delete the sessions; returns their ids, and why each other one was kept."""
        ...

    def release(self, snapshot_id: int) -> None:
        """Keep nothing for the snapshot any more."""
        ...


class OwnCustodian:
    """Takes snapshots in this process, which has the record open for writing."""

    def __init__(self, store: Store) -> None:
        self._custody = Custody(store)

    def take(self, selection: Selection, owner: str) -> int:
        """As `Custodian.take`."""
        return asyncio.run(self._custody.take(selection, owner, None)).snapshot_id

    def confirm(self, snapshot_id: int, digest: str) -> None:
        """As `Custodian.confirm`."""
        asyncio.run(self._custody.confirm(snapshot_id, None, digest))

    def drop(self, snapshot_id: int) -> tuple[list[str], dict[str, str]]:
        """As `Custodian.drop`."""
        return asyncio.run(self._custody.drop(snapshot_id, None))

    def release(self, snapshot_id: int) -> None:
        """As `Custodian.release`."""
        asyncio.run(self._custody.release(snapshot_id, None))


@dataclass(frozen=True, slots=True)
class Archived:
    """What was done."""

    runs: tuple[str, ...] = ()
    """Folders of the snapshots that were archived, those that had been begun before included."""
    sessions: int = 0
    deleted: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    """Sessions that were to be deleted and were not, and why."""


def archive_sessions(
    store: Store,
    custodian: Custodian,
    target: str,
    *,
    idle_seconds: float,
    delete: bool,
    model: ServedModel | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Archived:
    """Archive the sessions of `store` whose newest turn is `idle_seconds` old; with `delete` they are deleted then.

    `model` is which one the record was made with last, for those who read the archive.

    Sessions that are in the archive as they are now are not written again. One call at a time for a target: another one
    may take this one's snapshot for left behind, and this one ends with `Conflict`, nothing deleted.

    Raises `InvalidRequest` for a target that can't be reached or is something else, and `StoreCorrupt` if what is read
    back is not what was written: then nothing is deleted.
    """
    folder = Folder.at(target)
    found = folder.read_json(MARKER)
    if found not in (None, FORMAT) or (found is None and folder.files.exists(folder.path) and _holds(folder)):
        raise InvalidRequest(f"{shown_archive(target)} holds something else than an archive; name an empty place", "to")
    if found is None:
        folder.write(MARKER, json.dumps(FORMAT).encode())
    done = Archived()
    begun = list(_begun(store, folder))
    for snapshot in begun:
        if snapshot.state != "released":
            progress(f"going on with snapshot {snapshot.snapshot_id}")
            done = _and(done, _archive(store, custodian, folder, snapshot, delete, model, progress))
    owner = f"archive {folder.url}"
    known = {snapshot.snapshot_id for snapshot in begun}
    for snapshot in Custody(store).all(None):
        # Taken for this archive and never begun to be written: it would keep its sessions from ever being deleted.
        if snapshot.owner == owner and snapshot.state == "held" and snapshot.snapshot_id not in known:
            custodian.release(snapshot.snapshot_id)
    newest = max(known, default=None)
    # Of what was archived before, that which has changed; or everything, if it is to be deleted now.
    selection = Selection(idle_seconds=idle_seconds, since=None if delete else newest)
    try:
        snapshot_id = custodian.take(selection, owner)
    except InvalidRequest:
        return done
    snapshot = Custody(store).find(snapshot_id, None)
    return _and(done, _archive(store, custodian, folder, snapshot, delete, model, progress))


def _archive(
    store: Store,
    custodian: Custodian,
    folder: Folder,
    snapshot: Snapshot,
    delete: bool,
    model: ServedModel | None,
    progress: Callable[[str], None],
) -> Archived:
    assert snapshot.digest is not None
    name = run_name(snapshot.snapshot_id, snapshot.digest)
    run = folder.below(name)
    if run.read_json("manifest.json") is None:
        told = {"snapshot_id": snapshot.snapshot_id, "digest": snapshot.digest}
        run.write("begun.json", json.dumps(told).encode())
        written = written_sessions(run)
        for more in write_parts(_rows(store, snapshot.snapshot_id, set(written)), run, written):
            written += more
            progress(f"written {len(written)} sessions")
        progress("reading back")
        digest = contents_digest(run)
        if digest != snapshot.digest:
            raise StoreCorrupt(
                f"what was read back of {run.path} has digest {digest}, the snapshot has {snapshot.digest}; nothing "
                "was deleted. Delete that folder and archive again"
            )
        manifest = {**told, "sessions": len(written), "archived_at": time.time(), "tokentape": __version__}
        if model is not None:
            manifest["model"] = asdict(model)
        run.write("manifest.json", json.dumps(manifest, indent=1).encode())
    sessions = len(written_sessions(run))
    if not delete:
        custodian.release(snapshot.snapshot_id)
        return Archived((name,), sessions)
    if snapshot.state == "held":
        custodian.confirm(snapshot.snapshot_id, snapshot.digest)
    dropped, kept = custodian.drop(snapshot.snapshot_id)
    return Archived((name,), sessions, tuple(dropped), tuple(kept.items()))


def _rows(store: Store, snapshot_id: int, written: set[str]) -> Iterator[tuple[str, Rows]]:
    with store.reading() as connection:
        entries = snapshots.entries(connection, snapshot_id)
    for entry in entries:
        if entry.session_id not in written:
            # A transaction each: a long one would keep a running gateway's log from being recycled.
            with store.reading() as connection:
                rows = session_rows(connection, entry)
            yield entry.session_id, rows


def _begun(store: Store, folder: Folder) -> Iterator[Snapshot]:
    """The snapshots of this store that the archive has runs of."""
    known = {one.snapshot_id: one for one in Custody(store).all(None)}
    for name in folder.folders():
        begun = folder.below(name).read_json("begun.json")
        snapshot = None if begun is None else known.get(begun["snapshot_id"])
        if snapshot is not None and snapshot.digest == begun["digest"]:
            yield snapshot


def _holds(folder: Folder) -> bool:
    """Say whether there is anything in a folder besides the beginning of an archive that was cut off."""
    names = (found.rstrip("/").rpartition("/")[2] for found in folder.files.ls(folder.path, detail=False))
    return any(name != MARKER + PART for name in names)


def _and(one: Archived, other: Archived) -> Archived:
    return Archived(
        one.runs + other.runs, one.sessions + other.sessions, one.deleted + other.deleted, one.kept + other.kept
    )
