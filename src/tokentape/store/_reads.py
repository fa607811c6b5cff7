"""Read sessions, each within its connection's transaction, and export their trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from operator import eq, ge, le, lt
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from sqlalchemy import Column, Connection, Select, Table, bindparam, select

from tokentape._session.arrow import ExtraNames, named_only
from tokentape._session.flatten import trajectories
from tokentape._session.lineage import lineage, parent_sessions
from tokentape._session.tree import Session
from tokentape._session.verdict import wanted_verdict
from tokentape.errors import NotFound, StoreCorrupt
from tokentape.store import _schema as schema
from tokentape.store._checks import chained
from tokentape.store._rows import decode, decode_all
from tokentape.types import (
    Event,
    LineageEdge,
    RecordedReply,
    Reward,
    SessionInfo,
    Setup,
    Trajectory,
    Turn,
    TurnColumn,
    TurnPayload,
)

if TYPE_CHECKING:
    from tokentape.store._base import Store


@dataclass(frozen=True)
class StoredSession:
    """A session with all of its records."""

    info: SessionInfo
    setups: Mapping[str, Setup]
    """The turns' setups, by digest."""
    turns: tuple[Turn, ...]
    """In order of `seq`, which counts from 0."""
    rewards: tuple[Reward, ...]
    """In order of arrival."""
    answers: tuple[RecordedReply, ...]
    """In order of their turns."""
    events: tuple[Event, ...] = ()
    """In order of arrival."""
    columns: tuple[TurnColumn, ...] = ()
    """In order of arrival; empty unless loaded with `per_token`."""
    payloads: tuple[TurnPayload, ...] = ()
    """In order of their turns; empty unless loaded with `per_token`."""

    def tree(self) -> Session:
        """Return the session as a tree. Repeated calls return the same object."""
        return self._tree

    @cached_property
    def _tree(self) -> Session:
        return Session(self.info, self.turns, self.events)

    def trajectories(self, *, unread: bool = False, edges: Sequence[LineageEdge] | None = None) -> list[Trajectory]:
        """Return one trajectory per leaf, with columns and payloads if they were loaded. See `session.flatten`.

        `unread` includes turns that no client read. Pass `edges` from `lineage_of` to set the trajectories' roles.
        """
        data = self.rewards, self.columns, self.payloads, self.events
        return trajectories(self.tree(), *data, unread=unread, edges=edges)


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """A session's current state in the record, to compare with the session in memory."""

    created_at: float
    turns: int
    digest: str | None
    """The digest of the last turn that the caller knows; None if the session has no such turn."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The part of a session that was recorded up to some moment."""

    position: int
    """The session's position. A later session with the same id has a different position."""
    turns: int
    """The number of turns."""
    last_reward: int
    """The position of the last reward."""
    last_column: int
    """The position of the last column."""
    last_event: int = 0
    """The position of the last event."""


_Compare: TypeAlias = Callable[[Any, Any], Any]

TOKENS_AT_ONCE = 2**16
"""The number of tokens in sessions that are read together. A statement costs as much time as reading a few turns."""

_ROWS_AT_ONCE = 64

_SETUPS = select(schema.setups).where(schema.setups.c.digest.in_(bindparam("digests", expanding=True)))

_SEQ = schema.turns.c.seq

_WHOLE = Extent(0, 2**31 - 1, 2**63 - 1, 2**63 - 1, 2**63 - 1)


def load_sessions(
    connection: Connection, session_ids: Sequence[str], *, per_token: bool = False, extent: Extent | None = None
) -> list[StoredSession]:
    """Load the sessions that exist, like `Store.load_session`, with a few statements for all of them."""
    read, last = Reading(connection, session_ids), extent or _WHOLE
    infos = read.records(schema.sessions.c.position, ge if extent is None else eq, last.position)
    if not infos:
        return []
    turns = {
        session_id: read.checked(session_id, records)
        for session_id, records in read.records(_SEQ, lt, last.turns).items()
    }
    setups = read.setups(turn for of_session in turns.values() for turn in of_session)
    parts: dict[str, dict[str, tuple[Any, ...]]] = {
        "turns": turns,
        "rewards": read.records(schema.rewards.c.position, le, last.last_reward),
        "answers": read.records(schema.answers.c.first_turn, lt, last.turns),
        "events": read.records(schema.events.c.position, le, last.last_event),
    }
    if per_token:
        parts["columns"] = read.records(schema.token_columns.c.position, le, last.last_column)
        parts["payloads"] = read.records(schema.token_payloads.c.turn, lt, last.turns)
    return [
        StoredSession(
            info=infos[session_id][0],
            setups={turn.setup: setups[turn.setup] for turn in turns.get(session_id, ()) if turn.setup in setups},
            **{name: records.get(session_id, ()) for name, records in parts.items()},
        )
        for session_id in session_ids
        if session_id in infos
    ]


def load_newer(connection: Connection, session_id: str, known: tuple[Turn, ...]) -> StoredSession:
    """See `Store.load_newer`."""
    read = Reading(connection, [session_id])
    info = read.records(schema.sessions.c.position, ge, 0).get(session_id)
    if info is None:
        raise NotFound(f"there is no session {session_id!r}")
    turns = read.checked(session_id, read.records(_SEQ, ge, len(known)).get(session_id, ()), known)
    return StoredSession(
        info=info[0],
        setups=read.setups(turns),
        turns=turns,
        rewards=(),
        answers=read.records(schema.answers.c.first_turn, ge, len(known)).get(session_id, ()),
        events=read.records(schema.events.c.turn, ge, len(known)).get(session_id, ()),
    )


@cache
def _statement(order: Column[int], compare: _Compare, column: Column[Any], several: bool) -> Select[Any]:
    """Return the statement that reads the records of one or `several` sessions. Building it costs more than running."""
    of = order.table.c.session_id
    condition = of.in_(bindparam("session_ids", expanding=True)) if several else of == bindparam("session_id")
    return select(order.table).where(condition, compare(column, bindparam("value"))).order_by(of, order)


class Reading:
    """Reads several sessions' records in one transaction."""

    def __init__(self, connection: Connection, session_ids: Sequence[str]) -> None:
        self._connection, self._session_ids = connection, session_ids

    def records(
        self, order: Column[int], compare: _Compare, value: int | str, column: Column[Any] | None = None
    ) -> dict[str, tuple[Any, ...]]:
        """Load a table's records that satisfy `compare(column or order, value)`, by session."""
        table, several = order.table, len(self._session_ids) > 1
        assert isinstance(table, Table)
        statement = _statement(order, compare, order if column is None else column, several)
        ids = {"session_ids": self._session_ids} if several else {"session_id": self._session_ids[0]}
        rows = self._connection.execute(statement, {**ids, "value": value})
        by_session: dict[str, list[Any]] = {}
        for chunk in rows.partitions(_ROWS_AT_ONCE):
            for record in decode_all(table, chunk):
                by_session.setdefault(record.session_id, []).append(record)
        return {session_id: tuple(records) for session_id, records in by_session.items()}

    def checked(self, session_id: str, turns: tuple[Turn, ...], known: Sequence[Turn] = ()) -> tuple[Turn, ...]:
        """Check the turns' hash chain, which continues the `known` turns, and return the turns."""
        digests: dict[int | None, str] = {turn.seq: turn.digest for turn in known}
        for seq, turn in enumerate(turns, len(known)):
            if turn.seq != seq or not chained(turn, digests.get(turn.parent)):
                raise StoreCorrupt(
                    f"turn {turn.seq} of session {session_id!r} doesn't match the hash chain; "
                    "run `tokentape verify` to see what else is damaged"
                )
            digests[turn.seq] = turn.digest
        return turns

    def setups(self, turns: Iterable[Turn]) -> dict[str, Setup]:
        digests = {turn.setup for turn in turns}
        rows = self._connection.execute(_SETUPS, {"digests": sorted(digests)})
        return {row.digest: decode(schema.setups, row) for row in rows}


def together(sizes: Iterable[tuple[str, int]], most: int) -> Iterator[list[str]]:
    """Yield lists of session ids, in order, each of at most `most` tokens. `sizes` has (session id, tokens)."""
    chunk: list[str] = []
    room = most
    for session_id, tokens in sizes:
        size = tokens + 256  # so that a list has at most a few hundred sessions
        if chunk and size > room:
            yield chunk
            chunk, room = [], most
        chunk.append(session_id)
        room -= size
    if chunk:
        yield chunk


def lineage_of(load: Callable[[str], StoredSession], stored: StoredSession) -> list[LineageEdge]:
    """Return the edges of a session's branches. Parent sessions named in headers must have the same owner."""
    others = []
    for session_id in sorted(parent_sessions(stored.tree())):
        try:
            other = load(session_id)
        except NotFound:
            continue
        if other.info.owner == stored.info.owner:
            others.append(other)
    return lineage(stored.tree(), others)


@dataclass(slots=True)
class ExportCounts:
    sessions: int = 0
    trajectories: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    other_verdicts: dict[str, int] = field(default_factory=dict, repr=False)
    """The number of trajectories that the verdict filter excluded, by verdict."""
    other_roles: dict[str, int] = field(default_factory=dict, repr=False)
    """The number of trajectories that the role filter excluded, by role."""

    def add(self, other: ExportCounts) -> None:
        self.sessions += other.sessions
        self.trajectories += other.trajectories
        self.tokens += other.tokens
        self.trained_tokens += other.trained_tokens
        self.other_verdicts = dict(Counter(self.other_verdicts) + Counter(other.other_verdicts))
        self.other_roles = dict(Counter(self.other_roles) + Counter(other.other_roles))


def exported(
    sessions: Iterable[StoredSession],
    extra: ExtraNames,
    verdicts: Sequence[str] | None,
    counts: ExportCounts,
    *,
    store: Store,
    unread: bool = False,
    roles: Sequence[str] | None = None,
) -> Iterator[Trajectory]:
    """Yield the sessions' trajectories whose verdict and role match (None: all), and update `counts`.

    Only columns and payloads named in `extra` are included: more can be recorded while a file with fixed columns is
    written. Masks don't depend on `verdicts`: turns trained on an excluded branch are not trained on a different
    branch. Turns that no client read are exported only with `unread`. `store` has the other sessions of the lineage,
    which roles depend on.
    """
    # A small cache suffices because children of the same parent are adjacent.
    load = lru_cache(8)(store.load_session)
    for stored in sessions:
        counts.sessions += 1
        for trajectory in stored.trajectories(unread=unread, edges=lineage_of(load, stored)):
            if roles is not None and trajectory.role not in roles:
                counts.other_roles[trajectory.role] = counts.other_roles.get(trajectory.role, 0) + 1
                continue
            if verdicts is not None and not wanted_verdict(trajectory.verdict, verdicts):
                counts.other_verdicts[trajectory.verdict] = counts.other_verdicts.get(trajectory.verdict, 0) + 1
                continue
            counts.trajectories += 1
            counts.tokens += len(trajectory.token_ids)
            counts.trained_tokens += int(np.count_nonzero(trajectory.loss_mask))
            yield named_only(trajectory, extra)
