"""Verify a record without changing it: the file, all hashes, and the invariants of every turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy import Connection, CursorResult, Engine, Row, Select, Table, bindparam, exists, func, select

from tokentape._durable import durable_file
from tokentape.chat._media import image_parts
from tokentape.errors import StoreCorrupt, StoreError
from tokentape.store import _postgres as postgres
from tokentape.store import _schema as schema
from tokentape.store import _sqlite as sqlite
from tokentape.store._archive import is_archive, restored, runs_without_manifest
from tokentape.store._checks import chained, per_token_faults, schema_faults, turn_faults
from tokentape.store._head import Head, HeadComparison, HeadWriter, SessionHead, read_head
from tokentape.store._listing import TOKENS
from tokentape.store._location import refuse_output
from tokentape.store._reads import TOKENS_AT_ONCE, together
from tokentape.store._rows import decode, decode_all
from tokentape.store._snapshots import decode_snapshot
from tokentape.types import RecordedReply, Turn, TurnColumn, TurnPayload

_RowsOfSessions: TypeAlias = dict[Table, dict[str, list[Any]]]
_RowsOf: TypeAlias = Callable[..., Iterable[Row[Any]]]


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    problem: str
    session_id: str | None = None
    """None if the problem isn't about one session."""
    turn: int | None = None
    """The turn's `seq`; None if the problem isn't about one turn."""

    def __str__(self) -> str:
        where = "database" if self.session_id is None else f"session {self.session_id}"
        return f"{where}{'' if self.turn is None else f' turn {self.turn}'}: {self.problem}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The numbers of checked sessions, turns and tokens, and the findings."""

    sessions: int
    turns: int
    """The number of turns that could be read, including faulty turns."""
    tokens: int
    """The number of unique tokens in those turns."""
    findings: tuple[VerifyFinding, ...]
    head: str | None = None
    """The digest of the head that was written; None if no head was written."""
    added: Mapping[str, int] | None = None
    """The numbers of additions since the compared head: new `sessions`, and new items in existing sessions by part."""

    @property
    def ok(self) -> bool:
        return not self.findings


class _HeadWithheld(Exception):
    """Raised to discard the new head if the record has findings."""


def verify(
    location: str | Path,
    *,
    against: Head | str | Path | None = None,
    nothing_added: bool = False,
    head_out: Path | None = None,
    sign: Path | None = None,
) -> VerifyReport:
    """Verify the record in a data directory, PostgreSQL database or archive. Writers may be running.

    Checks SQLite's own integrity and its write-ahead log; tables, indexes and triggers; the digest of every setup and
    turn, and the chain from every turn to its parent; that turns are numbered from 0 without gaps, and parents precede
    children; `checks.turn_faults`; that columns, payloads and recorded answers fit their turns; the hash of every
    image, and that the images to which turns refer exist; that the sessions in snapshots exist. These checks alone
    can't find deleted sessions, deleted newest turns, recomputed digests, or valid changes to rewards, columns,
    payloads, events, answers and metadata.

    A comparison with `against`, a head saved earlier or its file, finds these: anything deleted, changed or moved since
    the head, or inserted before something in the head. Later additions are counted; with `nothing_added`, they are
    findings. The comparison can't show who added them. Sessions that were dropped on request count as deleted. An
    archive may have the sessions in a different order.

    `head_out` is the file for a new head of the record. Pass `sign`, a PEM file with an Ed25519 private key, to sign
    it. If the record has findings, no head is written.

    An archive is loaded into a temporary database, and the hashes of its files are checked. Faults in the record are
    findings. Raises `StoreError` if there is no database or its schema version is different, and `InvalidRequest` if
    the head, key or output is unusable.
    """
    if head_out is not None:
        refuse_output(head_out, sign)
    if isinstance(against, str | Path):
        against = read_head(Path(against))
    comparison = None if against is None else HeadComparison(against)
    with suppress(_HeadWithheld), ExitStack() as opened:
        writer = None if head_out is None else HeadWriter(opened.enter_context(durable_file(head_out)), sign)
        report = _verify(location, [visitor.add for visitor in (comparison, writer) if visitor is not None])
        if comparison is not None:
            comparison.finish(ordered=not is_archive(location))
            since = [*comparison.problems, *(comparison.additions if nothing_added else ())]
            findings = (*report.findings, *(VerifyFinding(*problem) for problem in since))
            report = replace(report, findings=findings, added=dict(comparison.added))
        if writer is not None:
            if report.findings:
                raise _HeadWithheld
            report = replace(report, head=writer.finish())
    return report


def _verify(location: str | Path, visits: Sequence[Callable[[SessionHead], None]]) -> VerifyReport:
    if is_archive(location):
        try:
            with restored(str(location)) as directory:
                report = _verify(directory, visits)
            unread = [
                VerifyFinding(
                    f"the run {name} has no manifest.json, so its sessions were not checked and are not exported: "
                    "restore the file, or delete the folder if the run was interrupted and repeated"
                )
                for name in runs_without_manifest(str(location))
            ]
            return replace(report, findings=(*report.findings, *unread))
        except StoreCorrupt as error:
            return VerifyReport(0, 0, 0, (VerifyFinding(str(error)),))
    path = Path(location) / sqlite.DATABASE_NAME
    if postgres.is_url(str(location)):
        check = _Check(postgres.reading_engine(str(location)), postgres.explained)
    elif path.is_file():
        check = _Check(sqlite.reading_engine(path), sqlite.explained, path)
    else:
        raise StoreError(sqlite.no_database(location))
    try:
        if check.path is None:
            postgres.connect(check.engine).close()  # an unreachable server is an error, not a finding about the record
        else:
            with suppress(StoreCorrupt), sqlite.explained(), check.engine.connect() as connection:
                connection.exec_driver_sql("SELECT 1 FROM sqlite_master")  # so is a file that this user can't read
        for session in check.sessions_in_order():
            for visit in visits:
                visit(session)
        check.add_log_fault()
    finally:
        check.engine.dispose()
    check.add_file_faults()
    return VerifyReport(check.sessions, check.turns, check.tokens, tuple(check.findings))


class _Check:
    """A run of `verify`, with its counts and findings so far."""

    def __init__(
        self, engine: Engine, explained: Callable[[], AbstractContextManager[None]], path: Path | None = None
    ) -> None:
        self.sessions = self.turns = self.tokens = 0
        self.findings: list[VerifyFinding] = []
        self.engine = engine
        self._explained = explained
        self.path = path
        self._damaged = False
        self._good_setups: set[str] = set()

    def sessions_in_order(self) -> Iterator[SessionHead]:
        """Run all checks. Yield each session's head, in order of creation."""
        sizes: list[tuple[str, int]] = []
        other_version: StoreError | None = None
        with self._damage_as_findings(), self._read_snapshot() as connection:
            try:
                schema.check(connection)
            except StoreCorrupt:
                raise
            except StoreError as error:
                other_version = error
                raise
            for problem in schema_faults(connection):
                self._add_finding(problem)
            sizes += [(session_id, TOKENS_AT_ONCE) for session_id in connection.execute(_SESSION_IDS).scalars()]
            with suppress(Exception):  # damaged sessions are checked one by one
                sizes = [(session_id, size) for session_id, size in connection.execute(_SIZES)]
            sizes += [(session_id, TOKENS_AT_ONCE) for session_id in connection.execute(_WITHOUT_SESSION).scalars()]
            self._check_file(connection)
            self._check_snapshots(connection)
            self._check_media(connection)
        if other_version is not None:
            raise other_version  # the record can't be checked
        for chunk in together(sizes, TOKENS_AT_ONCE):
            # A long read transaction would keep a running writer's log from being recycled.
            heads = self._checked_together(chunk)
            yield from (head for head in heads if head.parts)
            for session_id in () if heads else chunk:
                head = SessionHead(session_id)
                with self._damage_as_findings(session_id), self._read_snapshot() as connection:
                    self._check_session(connection, head)
                if head.parts:
                    yield head

    def _checked_together(self, session_ids: Sequence[str]) -> list[SessionHead]:
        """Check sessions with few statements. If anything is found, return no heads: check each session alone then."""
        before = self.sessions, self.turns, self.tokens
        heads = [SessionHead(session_id) for session_id in session_ids]
        count = len(self.findings)
        with suppress(Exception), self._read_snapshot() as connection:
            rows = _rows_of_sessions(connection, session_ids)
            for head in heads:
                self._check_session(connection, head, rows)
            if len(self.findings) == count:
                return heads
        self.sessions, self.turns, self.tokens = before
        del self.findings[count:]
        return []

    def _check_file(self, connection: Connection) -> None:
        if self.engine.dialect.name != "sqlite":
            return  # a server manages its files itself
        for line in connection.exec_driver_sql("PRAGMA integrity_check").scalars():
            if line != "ok":
                self._add_finding(f"SQLite: {line}")
        for table, *_ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            self._add_finding(f"a row in {table} refers to a row that does not exist")

    def add_log_fault(self) -> None:
        if self.path is not None and (fault := sqlite.log_fault(self.path)):
            self._add_finding(f"{fault}; restore a backup")

    def add_file_faults(self) -> None:
        """If SQLite found the file damaged, add what its header and size show."""
        for problem in sqlite.file_faults(self.path) if self._damaged and self.path else ():
            self._add_finding(problem)

    def _check_snapshots(self, connection: Connection) -> None:
        for row in connection.execute(select(schema.snapshots)):
            with self._damage_as_findings():
                snapshot = decode_snapshot(row)
                if snapshot.state == "held":
                    for session_id in connection.execute(_CUT_OFF, {"snapshot_id": row.snapshot_id}).scalars():
                        self._add_finding(f"snapshot {row.snapshot_id} has turns that the session lacks", session_id)
        for session_id in connection.execute(_RISEN).scalars():
            self._add_finding("the session was dropped but still exists", session_id)

    def _check_media(self, connection: Connection) -> None:
        for sha256 in connection.execute(select(schema.media.c.sha256)).scalars():
            with self._damage_as_findings():
                whole = select(schema.media).where(schema.media.c.sha256 == sha256)
                decode(schema.media, connection.execute(whole).one())

    def _check_session(self, connection: Connection, head: SessionHead, known: _RowsOfSessions | None = None) -> None:
        """Check a session. Its rows are in `known`, or are read from the database if that is None."""
        session_id = head.session_id

        def rows(table: Table, *columns: Any, **key: Any) -> Iterable[Row[Any]]:
            if known is not None and not key:
                return known[table].get(session_id, ())
            return _rows(connection, session_id, table, *columns, **key)

        row = next(iter(rows(schema.sessions)), None)
        listed: list[Any] = [*rows(schema.turns, schema.turns.c.seq)]
        seqs = [turn_row.seq for turn_row in listed]
        if row is None and not seqs:
            return  # deleted since the listing was read
        self.sessions += 1
        with self._damage_as_findings(session_id):
            if row is None:
                raise StoreCorrupt("its turns exist, but the session does not")
            head.add(decode(schema.sessions, row))
        self._check_records(head, rows, {*seqs})
        self._check_token_rows(connection, head, rows)
        media: dict[int, set[str]] = {}
        with self._damage_as_findings(session_id):
            for row in rows(schema.turn_media, schema.turn_media.c.turn, schema.turn_media.c.sha256):
                media.setdefault(row.turn, set()).add(row.sha256)
        digests: dict[int | None, str] = {}
        for before, seq, turn in zip([-1, *seqs], seqs, listed, strict=False):
            if seq != before + 1:
                self._add_finding(f"the turn before it is {before}, not {seq - 1}", session_id, seq)
            try:
                if known is None:
                    [row] = rows(schema.turns, seq=seq)
                    turn = decode(schema.turns, row)
                head.add(turn)
                self._check_turn(connection, turn, digests, media.get(seq, set()))
            except Exception as error:  # entering the context for each turn would cost more than decoding it
                with self._damage_as_findings(session_id, seq):
                    raise error
        with self._damage_as_findings(session_id):
            for turn_seq, sha256, mime in connection.execute(_MEDIA, {"session_id": session_id}) if media else ():
                head.add_media(turn_seq, sha256, mime)
            # Each database sorts text differently.
            head.parts.get("payloads", []).sort()

    def _check_records(self, head: SessionHead, rows: _RowsOf, seqs: set[int]) -> None:
        """Check a session's rewards, events and answers to retries."""
        for table in (schema.rewards, schema.events, schema.answers):
            with self._damage_as_findings(head.session_id):
                for row in rows(table):
                    with self._damage_as_findings(head.session_id):
                        record = decode(table, row)
                        head.add(record)
                        if isinstance(record, RecordedReply) and not seqs.issuperset(record.turns):
                            raise StoreCorrupt("an answer to a retry names turns that do not exist")

    def _check_token_rows(self, connection: Connection, head: SessionHead, rows: _RowsOf) -> None:
        """Check a session's columns and payloads."""
        columns, payloads = schema.token_columns, schema.token_payloads
        for table, names in ((columns, [columns.c.position]), (payloads, [payloads.c.turn, payloads.c.name])):
            for key in [*rows(table, *names)]:
                with self._damage_as_findings(head.session_id):
                    [row] = rows(table, **{name.name: getattr(key, name.name) for name in names})
                    record = decode(table, row)
                    head.add(record)
                    self._check_per_token(connection, record)

    def _check_turn(self, connection: Connection, turn: Turn, digests: dict[int | None, str], media: set[str]) -> None:
        """Check a turn after those in `digests`, and add its digest to them. `media` are the images that it names."""
        self.turns += 1
        self.tokens += turn.added_ids.size + turn.completion_ids.size
        for problem in _turn_problems(turn, digests):
            self._add_finding(problem, turn.session_id, turn.seq)
        digests[turn.seq] = turn.digest
        self._check_setup(connection, turn.setup)
        if media != {part[name] for part in image_parts(turn.messages) for name in ("sha256", "settings")}:
            self._add_finding("its media references differ from those in its messages", turn.session_id, turn.seq)

    def _check_per_token(self, connection: Connection, record: TurnColumn | TurnPayload) -> None:
        [row] = _rows(connection, record.session_id, schema.turns, seq=record.turn)
        turn: Turn = decode(schema.turns, row)
        sizes = turn.added_ids.size, turn.completion_ids.size
        for problem in per_token_faults(record, *sizes, is_root=turn.parent is None):
            self._add_finding(problem, record.session_id, record.turn)

    def _check_setup(self, connection: Connection, digest: str) -> None:
        if digest in self._good_setups:
            return
        row = connection.execute(select(schema.setups).where(schema.setups.c.digest == digest)).one_or_none()
        if row is None:
            raise StoreCorrupt(f"its setup {digest!r} is missing")
        decode(schema.setups, row)
        self._good_setups.add(digest)

    @contextmanager
    def _read_snapshot(self) -> Iterator[Connection]:
        with self._explained(), self.engine.connect() as connection, connection.begin():
            yield connection

    def _add_finding(self, problem: str, session_id: str | None = None, turn: int | None = None) -> None:
        self.findings.append(VerifyFinding(problem, session_id, turn))

    @contextmanager
    def _damage_as_findings(self, session_id: str | None = None, turn: int | None = None) -> Iterator[None]:
        """Convert exceptions from damaged data to findings."""
        try:
            with self._explained():
                yield
        except StoreError as error:
            problem = str(error)
            if sqlite.SHOWN_BY_VERIFY in problem:
                self._damaged = True
                problem = problem.replace(sqlite.SHOWN_BY_VERIFY, "; restore it from a backup or an archive")
            self._add_finding(problem, session_id, turn)
        except Exception as error:
            # A damaged row may contain values of any type, and an index may point anywhere.
            self._add_finding(f"it can't be read ({type(error).__name__})", session_id, turn)


def _rows(connection: Connection, session_id: str, table: Table, *columns: Any, **key: Any) -> CursorResult[Any]:
    """Read a session's rows: `columns` (by default all) of the rows with the values in `key`."""
    return connection.execute(_of_session(table, columns, (*key,)), {"session_id": session_id, **key})


@cache
def _of_session(table: Table, columns: tuple[Any, ...], key: tuple[str, ...]) -> Select[Any]:
    """Return the statement that reads a session's rows. The columns in `key` are additional parameters."""
    equal = [table.c[name] == bindparam(name) for name in ("session_id", *key)]
    return select(*(columns or [table])).where(*equal).order_by(*columns or table.primary_key)


def _rows_of_sessions(connection: Connection, session_ids: Sequence[str]) -> _RowsOfSessions:
    """Read the rows of several sessions, by table and session. For columns and payloads, read only the keys.

    Turns are already decoded.
    """
    by_table: _RowsOfSessions = {}
    for table, keys in _KEYS.items():
        rows = by_table[table] = {}
        found = connection.execute(_of_sessions(table, keys or (table,)), {"session_ids": session_ids}).all()
        for row, record in zip(found, decode_all(table, found) if table is schema.turns else found, strict=True):
            rows.setdefault(row[-1], []).append(record)
    return by_table


@cache
def _of_sessions(table: Table, columns: tuple[Any, ...]) -> Select[Any]:
    of = table.c.session_id
    condition = of.in_(bindparam("session_ids", expanding=True))
    return select(*columns, of.label("of_session")).where(condition).order_by(of, *table.primary_key)


def _turn_problems(turn: Turn, digests: Mapping[int | None, str]) -> Iterator[str]:
    """Yield a turn's faults. `digests` are the digests of the turns before it."""
    yield from turn_faults(turn)
    if turn.parent is not None and turn.parent not in digests:
        yield f"its parent, turn {turn.parent}, can't be read or doesn't precede it"
    elif not chained(turn, digests.get(turn.parent)):
        yield "its contents don't match its digest and its parent's"


_HELD = schema.snapshot_sessions.c
_IN_SESSION = schema.turns.join(schema.sessions, schema.sessions.c.session_id == schema.turns.c.session_id)
_THERE = select(func.count()).select_from(_IN_SESSION).where(schema.sessions.c.position == _HELD.position)
_CUT_OFF = select(_HELD.session_id).where(
    _HELD.snapshot_id == bindparam("snapshot_id"), _HELD.turns > _THERE.scalar_subquery()
)
_RISEN = select(schema.tombstones.c.session_id).where(
    exists().where(schema.sessions.c.session_id == schema.tombstones.c.session_id)
)
_KEYS: dict[Table, tuple[Any, ...]] = {
    **dict.fromkeys((schema.sessions, schema.turns, schema.rewards, schema.events, schema.answers), ()),
    schema.token_columns: (schema.token_columns.c.position,),
    schema.token_payloads: (schema.token_payloads.c.turn, schema.token_payloads.c.name),
    schema.turn_media: (schema.turn_media.c.turn, schema.turn_media.c.sha256),
}
_SIZES = select(schema.sessions.c.session_id, TOKENS).order_by(schema.sessions.c.position)
_SESSION_IDS = select(schema.sessions.c.session_id).order_by(schema.sessions.c.position)
_WITHOUT_SESSION = (
    select(schema.turns.c.session_id)
    .distinct()
    .where(~exists().where(schema.sessions.c.session_id == schema.turns.c.session_id))
)
"""Turns without a row for their session."""
_MEDIA = (
    select(schema.turn_media.c.turn, schema.media.c.sha256, schema.media.c.mime)
    .join(schema.media, schema.media.c.sha256 == schema.turn_media.c.sha256)
    .where(schema.turn_media.c.session_id == bindparam("session_id"))
    .order_by(schema.turn_media.c.turn, schema.media.c.sha256)
)
