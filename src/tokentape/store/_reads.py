"""Reads of sessions, each within the transaction of its connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Table, select

from tokentape._session.flatten import trajectories
from tokentape._session.lineage import lineage, parent_sessions
from tokentape._session.tree import Session
from tokentape.errors import NotFound, StoreCorrupt
from tokentape.store import _schema as schema
from tokentape.store._checks import chained
from tokentape.store._rows import decode
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


@dataclass(frozen=True)
class StoredSession:
    """A session with all of its records."""

    info: SessionInfo
    setups: Mapping[str, Setup]
    """The setups of the turns, by digest."""
    turns: tuple[Turn, ...]
    """In order of `seq`, which counts from 0."""
    rewards: tuple[Reward, ...]
    """In order of arrival."""
    answers: tuple[RecordedReply, ...]
    """In order of their turns."""
    events: tuple[Event, ...] = ()
    """In order of arrival."""
    columns: tuple[TurnColumn, ...] = ()
    """In order of arrival; empty unless they were asked for."""
    payloads: tuple[TurnPayload, ...] = ()
    """In order of their turns; empty unless they were asked for."""

    def tree(self) -> Session:
        """Return the session as a tree. Repeated calls return the same object."""
        return self._tree

    @cached_property
    def _tree(self) -> Session:
        return Session(self.info, self.turns, self.events)

    def trajectories(self, *, unread: bool = False, edges: Sequence[LineageEdge] | None = None) -> list[Trajectory]:
        """Return one trajectory per leaf, with columns and payloads if these were loaded. See `session.flatten`.

        `unread` includes turns that no client read. `edges`, from `lineage_of`, give trajectories their roles.
        """
        given = self.rewards, self.columns, self.payloads, self.events
        return trajectories(self.tree(), *given, unread=unread, edges=edges)


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """The current state of a session in the record, to compare with the session in memory."""

    created_at: float
    turns: int
    digest: str | None
    """Digest of the last turn known to the caller; None if the session has no such turn."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The part of a session that was recorded up to some moment."""

    position: int
    """Position of the session. A later session with the same id has another one."""
    turns: int
    """Number of turns."""
    last_reward: int
    """Rewards up to this position."""
    last_column: int
    """Columns up to this position."""
    last_event: int = 0
    """Events up to this position."""


_WHOLE = Extent(0, 2**31 - 1, 2**63 - 1, 2**63 - 1, 2**63 - 1)


def load_session(
    connection: Connection, session_id: str, *, per_token: bool = False, extent: Extent | None = None
) -> StoredSession:
    """See `Store.load_session`."""
    read = _Reading(connection, session_id)
    info = read.info(None if extent is None else extent.position)
    last = extent or _WHOLE
    turns = read.turns(schema.turns.c.seq < last.turns)
    column, payload = schema.token_columns.c.position, schema.token_payloads.c.turn
    return StoredSession(
        info=info,
        setups=read.setups(turns),
        turns=turns,
        rewards=read.records(schema.rewards.c.position, schema.rewards.c.position <= last.last_reward),
        answers=read.records(schema.answers.c.first_turn, schema.answers.c.first_turn < last.turns),
        events=read.records(schema.events.c.position, schema.events.c.position <= last.last_event),
        columns=read.records(column, column <= last.last_column) if per_token else (),
        payloads=read.records(payload, payload < last.turns) if per_token else (),
    )


def load_newer(connection: Connection, session_id: str, known: tuple[Turn, ...]) -> StoredSession:
    """See `Store.load_newer`."""
    read = _Reading(connection, session_id)
    info = read.info()
    turns = read.turns(schema.turns.c.seq >= len(known), known)
    return StoredSession(
        info=info,
        setups=read.setups(turns),
        turns=turns,
        rewards=(),
        answers=read.records(schema.answers.c.first_turn, schema.answers.c.first_turn >= len(known)),
        events=read.records(schema.events.c.turn, schema.events.c.turn >= len(known)),
    )


def load_events(connection: Connection, session_id: str, kind: str) -> tuple[Event, ...]:
    return _Reading(connection, session_id).records(schema.events.c.position, schema.events.c.kind == kind)


class _Reading:
    """Reads the records of one session in one transaction."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self._connection, self._session_id = connection, session_id

    def info(self, position: int | None = None) -> SessionInfo:
        sessions = schema.sessions.c
        found = self.records(sessions.position, *([] if position is None else [sessions.position == position]))
        if not found:
            raise NotFound(f"there is no session {self._session_id!r}")
        info: SessionInfo = found[0]
        return info

    def records(self, order: Column[int], *conditions: ColumnElement[bool]) -> tuple[Any, ...]:
        table = order.table
        assert isinstance(table, Table)
        if table is schema.events and not schema.has_events(self._connection):
            return ()
        columns = schema.readable(self._connection, table)
        statement = select(*columns).where(table.c.session_id == self._session_id, *conditions).order_by(order)
        return tuple(decode(table, row) for row in self._connection.execute(statement))

    def turns(self, condition: ColumnElement[bool], known: Sequence[Turn] = ()) -> tuple[Turn, ...]:
        """Load the turns that match `condition` and check their hash chain. It continues after the `known` turns."""
        turns: tuple[Turn, ...] = self.records(schema.turns.c.seq, condition)
        digests: dict[int | None, str] = {turn.seq: turn.digest for turn in known}
        for seq, turn in enumerate(turns, len(known)):
            if turn.seq != seq or not chained(turn, digests.get(turn.parent)):
                raise StoreCorrupt(
                    f"turn {turn.seq} of session {self._session_id!r} doesn't fit the hash chain; "
                    "run `tokentape verify` to see what else is damaged"
                )
            digests[turn.seq] = turn.digest
        return turns

    def setups(self, turns: Iterable[Turn]) -> dict[str, Setup]:
        digests = {turn.setup for turn in turns}
        rows = self._connection.execute(select(schema.setups).where(schema.setups.c.digest.in_(digests)))
        return {row.digest: decode(schema.setups, row) for row in rows}


def batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield `items` in lists of up to `size`."""
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some


def lineage_of(load: Callable[[str], StoredSession], stored: StoredSession) -> list[LineageEdge]:
    """Return the edges of a session's branches. Parents named by headers count if their owner is the same."""
    others = []
    for session_id in sorted(parent_sessions(stored.tree())):
        try:
            other = load(session_id)
        except NotFound:
            continue
        if other.info.owner == stored.info.owner:
            others.append(other)
    return lineage(stored.tree(), others)
