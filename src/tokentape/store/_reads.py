"""Reads of sessions, each within the transaction of its connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from operator import eq, ge, le, lt
from typing import Any, TypeAlias

from sqlalchemy import Column, ColumnElement, Connection, Select, Table, bindparam, select

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


_Compare: TypeAlias = Callable[[Any, Any], Any]

_ROWS_AT_ONCE = 64

_SETUPS = select(schema.setups).where(schema.setups.c.digest.in_(bindparam("digests", expanding=True)))

_WHOLE = Extent(0, 2**31 - 1, 2**63 - 1, 2**63 - 1, 2**63 - 1)


def load_session(
    connection: Connection, session_id: str, *, per_token: bool = False, extent: Extent | None = None
) -> StoredSession:
    """See `Store.load_session`."""
    read = _Reading(connection, session_id)
    info = read.info(None if extent is None else extent.position)
    last = extent or _WHOLE
    turns = read.turns(lt, last.turns)
    return StoredSession(
        info=info,
        setups=read.setups(turns),
        turns=turns,
        rewards=read.records(schema.rewards.c.position, le, last.last_reward),
        answers=read.records(schema.answers.c.first_turn, lt, last.turns),
        events=read.records(schema.events.c.position, le, last.last_event),
        columns=read.records(schema.token_columns.c.position, le, last.last_column) if per_token else (),
        payloads=read.records(schema.token_payloads.c.turn, lt, last.turns) if per_token else (),
    )


def load_newer(connection: Connection, session_id: str, known: tuple[Turn, ...]) -> StoredSession:
    """See `Store.load_newer`."""
    read = _Reading(connection, session_id)
    info = read.info()
    turns = read.turns(ge, len(known), known)
    return StoredSession(
        info=info,
        setups=read.setups(turns),
        turns=turns,
        rewards=(),
        answers=read.records(schema.answers.c.first_turn, ge, len(known)),
        events=read.records(schema.events.c.turn, ge, len(known)),
    )


def load_events(connection: Connection, session_id: str, kind: str) -> tuple[Event, ...]:
    return _Reading(connection, session_id).records(schema.events.c.position, eq, kind, schema.events.c.kind)


@cache
def _statement(
    columns: tuple[ColumnElement[Any], ...], order: Column[int], compare: _Compare, column: Column[Any]
) -> Select[Any]:
    """Return the statement that reads the records of one session. To make it costs more than to run it."""
    of_session = order.table.c.session_id == bindparam("session_id")
    return select(*columns).where(of_session, compare(column, bindparam("value"))).order_by(order)


class _Reading:
    """Reads the records of one session in one transaction."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self._connection, self._session_id = connection, session_id

    def info(self, position: int | None = None) -> SessionInfo:
        sessions = schema.sessions.c
        found = self.records(sessions.position, ge if position is None else eq, position or 0)
        if not found:
            raise NotFound(f"there is no session {self._session_id!r}")
        info: SessionInfo = found[0]
        return info

    def records(
        self, order: Column[int], compare: _Compare, value: int | str, column: Column[Any] | None = None
    ) -> tuple[Any, ...]:
        """Load the records of a table for which `compare(column, value)`; `column` is `order` if it is None."""
        table = order.table
        assert isinstance(table, Table)
        if table is schema.events and not schema.has_events(self._connection):
            return ()
        columns = schema.readable(self._connection, table)
        statement = _statement(columns, order, compare, order if column is None else column)
        rows = self._connection.execute(statement, {"session_id": self._session_id, "value": value})
        return tuple(decode(table, row) for some in rows.partitions(_ROWS_AT_ONCE) for row in some)

    def turns(self, compare: _Compare, seq: int, known: Sequence[Turn] = ()) -> tuple[Turn, ...]:
        """Load the turns for which `compare(turn.seq, seq)` and check their hash chain, which follows `known` turns."""
        turns: tuple[Turn, ...] = self.records(schema.turns.c.seq, compare, seq)
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
        rows = self._connection.execute(_SETUPS, {"digests": sorted(digests)})
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
