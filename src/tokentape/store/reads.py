"""Reads of sessions, each within the transaction of its connection."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Column, Connection, CursorResult, Row, Table, bindparam, exists, func, select

from tokentape.errors import NotFound, StoreCorrupt
from tokentape.session.flatten import trajectories
from tokentape.session.tree import Session
from tokentape.session.verdict import BRIDGE_CHECKED, BRIDGE_DUE
from tokentape.store import schema
from tokentape.store.checks import chained
from tokentape.store.rows import (
    decode_answer,
    decode_column,
    decode_event,
    decode_media,
    decode_payload,
    decode_reward,
    decode_session,
    decode_setup,
    decode_turn,
)
from tokentape.types import Answer, Event, Media, Reward, SessionInfo, Setup, Trajectory, Turn, TurnColumn, TurnPayload


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
class SessionState:
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


def session_state(connection: Connection, session_id: str, newest: int) -> SessionState | None:
    """Return how far a session has come, with the digest of its turn `newest`; None if there is no such session."""
    row = connection.execute(_STATE, {"session_id": session_id, "newest": newest}).one_or_none()
    return None if row is None else SessionState(float(row.created_at), row.turns, row.digest)


def load_newer(connection: Connection, session_id: str, known: tuple[Turn, ...]) -> StoredSession:
    """Return a session's turns behind those that are `known`, with their answers, setups and events; nothing else.

    Raises as `load_session`.
    """
    row = connection.execute(select(schema.sessions).where(schema.sessions.c.session_id == session_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no session {session_id!r}")

    def newer(table: Table, order: Column[int]) -> CursorResult[Any]:
        behind = [table.c.session_id == session_id, order >= len(known)]
        return connection.execute(select(table).where(*behind).order_by(order))

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


def session_of_call(connection: Connection, owner: str, body_digest: str, since: float) -> str | None:
    """Return the session in which a call without a key was answered last, not before `since`."""
    answers = schema.answers.c
    statement = (
        select(answers.session_id)
        .join(schema.sessions, schema.sessions.c.session_id == answers.session_id)
        .where(answers.body_digest == bytes.fromhex(body_digest), answers.created_at >= since)
        .where(answers.key.is_(None), schema.sessions.c.owner == owner)
        .order_by(answers.created_at.desc())
        .limit(1)
    )
    found: str | None = connection.execute(statement).scalar()
    return found


def checks_due(connection: Connection, session_ids: Collection[str] | None) -> int:
    """Return how many turns of these sessions, of all if None, have a bridge that is to be checked and was not."""
    if not schema.has_events(connection):
        return 0
    event, other = schema.events.c, schema.events.alias().c
    checked = exists().where(
        other.session_id == event.session_id, other.turn == event.turn, other.kind == BRIDGE_CHECKED
    )
    statement = select(func.count()).where(event.kind == BRIDGE_DUE, ~checked)
    groups = [None] if session_ids is None else batched(session_ids, 500)
    of = (statement if some is None else statement.where(event.session_id.in_(some)) for some in groups)
    return sum(connection.execute(one).scalar_one() for one in of)


def load_media(connection: Connection, session_id: str, sha256: str) -> Media:
    """Return media that a session refers to. Raises `NotFound` if it refers to none of that hash."""
    table, of_turn = schema.media, schema.turn_media.c
    referred = exists().where(of_turn.sha256 == table.c.sha256, of_turn.session_id == session_id)
    row = connection.execute(select(table).where(table.c.sha256 == sha256, referred)).one_or_none()
    if row is None:
        raise NotFound(f"session {session_id!r} has no media {sha256!r}")
    return decode_media(row)


def column_names(connection: Connection, session_ids: Collection[str] | None) -> list[str]:
    """Return the names of all columns of these sessions, None for all, sorted."""
    return _names(connection, schema.token_columns, session_ids)


def turns_with_column(connection: Connection, session_id: str, name: str) -> frozenset[int]:
    """Return `seq` of the turns of a session that have a column of this name."""
    of = schema.token_columns.c
    statement = select(of.turn).distinct().where(of.session_id == session_id, of.name == name)
    return frozenset(connection.execute(statement).scalars())


def payload_names(connection: Connection, session_ids: Collection[str] | None) -> list[str]:
    """Return the names of all payloads of these sessions, None for all, sorted."""
    return _names(connection, schema.token_payloads, session_ids)


def _names(connection: Connection, table: Table, session_ids: Collection[str] | None) -> list[str]:
    statement = select(table.c.name).distinct()
    if session_ids is None:
        return sorted(connection.execute(statement).scalars())
    found: set[str] = set()
    # A statement takes only so many parameters.
    for some in batched(session_ids, 500):
        found.update(connection.execute(statement.where(table.c.session_id.in_(some))).scalars())
    return sorted(found)


_OF_SESSION = schema.turns.c.session_id == bindparam("session_id")
_STATE = select(
    schema.sessions.c.created_at,
    select(func.coalesce(func.max(schema.turns.c.seq), -1) + 1).where(_OF_SESSION).scalar_subquery().label("turns"),
    select(schema.turns.c.digest)
    .where(_OF_SESSION, schema.turns.c.seq == bindparam("newest"))
    .scalar_subquery()
    .label("digest"),
).where(schema.sessions.c.session_id == bindparam("session_id"))


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
