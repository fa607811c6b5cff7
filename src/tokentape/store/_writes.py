"""Run the part of a write that is inside its transaction: inserts, and checks that need the database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Executable, Table, bindparam, exists, func, insert, select
from sqlalchemy import delete as delete_from
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ClauseElement

from tokentape._batches import batched
from tokentape.chat._media import image_parts
from tokentape.errors import Conflict, InvariantViolation, NotFound
from tokentape.store import _schema as schema
from tokentape.store._checks import chained, per_token_faults, turn_faults
from tokentape.store._files import EXTERNAL, remove_payloads
from tokentape.store._rows import COLUMNS, Record, Values, encode
from tokentape.types import Media, SessionInfo, Setup, Turn, TurnColumn, TurnPayload


def insert_records(connection: Connection, records: Iterable[Record]) -> int:
    """Insert `records` in the given order. Return approximately how many bytes they take.

    Setups and media that are already recorded are skipped. A turn must be its session's next turn, match its parent's
    digest and have no `turn_faults`.

    Raises `Conflict` if a turn is not the next turn, `NotFound` if a turn's session is unknown, and
    `InvariantViolation` for other faults. Database constraints raise SQLAlchemy's IntegrityError.
    """
    size = 0
    for record in records:
        table, values = encode(record)
        match record:
            case Turn():
                _check_turn(connection, record)
            case SessionInfo():
                refuse_dropped(connection, record.session_id)
            case TurnColumn():
                _check_of_turn(connection, record)
                connection.execute(_OLD_COLUMN, values)
            case TurnPayload():
                _check_of_turn(connection, record)
                _check_same_kind(connection, values)
        _INSERT[table].run(connection, values)
        if isinstance(record, Turn):
            _refer_to_media(connection, record)
        size += sum([len(value) for value in values.values() if isinstance(value, str | bytes)])
    return size


def claims(records: Iterable[Record]) -> frozenset[str]:
    """Return the names of what inserting `records` changes, to lock it against other transactions."""
    names: set[str] = set()
    for record in records:
        match record:
            case Setup():
                names.add(f"setup {record.digest}")
            case Media():
                names.add(f"media {record.sha256}")
            case SessionInfo():
                # Lock `sessions` so that they are numbered in the order in which they become visible.
                names |= {"sessions", f"session {record.session_id}"}
            case _:
                names.add(f"session {record.session_id}")
    return frozenset(names)


def insert_again(connection: Connection, records: Iterable[Record]) -> int:
    """Insert `records` unless an earlier insert with an unknown outcome did. It recorded either all of them or none."""
    # Don't look for a setup or media, which other calls may have inserted.
    own = [record for record in records if not isinstance(record, Setup | Media)]
    if own:
        table, values = encode(own[-1])
        same = exists().where(*(table.c[name] == value for name, value in values.items()))
        if connection.execute(select(same)).scalar_one():
            return 0
    return insert_records(connection, records)


def delete_session(connection: Connection, session_id: str, *, force: bool = False) -> None:
    """See `Store.delete_session`."""
    if not force and (holder := holder_of(connection, session_id)) is not None:
        raise Conflict(
            f"session {session_id!r} is part of snapshot {holder}, which its consumer has not confirmed; "
            "confirm or release the snapshot first"
        )
    if not delete_rows(connection, session_id):
        raise NotFound(f"there is no session {session_id!r}")


def holder_of(connection: Connection, session_id: str, besides: int = 0) -> int | None:
    """Return the id of an unconfirmed snapshot, other than `besides`, that contains a session; None if none does."""
    snapshot_id: int | None = connection.execute(_HOLDER, {"session_id": session_id, "besides": besides}).scalar()
    return snapshot_id


def delete_rows(connection: Connection, session_id: str) -> bool:
    """Delete a session's payload files, the session, and media used only by it. Return whether it existed."""
    files = connection.execute(_FILES, {"session_id": session_id}).scalars()
    remove_payloads(session_id, [bytes(address).decode() for address in files])
    references = schema.turn_media.c
    media = connection.execute(select(references.sha256).distinct().where(references.session_id == session_id))
    hashes = media.scalars().all()
    deleted = connection.execute(delete_from(schema.sessions).where(schema.sessions.c.session_id == session_id))
    used = exists().where(references.sha256 == schema.media.c.sha256)
    for chunk in batched(hashes, 500):
        connection.execute(delete_from(schema.media).where(schema.media.c.sha256.in_(chunk), ~used))
    return deleted.rowcount > 0


def refuse_dropped(connection: Connection, session_id: str) -> None:
    """Raise `Conflict` if a session with this id was dropped, so that a late writer can't create it again."""
    dropped = TOMBSTONE.run(connection, {"session_id": session_id})
    if dropped is not None:
        raise Conflict(
            f"session {session_id!r} was dropped after snapshot {dropped[0]} was confirmed; use a new session id"
        )


def _insert_unless_known(table: Table) -> CompiledStatement:
    """Return the statement that inserts a row unless its primary key, a digest of its contents, is in the table."""
    key, columns = next(iter(table.primary_key)), [table.c[name] for name, _ in COLUMNS[table]]
    # INSERT ... SELECT because ON CONFLICT DO NOTHING is spelled per dialect in SQLAlchemy.
    row = select(*(bindparam(column.name, type_=column.type) for column in columns))
    return CompiledStatement(insert(table).from_select(columns, row.where(~exists().where(key == bindparam(key.name)))))


def _refer_to_media(connection: Connection, turn: Turn) -> None:
    hashes = {part[name] for part in image_parts(turn.messages) for name in ("sha256", "settings")}
    if not hashes:
        return
    statement = select(schema.media.c.sha256).where(schema.media.c.sha256.in_(hashes))
    recorded = connection.execute(statement).scalars().all()
    if len(recorded) < len(hashes):
        raise InvariantViolation(f"turn {turn.seq} of session {turn.session_id!r} has images that are not recorded")
    of_turn = {"session_id": turn.session_id, "turn": turn.seq}
    connection.execute(insert(schema.turn_media), [{**of_turn, "sha256": sha256} for sha256 in sorted(hashes)])


class CompiledStatement:
    """A statement that runs for every turn, compiled once per kind of database.

    Its parameters must have the driver's types: numbers, text, bytes, None. SQLAlchemy's own cache of compiled
    statements and its conversion of parameters and results take more time than SQLite itself.
    """

    def __init__(self, statement: Executable) -> None:
        assert isinstance(statement, ClauseElement)
        self._statement = statement
        self._compiled: dict[str, tuple[str, tuple[str, ...] | None]] = {}
        """By dialect, the SQL text and, if its parameters are positional, their names."""

    def run(self, connection: Connection, values: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Run the statement with named parameters, ignoring unknown names. Return the first row, or None."""
        dialect = connection.dialect
        entry = self._compiled.get(dialect.name)
        if entry is None:
            compiled = self._statement.compile(dialect=dialect)
            assert isinstance(compiled, SQLCompiler)
            names = compiled.positiontup
            entry = self._compiled[dialect.name] = str(compiled), None if names is None else tuple(names)
        text, order = entry
        if order is None:
            result = connection.exec_driver_sql(text, dict(values))
            row = result.first() if result.returns_rows else None
            return None if row is None else tuple(row)
        parameters = tuple([values[name] for name in order])
        first: tuple[Any, ...] | None = execute_directly(connection, text, parameters).fetchone()
        return first


def execute_directly(connection: Connection, text: str, parameters: tuple[Any, ...] = ()) -> sqlite3.Cursor:
    """Execute SQL with SQLite's driver, without SQLAlchemy's layers. Raises SQLAlchemy's `DBAPIError`."""
    driver: Any = connection.connection.dbapi_connection
    assert isinstance(driver, sqlite3.Connection)
    try:
        return driver.execute(text, parameters)
    except sqlite3.Error as error:
        raise DBAPIError.instance(
            text, None, error, sqlite3.Error, hide_parameters=True, dialect=connection.dialect
        ) from error


_IN_SESSION = schema.turns.c.session_id == bindparam("session_id")
_NEWEST = select(func.max(schema.turns.c.seq)).where(_IN_SESSION).scalar_subquery()
_PARENT = select(schema.turns.c.digest).where(_IN_SESSION, schema.turns.c.seq == bindparam("parent")).scalar_subquery()
_BEFORE_TURN = CompiledStatement(
    select(exists().where(schema.sessions.c.session_id == bindparam("session_id")), _NEWEST, _PARENT)
)
_INSERT = {
    table: CompiledStatement(insert(table).values({name: bindparam(name) for name, _ in COLUMNS[table]}))
    for table in COLUMNS
} | {table: _insert_unless_known(table) for table in (schema.setups, schema.media)}
TOMBSTONE = CompiledStatement(
    select(schema.tombstones.c.snapshot_id, schema.tombstones.c.owner).where(
        schema.tombstones.c.session_id == bindparam("session_id")
    )
)


def _check_turn(connection: Connection, turn: Turn) -> None:
    name = f"turn {turn.seq} of session {turn.session_id!r}"
    before = _BEFORE_TURN.run(connection, {"session_id": turn.session_id, "parent": turn.parent})
    assert before is not None
    session_exists, newest, parent_digest = before
    if not session_exists:
        raise NotFound(f"there is no session {turn.session_id!r}")
    expected = 0 if newest is None else newest + 1
    if turn.seq != expected:
        raise Conflict(f"{name} can't be recorded: the session's next turn must be {expected}")
    if turn.parent is not None and parent_digest is None:
        raise InvariantViolation(f"{name} continues turn {turn.parent}, which is not recorded")
    for fault in turn_faults(turn):
        raise InvariantViolation(f"{name}: {fault}")
    if not chained(turn, parent_digest):
        raise InvariantViolation(f"{name} has a digest that doesn't match its fields and its parent")


_SIZES = select(
    (func.length(schema.turns.c.added_ids) / 4).label("added"),
    (func.length(schema.turns.c.completion_ids) / 4).label("sampled"),
    schema.turns.c.parent,
).where(schema.turns.c.session_id == bindparam("session_id"), schema.turns.c.seq == bindparam("turn"))


def _check_of_turn(connection: Connection, record: TurnColumn | TurnPayload) -> None:
    of_turn = {"session_id": record.session_id, "turn": record.turn}
    turn = connection.execute(_SIZES, of_turn).one_or_none()
    if turn is None:
        raise NotFound(f"session {record.session_id!r} has no turn {record.turn}")
    for fault in per_token_faults(record, int(turn.added), int(turn.sampled), is_root=turn.parent is None):
        raise InvariantViolation(f"turn {record.turn} of session {record.session_id!r}: {fault}")


def _check_same_kind(connection: Connection, values: Values) -> None:
    """Check that all payload rows with the same name in a session can form one array."""
    of_name = {"session_id": values["session_id"], "name": values["name"]}
    other = connection.execute(_OTHER_PAYLOAD, of_name).first()
    if other is None:
        return
    kind = values["dtype"], json.loads(values["shape"])[1:]
    expected = other.dtype, json.loads(other.shape)[1:]
    if kind != expected:
        raise InvariantViolation(
            f"payload {values['name']!r} has rows of {kind[0]} {kind[1]}, "
            f"but earlier turns of session {values['session_id']!r} have {expected[0]} {expected[1]}; use a new session"
        )


_PAYLOADS = schema.token_payloads.c
_OTHER_PAYLOAD = select(_PAYLOADS.dtype, _PAYLOADS.shape).limit(1)
_OTHER_PAYLOAD = _OTHER_PAYLOAD.where(
    _PAYLOADS.session_id == bindparam("session_id"), _PAYLOADS.name == bindparam("name")
)

_FILES = select(_PAYLOADS.data).where(
    _PAYLOADS.session_id == bindparam("session_id"), _PAYLOADS.packed.startswith(EXTERNAL)
)

_IN_SNAPSHOT = schema.snapshot_sessions.join(
    schema.snapshots, schema.snapshots.c.snapshot_id == schema.snapshot_sessions.c.snapshot_id
)

_OLD_COLUMN = delete_from(schema.token_columns).where(
    schema.token_columns.c.session_id == bindparam("session_id"),
    schema.token_columns.c.turn == bindparam("turn"),
    schema.token_columns.c.name == bindparam("name"),
    schema.token_columns.c.position
    > select(func.coalesce(func.max(schema.snapshot_sessions.c.last_column), 0))
    .select_from(_IN_SNAPSHOT)
    .where(schema.snapshot_sessions.c.session_id == bindparam("session_id"), schema.snapshots.c.state != "released")
    .scalar_subquery(),
)
"""Deletes the values that new values replace, except values that a snapshot contains."""

_HOLDER = (
    select(schema.snapshots.c.snapshot_id)
    .select_from(_IN_SNAPSHOT.join(schema.sessions, schema.sessions.c.position == schema.snapshot_sessions.c.position))
    .where(schema.sessions.c.session_id == bindparam("session_id"), schema.snapshots.c.state == "held")
    .where(schema.snapshots.c.snapshot_id != bindparam("besides"))
    .limit(1)
)
