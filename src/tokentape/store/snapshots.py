"""What reads and writes of snapshots do inside their transaction: freezing, confirming, dropping.

A snapshot names, per session, how many turns and which rewards, columns and events belong to it. Records are only ever
appended, so that is enough to show the same contents again, however much the sessions grow.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sqlalchemy import Connection, Row, Select, func, insert, literal, select, update

from tokentape.canonical import canonical_json
from tokentape.errors import Conflict, NotFound, StoreCorrupt
from tokentape.store import schema
from tokentape.store.reads import Extent, batched
from tokentape.store.writes import delete_rows

State: TypeAlias = Literal["held", "confirmed", "released"]
"""Held until its consumer confirms it; confirmed, its sessions may be dropped; released, nothing is kept for it."""

_BATCH = 500
"""Sessions per statement, which takes only so many parameters."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which sessions a snapshot is to hold: those to which all that is given applies."""

    session_ids: tuple[str, ...] | None = None
    since: int | None = None
    """Only sessions that have changed since this snapshot, or since one that it was itself taken since."""
    idle_seconds: float | None = None
    """Only sessions whose newest turn is at least so old."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Only sessions whose metadata have these values under these keys."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot without its trajectories."""

    snapshot_id: int
    owner: str
    created_at: float
    """Unix seconds."""
    since: int | None
    state: State
    digest: str | None
    """Hex SHA-256 of the contents as JSON lines; None until they have been read once."""
    contents: Mapping[str, Any] | None
    """Counts, and per session its turns and leaves; None as long as `digest`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One session of a snapshot."""

    session_id: str
    extent: Extent


def select_sessions(connection: Connection, selection: Selection, owner: str | None, now: float) -> list[str]:
    """Return the ids of the selected sessions in order of creation. `owner` None stands for everybody's.

    Raises `NotFound` for a session or snapshot that isn't there or is somebody else's.
    """
    known = {} if selection.since is None else _newest_extents(connection, selection.since, owner)
    wanted = None if selection.session_ids is None else set(selection.session_ids)
    chosen, seen = [], set()
    for row in connection.execute(_now(owner)):
        if wanted is not None and row.session_id not in wanted:
            continue
        seen.add(row.session_id)
        newest = row.created_at if row.newest_turn is None else row.newest_turn
        if selection.idle_seconds is not None and now - newest < selection.idle_seconds:
            continue
        if not _matches(json.loads(row.metadata), selection.metadata):
            continue
        if row.position not in known or _extent(row) != known[row.position]:
            chosen.append(row.session_id)
    for missing in sorted((wanted or set()) - seen):
        raise NotFound(f"there is no session {missing!r}")
    return chosen


def freeze(connection: Connection, session_ids: Iterable[str], owner: str, since: int | None, now: float) -> int:
    """Make a held snapshot of these sessions as they are, and return its id."""
    values = {"owner": owner, "created_at": now, "since": since, "state": "held"}
    key = connection.execute(insert(schema.snapshots), values).inserted_primary_key
    assert key is not None
    snapshot_id: int = key[0]
    for some in batched(session_ids, _BATCH):
        state = _now(None).where(schema.sessions.c.session_id.in_(some)).subquery()
        rows = select(
            literal(snapshot_id),
            *(state.c[name] for name in schema.snapshot_sessions.c.keys()[1:]),
        )
        connection.execute(insert(schema.snapshot_sessions).from_select(schema.snapshot_sessions.c.keys(), rows))
    return snapshot_id


def seal(connection: Connection, snapshot_id: int, digest: str, contents: Mapping[str, Any]) -> int:
    """Write down what a snapshot's contents are; return about how many bytes that took."""
    data = zlib.compress(canonical_json(contents).encode("ascii"))
    of_snapshot = schema.snapshots.c.snapshot_id == snapshot_id
    connection.execute(update(schema.snapshots).where(of_snapshot).values(digest=digest, contents=data))
    return len(data)


def load_snapshot(connection: Connection, snapshot_id: int, owner: str | None) -> Snapshot:
    """Return a snapshot. Raises `NotFound` if there is none or it is somebody else's, and `StoreCorrupt`."""
    conditions = [schema.snapshots.c.snapshot_id == snapshot_id]
    if owner is not None:
        conditions.append(schema.snapshots.c.owner == owner)
    row = connection.execute(select(schema.snapshots).where(*conditions)).one_or_none()
    if row is None:
        raise NotFound(f"there is no snapshot {snapshot_id}")
    return decode_snapshot(row)


def list_snapshots(connection: Connection, owner: str | None) -> list[Snapshot]:
    """Return all snapshots, oldest first; `owner` None stands for everybody's."""
    conditions = [] if owner is None else [schema.snapshots.c.owner == owner]
    rows = connection.execute(select(schema.snapshots).where(*conditions).order_by(schema.snapshots.c.snapshot_id))
    return [decode_snapshot(row) for row in rows]


def decode_snapshot(row: Row[Any]) -> Snapshot:
    """Return the snapshot of a row of `schema.snapshots`. Raises `StoreCorrupt` if it can't be one."""
    try:
        if row.state not in ("held", "confirmed", "released"):
            raise ValueError("no such state")
        contents = None if row.contents is None else json.loads(zlib.decompress(row.contents))
        return Snapshot(row.snapshot_id, row.owner, float(row.created_at), row.since, row.state, row.digest, contents)
    except (TypeError, ValueError, RecursionError, zlib.error) as error:
        raise StoreCorrupt(f"snapshot {row.snapshot_id!r} can't be read ({type(error).__name__})") from error


def entries(connection: Connection, snapshot_id: int) -> list[Entry]:
    """Return the sessions of a snapshot in order of creation."""
    table = schema.snapshot_sessions
    columns = schema.readable(connection, table)
    rows = connection.execute(select(*columns).where(table.c.snapshot_id == snapshot_id).order_by(table.c.position))
    return [Entry(row.session_id, _extent(row)) for row in rows]


def confirm(connection: Connection, snapshot_id: int, digest: str) -> int:
    """Note that the consumer has the contents; return 0. Raises `Conflict` unless `digest` is theirs."""
    snapshot = load_snapshot(connection, snapshot_id, None)
    if snapshot.state == "released":
        raise Conflict(f"snapshot {snapshot_id} was released; take another one")
    if snapshot.digest != digest:
        raise Conflict(
            f"snapshot {snapshot_id} has digest {snapshot.digest}, not the one that was confirmed; "
            "what was received is damaged or another snapshot"
        )
    _set_state(connection, snapshot_id, "confirmed")
    return 0


def drop_sessions(connection: Connection, snapshot_id: int, some: Iterable[Entry], now: float) -> dict[str, str]:
    """Delete those of these sessions that nobody needs any more; return why each other one was kept.

    Gone are sessions that are as the confirmed snapshot has them; each leaves a tombstone. Raises `Conflict` for a
    snapshot that is not confirmed.
    """
    if load_snapshot(connection, snapshot_id, None).state != "confirmed":
        raise Conflict(f"snapshot {snapshot_id} is not confirmed; confirm it with its digest once its data is safe")
    kept: dict[str, str] = {}
    for entry in some:
        row = connection.execute(_now(None).where(schema.sessions.c.position == entry.extent.position)).one_or_none()
        if row is None:
            continue
        holder = connection.execute(_other_holder(snapshot_id, entry.extent.position)).scalar()
        if _extent(row) != entry.extent:
            kept[entry.session_id] = "changed since the snapshot"
        elif holder is not None:
            kept[entry.session_id] = f"held by snapshot {holder}"
        else:
            delete_rows(connection, row.session_id)
            tombstone = {"session_id": row.session_id, "owner": row.owner, "snapshot_id": snapshot_id}
            connection.execute(insert(schema.tombstones), {**tombstone, "dropped_at": now})
    return kept


def release(connection: Connection, snapshot_id: int) -> int:
    """Keep nothing for this snapshot any more; return 0."""
    _set_state(connection, snapshot_id, "released")
    return 0


def tombstone_owner(connection: Connection, session_id: str) -> str | None:
    """Return whose session of this id was dropped; None if none was."""
    tombstone = schema.tombstones.c
    owner: str | None = connection.execute(select(tombstone.owner).where(tombstone.session_id == session_id)).scalar()
    return owner


def _set_state(connection: Connection, snapshot_id: int, state: State) -> None:
    of_snapshot = schema.snapshots.c.snapshot_id == snapshot_id
    connection.execute(update(schema.snapshots).where(of_snapshot).values(state=state))


def _now(owner: str | None) -> Select[Any]:
    """Sessions with what is recorded of them by now."""
    sessions, turns = schema.sessions.c, schema.turns.c
    rewards, columns, events = schema.rewards.c, schema.token_columns.c, schema.events.c

    def of_session(what: Any, other: Any, name: str) -> Any:
        return select(what).where(other == sessions.session_id).scalar_subquery().label(name)

    statement = select(
        schema.sessions,
        of_session(func.count(turns.seq), turns.session_id, "turns"),
        of_session(func.max(turns.created_at), turns.session_id, "newest_turn"),
        of_session(func.coalesce(func.max(rewards.position), 0), rewards.session_id, "last_reward"),
        of_session(func.coalesce(func.max(columns.position), 0), columns.session_id, "last_column"),
        of_session(func.coalesce(func.max(events.position), 0), events.session_id, "last_event"),
    ).order_by(sessions.position)
    return statement if owner is None else statement.where(sessions.owner == owner)


def _extent(row: Row[Any]) -> Extent:
    return Extent(row.position, row.turns, row.last_reward, row.last_column, row.last_event or 0)


def _newest_extents(connection: Connection, snapshot_id: int, owner: str | None) -> dict[int, Extent]:
    """By position, how much of each session is in the newest of a snapshot and those that it was taken since."""
    found: dict[int, Extent] = {}
    at: int | None = snapshot_id
    while at is not None:
        for entry in entries(connection, at):
            found.setdefault(entry.extent.position, entry.extent)
        at = load_snapshot(connection, at, owner).since
    return found


def _other_holder(snapshot_id: int, position: int) -> Select[Any]:
    held = schema.snapshot_sessions.join(
        schema.snapshots, schema.snapshots.c.snapshot_id == schema.snapshot_sessions.c.snapshot_id
    )
    return (
        select(schema.snapshots.c.snapshot_id)
        .select_from(held)
        .where(
            schema.snapshot_sessions.c.position == position,
            schema.snapshots.c.snapshot_id != snapshot_id,
            schema.snapshots.c.state == "held",
        )
        .limit(1)
    )


def _matches(metadata: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(
        key in metadata and canonical_json(metadata[key]) == canonical_json(value) for key, value in wanted.items()
    )
