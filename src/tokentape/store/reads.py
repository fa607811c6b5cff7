"""What a read does inside its transaction: listings and whole sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from tokentape.errors import NotFound, StoreCorrupt
from tokentape.store import schema
from tokentape.store.checks import chained
from tokentape.store.rows import decode_answer, decode_reward, decode_session, decode_setup, decode_turn
from tokentape.types import Answer, Reward, SessionInfo, Setup, Turn


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One line of a listing."""

    info: SessionInfo
    position: int
    """Rank in order of creation. Grows, never reused, may have gaps: the cursor for the next page."""
    turns: int
    tokens: int
    """Unique tokens: each added or sampled token once, however many contexts it was part of."""
    sampled_tokens: int


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


def list_sessions(connection: Connection, limit: int, after: int, owner: str | None) -> list[SessionSummary]:
    """Return up to `limit` sessions with a position greater than `after`, in order of position.

    `owner` None stands for everybody's.
    """
    page = (
        select(schema.sessions)
        .where(schema.sessions.c.position > after, *([] if owner is None else [schema.sessions.c.owner == owner]))
        .order_by(schema.sessions.c.position)
        .limit(limit)
        .subquery()
    )
    added = func.coalesce(func.sum(func.length(schema.turns.c.added_ids)), 0)
    sampled = func.coalesce(func.sum(func.length(schema.turns.c.completion_ids)), 0)
    statement = (
        select(
            page,
            func.count(schema.turns.c.seq).label("turns"),
            added.label("added_bytes"),
            sampled.label("sampled_bytes"),
        )
        .select_from(page.outerjoin(schema.turns, schema.turns.c.session_id == page.c.session_id))
        .group_by(*page.c)
        .order_by(page.c.position)
    )
    return [
        SessionSummary(
            info=decode_session(row),
            position=row.position,
            turns=row.turns,
            tokens=(row.added_bytes + row.sampled_bytes) // _BYTES_PER_ID,
            sampled_tokens=row.sampled_bytes // _BYTES_PER_ID,
        )
        for row in connection.execute(statement)
    ]


def load_session(connection: Connection, session_id: str) -> StoredSession:
    """Return a session with its hash chain checked.

    Raises `NotFound` if there is none and `StoreCorrupt` if a record can't be read or doesn't fit the chain.
    """
    of_session = schema.sessions.c.session_id == session_id
    row = connection.execute(select(schema.sessions).where(of_session)).one_or_none()
    if row is None:
        raise NotFound(f"there is no session {session_id!r}")
    info = decode_session(row)
    turns = _load_turns(connection, session_id)
    digests = select(schema.turns.c.setup).where(schema.turns.c.session_id == session_id)
    setups = map(decode_setup, connection.execute(select(schema.setups).where(schema.setups.c.digest.in_(digests))))
    rewards = connection.execute(
        select(schema.rewards).where(schema.rewards.c.session_id == session_id).order_by(schema.rewards.c.position)
    )
    answers = connection.execute(
        select(schema.answers).where(schema.answers.c.session_id == session_id).order_by(schema.answers.c.first_turn)
    )
    return StoredSession(
        info=info,
        setups={setup.digest: setup for setup in setups},
        turns=turns,
        rewards=tuple(map(decode_reward, rewards)),
        answers=tuple(map(decode_answer, answers)),
    )


_BYTES_PER_ID = 4


def _load_turns(connection: Connection, session_id: str) -> tuple[Turn, ...]:
    rows = connection.execute(
        select(schema.turns).where(schema.turns.c.session_id == session_id).order_by(schema.turns.c.seq)
    )
    turns: list[Turn] = []
    digests: dict[int | None, str] = {}
    for row in rows:
        turn = decode_turn(row)
        if turn.seq != len(turns) or not chained(turn, digests.get(turn.parent)):
            raise StoreCorrupt(
                f"turn {turn.seq} of session {session_id!r} doesn't fit the hash chain; "
                "run `tokentape verify` to see what else is damaged"
            )
        turns.append(turn)
        digests[turn.seq] = turn.digest
    return tuple(turns)
