"""Take snapshots: exported sessions are kept until the consumer confirms that the export is safe.

A snapshot is taken, read as often as needed, and confirmed with the digest of its contents. Only then can its sessions
be dropped. For each session, it stores the number of turns and the last reward, column and event that belong to it.
Records are only appended, so a snapshot always has the same contents, even if its sessions grow. Sessions that have
changed since are not dropped, and a dropped session's id is never reused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from sqlalchemy import Connection, Row, func, insert, literal, select, update

from tokentape._batches import batched
from tokentape._canonical import canonical_json
from tokentape._session.jsonl import json_line
from tokentape.errors import Conflict, InvalidRequest, NotFound, StoreCorrupt
from tokentape.store import _schema as schema
from tokentape.store._base import Store
from tokentape.store._listing import EXTENT_COLUMNS, extent_of, of_turns
from tokentape.store._reads import Extent, StoredSession
from tokentape.store._writes import TOMBSTONE, delete_rows, holder_of
from tokentape.types import Trajectory

_Result = TypeVar("_Result")

State: TypeAlias = Literal["held", "confirmed", "released"]
"""`held`: its sessions are kept; `confirmed`: they may be dropped; `released`: it no longer keeps anything."""

_BATCH = 500
"""The number of sessions per statement, because the number of parameters is limited."""


@dataclass(frozen=True, slots=True)
class Selection:
    session_ids: tuple[str, ...] | None = None
    since: int | None = None
    """Only sessions that have changed since this snapshot and the snapshots on which it was based (its own `since`)."""
    idle_seconds: float | None = None
    """Only sessions without a turn in this many last seconds."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Only sessions with these keys and values in their metadata."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    snapshot_id: int
    owner: str
    created_at: float
    """Unix seconds."""
    since: int | None
    state: State
    digest: str | None
    """The hex SHA-256 of the contents as JSON lines; None until they are first read."""
    contents: Mapping[str, Any] | None
    """Counts, and each session's turns and leaves; None while `digest` is None."""


_DROPPED_AT_ONCE = 50
"""The number of sessions dropped per transaction. Commits of turns wait for each transaction."""


class Snapshots:
    """The snapshots in a store. Await async methods on an event loop. The others block and can run in any thread.

    The `owner` argument is the name of the caller's API key, or None for a key that may see everything. All methods
    raise `NotFound` if a snapshot does not exist or belongs to a different key.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def take(self, selection: Selection, owner: str, sees: str | None) -> Snapshot:
        """Take a snapshot of the selected sessions that `sees` may see. Raises `InvalidRequest` if none is selected."""
        now = time.time()
        session_ids = await asyncio.to_thread(self._reading, select_sessions, selection, sees, now)
        if not session_ids:
            raise InvalidRequest("no session is selected, so the snapshot would be empty; change the selection")
        snapshot_ids: list[int] = []

        def freeze(connection: Connection) -> None:
            snapshot_ids[:] = [_freeze(connection, session_ids, owner, selection.since, now)]

        await self._store.transact(freeze)
        return await self.snapshot(snapshot_ids[0], owner)

    async def snapshot(self, snapshot_id: int, owner: str | None) -> Snapshot:
        """Return a snapshot with its digest. The first call reads all contents to compute the digest.

        Raises `NotFound`, and `Conflict` if the snapshot is released or a session deleted meanwhile.
        """
        snapshot = await asyncio.to_thread(self.find, snapshot_id, owner)
        if snapshot.digest is not None or snapshot.state == "released":
            return snapshot
        digest, contents = await asyncio.to_thread(self._read, snapshot_id)
        data = zlib.compress(canonical_json(contents).encode("ascii"))
        await self._update(snapshot_id, digest=digest, contents=data)
        return await asyncio.to_thread(self.find, snapshot_id, owner)

    def find(self, snapshot_id: int, owner: str | None) -> Snapshot:
        return self._reading(_load, snapshot_id, owner)

    def all(self, owner: str | None) -> list[Snapshot]:
        table = schema.snapshots
        conditions = [] if owner is None else [table.c.owner == owner]
        with self._store.reading() as connection:
            rows = connection.execute(select(table).where(*conditions).order_by(table.c.snapshot_id))
            return [decode_snapshot(row) for row in rows]

    def trajectories(self, snapshot_id: int) -> Iterator[Trajectory]:
        """Yield the snapshot's trajectories, the same in each call. Raises the errors of `sessions`."""
        for stored in self.sessions(snapshot_id):
            yield from stored.trajectories()

    def sessions(self, snapshot_id: int) -> Iterator[StoredSession]:
        """Yield the sessions as of the snapshot, one at a time. Raises `Conflict` if it or a session is gone."""
        if self.find(snapshot_id, None).state == "released":
            raise Conflict(f"snapshot {snapshot_id} was released: its contents are gone; take a new snapshot")
        for session_id, extent in self._reading(extents_of, snapshot_id).items():
            try:
                yield self._store.load_session(session_id, per_token=True, extent=extent)
            except NotFound:
                raise Conflict(
                    f"session {session_id!r} of snapshot {snapshot_id} was deleted; take a new snapshot"
                ) from None

    async def confirm(self, snapshot_id: int, owner: str | None, digest: str) -> None:
        """Record that the consumer has stored the contents safely. Raises `Conflict` if the digest is different."""
        await self.snapshot(snapshot_id, owner)

        def confirm(connection: Connection) -> None:
            snapshot = _load(connection, snapshot_id, None)
            if snapshot.state == "released":
                raise Conflict(f"snapshot {snapshot_id} was released; take a new snapshot")
            if snapshot.digest != digest:
                raise Conflict(
                    f"snapshot {snapshot_id} has digest {snapshot.digest}, but the client confirmed another one: "
                    "its copy is corrupt or of a different snapshot; download it again, then confirm"
                )
            _update(connection, snapshot_id, state="confirmed")

        await self._store.transact(confirm, again=confirm)

    async def drop(
        self, snapshot_id: int, owner: str | None, in_use: Collection[str] = ()
    ) -> tuple[list[str], dict[str, str]]:
        """Delete the sessions in a confirmed snapshot, then release it.

        Return the deleted sessions, and the reason for each session that was kept: it has changed since, a different
        snapshot holds it, or it is `in_use`. It can be called again: a released snapshot deletes nothing. Raises
        `Conflict` if the snapshot is not confirmed.
        """
        await asyncio.to_thread(self.find, snapshot_id, owner)
        extents = await asyncio.to_thread(self._reading, extents_of, snapshot_id)
        reasons = {session_id: "in use" for session_id in extents if session_id in in_use}
        free = [session_id for session_id in extents if session_id not in reasons]
        for start in range(0, max(len(free), 1), _DROPPED_AT_ONCE):
            chunk = {session_id: extents[session_id] for session_id in free[start : start + _DROPPED_AT_ONCE]}

            def drop(connection: Connection, chunk: Mapping[str, Extent] = chunk) -> None:
                reasons.update(_drop_sessions(connection, snapshot_id, chunk, time.time()))

            await self._store.transact(drop, again=drop)
        await self._update(snapshot_id, state="released")
        return [session_id for session_id in extents if session_id not in reasons], reasons

    async def release(self, snapshot_id: int, owner: str | None) -> None:
        """Release a snapshot: its contents are no longer kept. Its sessions are not deleted."""
        await asyncio.to_thread(self.find, snapshot_id, owner)
        await self._update(snapshot_id, state="released")

    def dropped_of(self, session_id: str) -> str | None:
        """Return the owner of the dropped session with this id; None if no such session was dropped."""
        with self._store.reading_once() as connection:
            dropped = TOMBSTONE.run(connection, {"session_id": session_id})
            return None if dropped is None else str(dropped[1])

    async def _update(self, snapshot_id: int, **values: Any) -> None:
        # Idempotent: after a lost connection it can run again, whether or not it was committed.
        work = partial(_update, snapshot_id=snapshot_id, **values)
        await self._store.transact(work, again=work)

    def _reading(self, read: Callable[..., _Result], *arguments: Any) -> _Result:
        with self._store.reading() as connection:
            return read(connection, *arguments)

    def _read(self, snapshot_id: int) -> tuple[str, dict[str, Any]]:
        """Read a snapshot's trajectories. Return (digest of their lines, fields of the manifest)."""
        hasher, sessions = hashlib.sha256(), []
        columns, payloads, verdicts = set[str](), set[str](), Counter[str]()
        tokens = trained_tokens = 0
        for stored in self.sessions(snapshot_id):
            leaves = []
            for trajectory in stored.trajectories():
                hasher.update(json_line(trajectory))
                verdicts[trajectory.verdict] += 1
                tokens += len(trajectory.token_ids)
                trained_tokens += int(trajectory.loss_mask.sum())
                columns.update(trajectory.columns)
                payloads.update(trajectory.payloads)
                leaf = {
                    "turn": trajectory.leaf,
                    "digest": stored.turns[trajectory.leaf].digest,
                    "verdict": trajectory.verdict,
                    "tokens": len(trajectory.token_ids),
                }
                leaves.append(leaf)
            sessions.append({"session_id": stored.info.session_id, "turns": len(stored.turns), "leaves": leaves})
        return hasher.hexdigest(), {
            "trajectories": verdicts.total(),
            "tokens": tokens,
            "trained_tokens": trained_tokens,
            "verdicts": dict(sorted(verdicts.items())),
            "columns": sorted(columns),
            "payloads": sorted(payloads),
            "sessions": sessions,
        }


def select_sessions(connection: Connection, selection: Selection, owner: str | None, now: float) -> list[str]:
    """Return the selected sessions' ids, in order of creation. Raises `NotFound` if `owner` does not own one."""
    old_extents = {} if selection.since is None else _newest_extents(connection, selection.since, owner)
    session_ids = None if selection.session_ids is None else set(selection.session_ids)
    chosen, seen = [], set()
    for row in connection.execute(_NOW if owner is None else _NOW.where(schema.sessions.c.owner == owner)):
        if session_ids is not None and row.session_id not in session_ids:
            continue
        seen.add(row.session_id)
        newest = row.created_at if row.newest_turn is None else row.newest_turn
        if selection.idle_seconds is not None and now - newest < selection.idle_seconds:
            continue
        if not _matches(json.loads(row.metadata), selection.metadata):
            continue
        if row.position not in old_extents or extent_of(row) != old_extents[row.position]:
            chosen.append(row.session_id)
    for missing in sorted((session_ids or set()) - seen):
        raise NotFound(f"there is no session {missing!r}")
    return chosen


def _freeze(connection: Connection, session_ids: Iterable[str], owner: str, since: int | None, now: float) -> int:
    """Insert a held snapshot of these sessions in their current state. Return its id."""
    values = {"owner": owner, "created_at": now, "since": since, "state": "held"}
    key = connection.execute(insert(schema.snapshots), values).inserted_primary_key
    assert key is not None
    snapshot_id: int = key[0]
    for chunk in batched(session_ids, _BATCH):
        state = _NOW.where(schema.sessions.c.session_id.in_(chunk)).subquery()
        rows = select(literal(snapshot_id), *(state.c[name] for name in schema.snapshot_sessions.c.keys()[1:]))
        connection.execute(insert(schema.snapshot_sessions).from_select(schema.snapshot_sessions.c.keys(), rows))
    return snapshot_id


def _load(connection: Connection, snapshot_id: int, owner: str | None) -> Snapshot:
    """Load a snapshot. Raises `NotFound` if it is missing or belongs to a different key, and `StoreCorrupt`."""
    row = connection.execute(
        select(schema.snapshots).where(schema.snapshots.c.snapshot_id == snapshot_id)
    ).one_or_none()
    if row is None or owner not in (None, row.owner):
        raise NotFound(f"there is no snapshot {snapshot_id}")
    return decode_snapshot(row)


def decode_snapshot(row: Row[Any]) -> Snapshot:
    """Decode a row from `schema.snapshots`. Raises `StoreCorrupt` if the row is invalid."""
    try:
        if row.state not in ("held", "confirmed", "released"):
            raise ValueError("unknown state")
        contents = None if row.contents is None else json.loads(zlib.decompress(row.contents))
        return Snapshot(row.snapshot_id, row.owner, float(row.created_at), row.since, row.state, row.digest, contents)
    except (TypeError, ValueError, RecursionError, zlib.error) as error:
        raise StoreCorrupt(f"snapshot {row.snapshot_id!r} can't be read ({type(error).__name__})") from error


def extents_of(connection: Connection, snapshot_id: int) -> dict[str, Extent]:
    """Map the ids of a snapshot's sessions, in order of creation, to the part of the session in the snapshot."""
    table = schema.snapshot_sessions
    rows = connection.execute(select(table).where(table.c.snapshot_id == snapshot_id).order_by(table.c.position))
    return {row.session_id: extent_of(row) for row in rows}


def _drop_sessions(
    connection: Connection, snapshot_id: int, extents: Mapping[str, Extent], now: float
) -> dict[str, str]:
    """Delete the sessions that may be deleted, and return the reason for each session that is kept.

    A session that has not changed since the confirmed snapshot is deleted and leaves a tombstone. Raises `Conflict` if
    the snapshot is not confirmed.
    """
    state = _load(connection, snapshot_id, None).state
    if state == "held":
        raise Conflict(f"snapshot {snapshot_id} is not confirmed; confirm it with its digest once its data are safe")
    reasons: dict[str, str] = {}
    for session_id, extent in extents.items():
        row = connection.execute(_NOW.where(schema.sessions.c.position == extent.position)).one_or_none()
        if row is None:
            continue
        holder = holder_of(connection, session_id, besides=snapshot_id)
        if extent_of(row) != extent:
            reasons[session_id] = "changed since the snapshot"
        elif holder is not None:
            reasons[session_id] = f"held by snapshot {holder}"
        elif state == "released":
            reasons[session_id] = "the snapshot was released"
        else:
            delete_rows(connection, session_id)
            tombstone = {"session_id": session_id, "owner": row.owner, "snapshot_id": snapshot_id}
            connection.execute(insert(schema.tombstones), {**tombstone, "dropped_at": now})
    return reasons


def _update(connection: Connection, snapshot_id: int, **values: Any) -> None:
    of_snapshot = schema.snapshots.c.snapshot_id == snapshot_id
    connection.execute(update(schema.snapshots).where(of_snapshot).values(values))


_NOW = select(
    schema.sessions, *EXTENT_COLUMNS, of_turns(func.max(schema.turns.c.created_at)).label("newest_turn")
).order_by(schema.sessions.c.position)
"""The sessions with their current extent."""


def _newest_extents(connection: Connection, snapshot_id: int, owner: str | None) -> dict[int, Extent]:
    """Map each session's position to its newest extent in a snapshot and in the snapshots that it is based on."""
    extents: dict[int, Extent] = {}
    ancestor: int | None = snapshot_id
    while ancestor is not None:
        for extent in extents_of(connection, ancestor).values():
            extents.setdefault(extent.position, extent)
        ancestor = _load(connection, ancestor, owner).since
    return extents


def _matches(metadata: Mapping[str, Any], pairs: Mapping[str, Any]) -> bool:
    return all(
        key in metadata and canonical_json(metadata[key]) == canonical_json(value) for key, value in pairs.items()
    )
