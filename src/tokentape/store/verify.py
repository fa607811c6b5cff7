"""Check a record from outside: the file itself, every hash, every rule of a turn. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Result, Table, bindparam, exists, func, select, union

from tokentape.chat.media import image_parts
from tokentape.errors import StoreCorrupt, StoreError
from tokentape.store import postgres, schema
from tokentape.store.archive import is_archive, restored
from tokentape.store.checks import chained, column_faults, payload_faults, turn_faults
from tokentape.store.rows import decode
from tokentape.store.snapshots import decode_snapshot
from tokentape.store.sqlite import DATABASE_NAME, explained, reading_engine
from tokentape.types import Turn, TurnColumn, TurnPayload


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """One thing that is wrong with a record."""

    problem: str
    session_id: str | None = None
    """None if it isn't about one session."""
    turn: int | None = None
    """`seq` of the turn; None if it isn't about one turn."""

    def __str__(self) -> str:
        where = "database" if self.session_id is None else f"session {self.session_id}"
        return f"{where}{'' if self.turn is None else f' turn {self.turn}'}: {self.problem}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked and what was found."""

    sessions: int
    turns: int
    """Turns that could be read, faulty ones included."""
    tokens: int
    """Unique tokens of those turns."""
    findings: tuple[VerifyFinding, ...]

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return not self.findings


def verify(location: str | Path) -> VerifyReport:
    """Check the record in a data directory, PostgreSQL database or archive, beside running writers or without one.

    SQLite's own integrity check; every setup's and turn's digest recomputed, every turn chained to its parent;
    turns numbered from 0 without gaps, each parent before its child; `checks.turn_faults`; columns and payloads
    that fit their turns; the hash of every image, and that turns refer to those there are; snapshots whose sessions are
    there. A digest does not cover rewards, events, columns, payloads and
    session metadata: of those only the form is checked. Nor can a chain tell that its newest turns were cut off.

    An archive is put into a database for that, its files' hashes checked on the way. Raises `StoreError` if there is
    no database; whatever is wrong with one is a finding.
    """
    if not postgres.is_url(str(location)) and is_archive(location):
        try:
            with restored(str(location)) as directory:
                return verify(directory)
        except StoreCorrupt as error:
            return VerifyReport(0, 0, 0, (VerifyFinding(str(error)),))
    if postgres.is_url(str(location)):
        check = _Check(postgres.reading_engine(str(location)), postgres.explained)
        with postgres.explained(), check.engine.connect():
            pass  # nothing is wrong with the record if the server can't be reached
    else:
        path = Path(location) / DATABASE_NAME
        if not path.is_file():
            raise StoreError(f"{path} does not exist: {location} is not a data directory")
        check = _Check(reading_engine(path), explained)
    try:
        check.run()
    finally:
        check.engine.dispose()
    return VerifyReport(check.sessions, check.turns, check.tokens, tuple(check.findings))


class _Check:
    """One run of `verify`: what it has counted and found so far."""

    def __init__(self, engine: Engine, explained: Callable[[], AbstractContextManager[None]]) -> None:
        self.sessions = self.turns = self.tokens = 0
        self.findings: list[VerifyFinding] = []
        self.engine = engine
        self._explained = explained
        self._good_setups: set[str] = set()

    def run(self) -> None:
        session_ids: list[str] = []
        with self._damage_found(), self._one_state() as connection:
            schema.check(connection)
            session_ids += connection.execute(_SESSION_IDS).scalars()
            self._check_file(connection)
            self._check_snapshots(connection)
            self._check_media(connection)
        for session_id in session_ids:
            # A snapshot each: a long one would keep a running writer's log from being recycled.
            with self._damage_found(session_id), self._one_state() as connection:
                self._check_session(connection, session_id)

    def _check_file(self, connection: Connection) -> None:
        if self.engine.dialect.name != "sqlite":
            return  # a server keeps its files itself
        for line in connection.exec_driver_sql("PRAGMA integrity_check").scalars():
            if line != "ok":
                self._found(f"SQLite: {line}")
        for table, *_ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            self._found(f"a row of {table} refers to one that isn't there")

    def _check_snapshots(self, connection: Connection) -> None:
        for row in connection.execute(select(schema.snapshots)):
            with self._damage_found():
                snapshot = decode_snapshot(row)
                if snapshot.state == "held":
                    for session_id in connection.execute(_CUT_OFF, {"snapshot_id": row.snapshot_id}).scalars():
                        self._found(f"snapshot {row.snapshot_id} holds more of it than there is", session_id)
        for session_id in connection.execute(_RISEN).scalars():
            self._found("it was dropped, and is there", session_id)

    def _check_media(self, connection: Connection) -> None:
        for sha256 in connection.execute(select(schema.media.c.sha256)).scalars():
            with self._damage_found():
                decode(
                    schema.media, connection.execute(select(schema.media).where(schema.media.c.sha256 == sha256)).one()
                )

    def _check_session(self, connection: Connection, session_id: str) -> None:
        def rows(table: Table, *columns: Any, **key: Any) -> Result[Any]:
            of_session = [table.c.session_id == session_id, *(table.c[name] == value for name, value in key.items())]
            return connection.execute(select(*(columns or [table])).where(*of_session).order_by(*columns))

        row = rows(schema.sessions).one_or_none()
        seqs = rows(schema.turns, schema.turns.c.seq).scalars().all()
        if row is None and not seqs:
            return  # deleted since the listing was read
        self.sessions += 1
        with self._damage_found(session_id):
            if row is None:
                raise StoreCorrupt("its turns are there, the session is not")
            decode(schema.sessions, row)
        for table in (schema.rewards, schema.events):
            with self._damage_found(session_id):
                if table is not schema.events or schema.has_events(connection):
                    for one in rows(table):
                        decode(table, one)
        columns, payloads = schema.token_columns, schema.token_payloads
        for position in rows(columns, columns.c.position).scalars().all():
            with self._damage_found(session_id):
                self._check_per_token(connection, decode(schema.token_columns, rows(columns, position=position).one()))
        for key in rows(payloads, payloads.c.turn, payloads.c.name).mappings().all():
            with self._damage_found(session_id):
                self._check_per_token(connection, decode(schema.token_payloads, rows(payloads, **key).one()))
        digests: dict[int | None, str] = {}
        for before, seq in zip([-1, *seqs], seqs, strict=False):
            with self._damage_found(session_id, seq):
                if seq != before + 1:
                    self._found(f"the turn before it is {before}, not {seq - 1}", session_id, seq)
                # Row by row, so that a damaged one doesn't hide the others.
                turn = _turn(connection, session_id, seq)
                self.turns += 1
                self.tokens += turn.added_ids.size + turn.completion_ids.size
                for problem in _turn_problems(turn, digests):
                    self._found(problem, session_id, seq)
                digests[seq] = turn.digest
                self._check_setup(connection, turn.setup)
                expected = {part[name] for part in image_parts(turn.messages) for name in ("sha256", "settings")}
                if {*rows(schema.turn_media, schema.turn_media.c.sha256, turn=seq).scalars()} != expected:
                    self._found("what it refers to of media is not what its messages say", session_id, seq)

    def _check_per_token(self, connection: Connection, record: TurnColumn | TurnPayload) -> None:
        turn = _turn(connection, record.session_id, record.turn)
        added, sampled = turn.added_ids.size, turn.completion_ids.size
        if isinstance(record, TurnColumn):
            faults = column_faults(record, added, sampled)
        else:
            faults = payload_faults(record, added, sampled, is_root=turn.parent is None)
        for problem in faults:
            self._found(problem, record.session_id, record.turn)

    def _check_setup(self, connection: Connection, digest: str) -> None:
        if digest in self._good_setups:
            return
        row = connection.execute(select(schema.setups).where(schema.setups.c.digest == digest)).one_or_none()
        if row is None:
            raise StoreCorrupt(f"its setup {digest!r} is not there")
        decode(schema.setups, row)
        self._good_setups.add(digest)

    @contextmanager
    def _one_state(self) -> Iterator[Connection]:
        with self._explained(), self.engine.connect() as connection, connection.begin():
            yield connection

    def _found(self, problem: str, session_id: str | None = None, turn: int | None = None) -> None:
        self.findings.append(VerifyFinding(problem, session_id, turn))

    @contextmanager
    def _damage_found(self, session_id: str | None = None, turn: int | None = None) -> Iterator[None]:
        """Turn what goes wrong on reading damaged data into a finding."""
        try:
            with self._explained():
                yield
        except StoreError as error:
            self._found(str(error), session_id, turn)
        except Exception as error:
            # A damaged row can hold values of any type, and an index can point anywhere.
            self._found(f"it can't be read ({type(error).__name__})", session_id, turn)


def _turn(connection: Connection, session_id: str, seq: int) -> Turn:
    table = schema.turns
    statement = select(*schema.readable(connection, table)).where(table.c.session_id == session_id, table.c.seq == seq)
    turn: Turn = decode(schema.turns, connection.execute(statement).one())
    return turn


def _turn_problems(turn: Turn, digests: Mapping[int | None, str]) -> Iterator[str]:
    """Yield what is wrong with a turn. `digests` has those of the turns before it."""
    yield from turn_faults(turn)
    if turn.parent is not None and turn.parent not in digests:
        yield f"its parent, turn {turn.parent}, can't be read or doesn't precede it"
    elif not chained(turn, digests.get(turn.parent)):
        yield "its contents don't fit its digest and its parent's"


_HELD = schema.snapshot_sessions
_CUT_OFF = select(_HELD.c.session_id).where(
    _HELD.c.snapshot_id == bindparam("snapshot_id"),
    _HELD.c.turns
    > select(func.count())
    .select_from(schema.turns.join(schema.sessions, schema.sessions.c.session_id == schema.turns.c.session_id))
    .where(schema.sessions.c.position == _HELD.c.position)
    .scalar_subquery(),
)
_RISEN = select(schema.tombstones.c.session_id).where(
    exists().where(schema.sessions.c.session_id == schema.tombstones.c.session_id)
)
_SESSION_IDS = union(select(schema.sessions.c.session_id), select(schema.turns.c.session_id))
"""Turns too, in case a session's own row is lost."""
