"""Custody: what was handed out is kept until its consumer has said that it is safe.

A snapshot is frozen, read as often as need be, confirmed with the digest of its contents, and only then may its
sessions be dropped. What changed meanwhile is kept, and a dropped session's id is never used again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from sqlalchemy import Connection

from tokentape.errors import Conflict, InvalidRequest, NotFound
from tokentape.session.arrow import ExtraNames, extra_names
from tokentape.session.jsonl import json_line
from tokentape.store import snapshots
from tokentape.store.base import Store
from tokentape.store.commit import Work
from tokentape.store.reads import StoredSession
from tokentape.store.snapshots import Entry, Selection, Snapshot
from tokentape.types import Trajectory

_DROPPED_AT_ONCE = 50
"""Sessions per transaction: turns that are being recorded wait for it."""


class Custody:
    """The snapshots of a store. What is async is for the event loop; the reads block and may run in any thread.

    Where a method takes an `owner`, it is the name of the API key that asks, and None for one that may see all.
    All raise `NotFound` for a snapshot that isn't there or is somebody else's.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def take(self, selection: Selection, owner: str, sees: str | None) -> Snapshot:
        """Freeze the selected sessions of those that `sees` may see, for `owner`. Raises `InvalidRequest` for none."""
        now = time.time()

        def select() -> list[str]:
            with self._store.reading() as connection:
                return snapshots.select_sessions(connection, selection, sees, now)

        session_ids = await asyncio.to_thread(select)
        if not session_ids:
            raise InvalidRequest("no session is selected, so there is nothing to take a snapshot of")
        made: list[int] = []

        def freeze(connection: Connection) -> int:
            made[:] = [snapshots.freeze(connection, session_ids, owner, selection.since, now)]
            return 0

        await self._store.transact(freeze)
        return await self.snapshot(made[0], owner)

    async def snapshot(self, snapshot_id: int, owner: str | None) -> Snapshot:
        """A snapshot, its contents read once and their digest written down. Raises `Conflict` if that can't be."""
        found = await asyncio.to_thread(self.find, snapshot_id, owner)
        if found.digest is not None or found.state == "released":
            return found
        digest, contents = await asyncio.to_thread(self._read, snapshot_id)
        await self._repeatable(partial(snapshots.seal, snapshot_id=snapshot_id, digest=digest, contents=contents))
        return await asyncio.to_thread(self.find, snapshot_id, owner)

    def find(self, snapshot_id: int, owner: str | None) -> Snapshot:
        """A snapshot as it is recorded, perhaps without its digest yet."""
        with self._store.reading() as connection:
            return snapshots.load_snapshot(connection, snapshot_id, owner)

    def all(self, owner: str | None) -> list[Snapshot]:
        """All snapshots, oldest first."""
        with self._store.reading() as connection:
            return snapshots.list_snapshots(connection, owner)

    def trajectories(self, snapshot_id: int) -> Iterator[Trajectory]:
        """Yield the contents, the same each time. Raises as `sessions`."""
        for stored in self.sessions(snapshot_id):
            yield from stored.trajectories()

    def sessions(self, snapshot_id: int) -> Iterator[StoredSession]:
        """Yield the sessions as they were then, loading one at a time.

        Raises `Conflict` if the snapshot was released, or a session deleted in spite of it.
        """
        if self.find(snapshot_id, None).state == "released":
            raise Conflict(f"snapshot {snapshot_id} was released: its contents are no longer kept; take another one")
        for entry in self._entries(snapshot_id):
            try:
                yield self._store.load_session(entry.session_id, per_token=True, extent=entry.extent)
            except NotFound:
                raise Conflict(
                    f"session {entry.session_id!r} of snapshot {snapshot_id} was deleted; take another snapshot"
                ) from None

    async def confirm(self, snapshot_id: int, owner: str | None, digest: str) -> None:
        """Note that the consumer has the contents and has made them safe. Raises `Conflict` for another digest."""
        await self.snapshot(snapshot_id, owner)
        await self._repeatable(partial(snapshots.confirm, snapshot_id=snapshot_id, digest=digest))

    async def drop(
        self, snapshot_id: int, owner: str | None, in_use: Collection[str] = ()
    ) -> tuple[list[str], dict[str, str]]:
        """Delete the sessions of a confirmed snapshot, then release it; return which, and why each other was kept.

        Kept is what has changed since, what another snapshot holds, and what is `in_use`. If the process dies on the
        way, calling it again goes on. Raises `Conflict` for a snapshot that is not confirmed.
        """
        await asyncio.to_thread(self.find, snapshot_id, owner)
        everything = await asyncio.to_thread(self._entries, snapshot_id)
        kept = {entry.session_id: "in use" for entry in everything if entry.session_id in in_use}
        free = [entry for entry in everything if entry.session_id not in kept]
        for start in range(0, max(len(free), 1), _DROPPED_AT_ONCE):
            some = free[start : start + _DROPPED_AT_ONCE]

            def drop(connection: Connection, some: list[Entry] = some) -> int:
                kept.update(snapshots.drop_sessions(connection, snapshot_id, some, time.time()))
                return 0

            await self._repeatable(drop)
        await self._repeatable(partial(snapshots.release, snapshot_id=snapshot_id))
        return [entry.session_id for entry in everything if entry.session_id not in kept], kept

    async def release(self, snapshot_id: int, owner: str | None) -> None:
        """Keep nothing for a snapshot any more; its sessions stay."""
        await asyncio.to_thread(self.find, snapshot_id, owner)
        await self._repeatable(partial(snapshots.release, snapshot_id=snapshot_id))

    def dropped_of(self, session_id: str) -> str | None:
        """Whose session of this id was dropped; None if none was."""
        with self._store.reading() as connection:
            return snapshots.tombstone_owner(connection, session_id)

    async def _repeatable(self, work: Work) -> None:
        """Run work that may as well be done twice, if nobody knows whether it was done once."""
        await self._store.transact(work, again=work)

    def _entries(self, snapshot_id: int) -> list[Entry]:
        with self._store.reading() as connection:
            return snapshots.entries(connection, snapshot_id)

    def _read(self, snapshot_id: int) -> tuple[str, dict[str, Any]]:
        """The digest of the contents, and what a manifest says of them."""
        hasher = hashlib.sha256()
        counts: Counter[str] = Counter()
        verdicts: Counter[str] = Counter()
        names = ExtraNames()
        sessions = []
        for stored in self.sessions(snapshot_id):
            found = stored.trajectories()
            for one in found:
                hasher.update(json_line(one))
                verdicts[one.verdict] += 1
                counts["tokens"] += len(one.token_ids)
                counts["trained_tokens"] += int(one.loss_mask.sum())
            more = extra_names(found)
            names = ExtraNames(
                tuple(sorted({*names.columns, *more.columns})), tuple(sorted({*names.payloads, *more.payloads}))
            )
            leaves = [
                {
                    "turn": one.leaf,
                    "digest": stored.turns[one.leaf].digest,
                    "verdict": one.verdict,
                    "tokens": len(one.token_ids),
                }
                for one in found
            ]
            sessions.append({"session_id": stored.info.session_id, "turns": len(stored.turns), "leaves": leaves})
        return hasher.hexdigest(), {
            "trajectories": verdicts.total(),
            "tokens": counts["tokens"],
            "trained_tokens": counts["trained_tokens"],
            "verdicts": dict(sorted(verdicts.items())),
            "columns": names.columns,
            "payloads": names.payloads,
            "sessions": sessions,
        }
