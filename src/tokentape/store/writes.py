"""What a write does inside its transaction: the inserts, and the checks that need the database."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, bindparam, exists, func, insert, literal, select
from sqlalchemy import delete as delete_from

from tokentape.errors import Conflict, InvariantViolation, NotFound
from tokentape.store import schema
from tokentape.store.checks import chained, turn_faults
from tokentape.store.rows import Record, Values, encode
from tokentape.types import Setup, Turn


def insert_records(connection: Connection, records: Iterable[Record]) -> int:
    """Insert `records` in the given order and return about how many bytes they take.

    A setup that is already there is left alone. A turn must be the session's next, fit its parent's digest and
    keep the rules of `turn_faults`: what doesn't is not let into the record.

    Raises `Conflict` for a turn number that isn't the next, `NotFound` for a turn of an unknown session, and
    `InvariantViolation`; a constraint of the database raises SQLAlchemy's IntegrityError.
    """
    size = 0
    for record in records:
        table, values = encode(record)
        match record:
            case Setup():
                _insert_setup(connection, values)
            case Turn():
                _check_turn(connection, record)
                connection.execute(insert(table), values)
            case _:
                connection.execute(insert(table), values)
        size += sum(len(value) for value in values.values() if isinstance(value, str | bytes))
    return size


def delete_session(connection: Connection, session_id: str) -> int:
    """Delete a session with its turns and rewards; return 0, for it takes no room. Raises `NotFound`."""
    statement = delete_from(schema.sessions).where(schema.sessions.c.session_id == session_id)
    if connection.execute(statement).rowcount == 0:
        raise NotFound(f"there is no session {session_id!r}")
    return 0


def _insert_setup(connection: Connection, values: Values) -> None:
    # INSERT ... SELECT because ON CONFLICT DO NOTHING is spelled per dialect in SQLAlchemy.
    known = exists().where(schema.setups.c.digest == values["digest"])
    row = select(*(literal(value) for value in values.values())).where(~known)
    connection.execute(insert(schema.setups).from_select(list(values), row))


_BEFORE_TURN = select(
    exists().where(schema.sessions.c.session_id == bindparam("session_id")).label("session_exists"),
    select(func.max(schema.turns.c.seq))
    .where(schema.turns.c.session_id == bindparam("session_id"))
    .scalar_subquery()
    .label("newest"),
    select(schema.turns.c.digest)
    .where(schema.turns.c.session_id == bindparam("session_id"), schema.turns.c.seq == bindparam("parent"))
    .scalar_subquery()
    .label("parent_digest"),
)


def _check_turn(connection: Connection, turn: Turn) -> None:
    name = f"turn {turn.seq} of session {turn.session_id!r}"
    before = connection.execute(_BEFORE_TURN, {"session_id": turn.session_id, "parent": turn.parent}).one()
    if not before.session_exists:
        raise NotFound(f"there is no session {turn.session_id!r}")
    expected = 0 if before.newest is None else before.newest + 1
    if turn.seq != expected:
        raise Conflict(f"{name} can't be recorded: the session's next turn is {expected}")
    if turn.parent is not None and before.parent_digest is None:
        raise InvariantViolation(f"{name} continues turn {turn.parent}, which is not recorded")
    for fault in turn_faults(turn):
        raise InvariantViolation(f"{name}: {fault}")
    if not chained(turn, before.parent_digest):
        raise InvariantViolation(f"{name} has a digest that doesn't fit its fields and its parent")
