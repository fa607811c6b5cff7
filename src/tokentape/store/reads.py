"""Reads of sessions, each within the transaction of its connection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Column, Connection, CursorResult, Row, Table, select

from tokentape.errors import NotFound, StoreCorrupt
from tokentape.session.flatten import trajectories
from tokentape.session.tree import Session
from tokentape.store import schema
from tokentape.store.checks import chained
from tokentape.store.rows import (
    decode_answer,
    decode_column,
    decode_event,
    decode_payload,
    decode_reward,
    decode_session,
    decode_setup,
    decode_turn,
)
from tokentape.types import Answer, Event, Reward, SessionInfo, Setup, Trajectory, Turn, TurnColumn, TurnPayload


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session with everything recorded of it."""

    info: SessionInfo
    setups: Mapping[str, Setup]
    """The setups of its turns, by digest."""
    turns: tuple[Turn, ...]
    """In order of `seq`, which counts from 0."""
    rewards: tuple[Reward, ...]
    """In order of arrival."""
    answers: tuple[Answer, ...]
    """In order of their turns."""
    events: tuple[Event, ...] = ()
    """In order of arrival."""
    columns: tuple[TurnColumn, ...] = ()
    """In order of arrival; empty unless they were asked for."""
    payloads: tuple[TurnPayload, ...] = ()
    """In order of their turns; empty unless they were asked for."""

    def tree(self) -> Session:
        """The turns as a tree."""
        return Session(self.info, self.turns)

    def trajectories(self) -> list[Trajectory]:
        """One trajectory per leaf, with columns and payloads if they were asked for. See `session.flatten`."""
        return trajectories(self.tree(), self.rewards, self.columns, self.payloads, self.events)


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """What is recorded of a session by now, as far as one has to know to see whether that is what one remembers."""

    created_at: float
    turns: int
    digest: str | None
    """Of the turn that one knows last; None if the session has no such turn."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a session is meant: what was recorded of it up to some moment."""

    position: int
    """Of the session; another one of the same id has another."""
    turns: int
    """So many turns."""
    last_reward: int
    """Rewards up to this position."""
    last_column: int
    """Columns up to this position."""
    last_event: int = 0
    """Events up to this position."""


def load_session(
    connection: Connection, session_id: str, *, per_token: bool = False, extent: Extent | None = None
) -> StoredSession:
    """Return a session with its hash chain checked, with columns and payloads only if `per_token`.

    With an `extent` only what belongs to it. Raises `NotFound` if there is no such session and `StoreCorrupt` if a
    record can't be read or doesn't fit the chain.
    """
    conditions = [schema.sessions.c.session_id == session_id]
    if extent is not None:
        conditions.append(schema.sessions.c.position == extent.position)
    row = connection.execute(select(schema.sessions).where(*conditions)).one_or_none()
    if row is None:
        raise NotFound(f"there is no session {session_id!r}")
    info = decode_session(row)

    def rows_of(table: Table, order: Column[int], last: int | None) -> CursorResult[Any]:
        of_session = [table.c.session_id == session_id, *([] if last is None else [order <= last])]
        return connection.execute(select(*schema.readable(connection, table)).where(*of_session).order_by(order))

    last_turn, last_reward, last_column, last_event = (
        (None, None, None, None)
        if extent is None
        else (extent.turns - 1, extent.last_reward, extent.last_column, extent.last_event)
    )
    turns = _chained_turns(session_id, rows_of(schema.turns, schema.turns.c.seq, last_turn))
    digests = {turn.setup for turn in turns}
    setups = map(decode_setup, connection.execute(select(schema.setups).where(schema.setups.c.digest.in_(digests))))
    rewards = rows_of(schema.rewards, schema.rewards.c.position, last_reward)
    answers = rows_of(schema.answers, schema.answers.c.first_turn, last_turn)
    events = rows_of(schema.events, schema.events.c.position, last_event) if schema.has_events(connection) else ()
    columns: tuple[TurnColumn, ...] = ()
    payloads: tuple[TurnPayload, ...] = ()
    if per_token:
        columns = tuple(map(decode_column, rows_of(schema.token_columns, schema.token_columns.c.position, last_column)))
        payloads = tuple(map(decode_payload, rows_of(schema.token_payloads, schema.token_payloads.c.turn, last_turn)))
    return StoredSession(
        info=info,
        setups={setup.digest: setup for setup in setups},
        turns=turns,
        rewards=tuple(map(decode_reward, rewards)),
        answers=tuple(map(decode_answer, answers)),
        events=tuple(map(decode_event, events)),
        columns=columns,
        payloads=payloads,
    )


def load_newer(connection: Connection, session_id: str, known: tuple[Turn, ...]) -> StoredSession:
    """Return a session's turns after those that are `known`, with their answers, setups and events; nothing else.

    Raises as `load_session`.
    """
    row = connection.execute(select(schema.sessions).where(schema.sessions.c.session_id == session_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no session {session_id!r}")

    def newer(table: Table, order: Column[int]) -> CursorResult[Any]:
        later = [table.c.session_id == session_id, order >= len(known)]
        return connection.execute(select(table).where(*later).order_by(order))

    turns = _chained_turns(session_id, newer(schema.turns, schema.turns.c.seq), known)
    digests = {turn.setup for turn in turns}
    setups = map(decode_setup, connection.execute(select(schema.setups).where(schema.setups.c.digest.in_(digests))))
    return StoredSession(
        info=decode_session(row),
        setups={setup.digest: setup for setup in setups},
        turns=turns,
        rewards=(),
        answers=tuple(map(decode_answer, newer(schema.answers, schema.answers.c.first_turn))),
        events=tuple(map(decode_event, newer(schema.events, schema.events.c.turn))),
    )


def _chained_turns(session_id: str, rows: Iterable[Row[Any]], known: Sequence[Turn] = ()) -> tuple[Turn, ...]:
    """The turns of `rows`, which follow those that are `known`."""
    turns: list[Turn] = []
    digests: dict[int | None, str] = {turn.seq: turn.digest for turn in known}
    for row in rows:
        turn = decode_turn(row)
        if turn.seq != len(known) + len(turns) or not chained(turn, digests.get(turn.parent)):
            raise StoreCorrupt(
                f"turn {turn.seq} of session {session_id!r} doesn't fit the hash chain; "
                "run `tokentape verify` to see what else is damaged"
            )
        turns.append(turn)
        digests[turn.seq] = turn.digest
    return tuple(turns)


def batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield `items` in lists of up to `size`."""
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some
