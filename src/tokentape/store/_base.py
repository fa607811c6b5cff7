"""What every store does, whatever database is below: reads of one state, writes that are durable when they return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, Engine, bindparam, exists, func, select, true
from sqlalchemy.exc import DBAPIError

from tokentape._session.arrow import ExtraNames
from tokentape._session.verdict import BRIDGE_CHECKED, BRIDGE_DUE
from tokentape.errors import NotFound, StoreError
from tokentape.store import _reads as reads
from tokentape.store import _schema as schema
from tokentape.store import _writes as writes
from tokentape.store._commit import Claims, CommitQueue, StoreFailure, Work
from tokentape.store._listing import SessionSummary, list_sessions
from tokentape.store._reads import Extent, SessionProgress, StoredSession
from tokentape.store._rows import Record, decode
from tokentape.types import Event, Media, Turn


class Store:
    """A record of sessions. `write` and `delete_session` are for the event loop; reads block and may run in any thread.

    `SqliteStore.open` and `PostgresStore.open` make one. It is a context manager that closes it.
    """

    def __init__(
        self,
        readers: Engine,
        commits: CommitQueue | None,
        release: ExitStack,
        explain: Callable[[DBAPIError], StoreFailure],
        *,
        shared: bool,
    ) -> None:
        self.shared = shared
        """Whether other processes may write too: then what this one remembers of a session may be out of date."""
        self._readers, self._commits, self._release, self._explain = readers, commits, release, explain
        self._closed = False

    @property
    def healthy(self) -> bool:
        """False once the store is closed or broken: then every write fails until a restart."""
        return not self._closed and not self.broken

    @property
    def broken(self) -> bool:
        """True if nothing can be recorded any more until the store is opened anew."""
        return self._commits is not None and self._commits.broken

    def check(self) -> None:
        """Raise `StoreError` or a kind of it, all with status 503, if nothing can be recorded now."""
        if not self.healthy:
            raise StoreError("the store is closed or broken; nothing can be recorded until a restart")

    async def write(self, *records: Record) -> None:
        """Record `records`, in the given order and all or none; return when they are durable.

        A setup or media that are already there are left alone. Records must not change until this returns. If the
        awaiting task is cancelled, the records may or may not become durable, but never a part of them.

        Raises `Conflict` if the session exists or the turn is not its next, `NotFound` if a record refers to
        a session or turn that isn't there, `InvalidRequest` or `InvariantViolation` if one is not fit to be
        recorded, `StoreFull` or `StoreError` if the disk is full or fails. After any of them nothing of this
        call is recorded. After `StoreUnavailable`, when a database server was lost on the way, it may be or may not be.
        """
        if records:
            work = partial(writes.insert_records, records=records)
            again = partial(writes.insert_again, records=records)
            await self.transact(work, again, writes.claims(records) if self.shared else None)

    async def delete_session(self, session_id: str, *, force: bool = False) -> None:
        """Delete a session with all that is recorded of it; return when that is durable.

        Raises `NotFound`, and unless `force` is given `Conflict` if a snapshot that is not confirmed holds it.
        """
        await self.transact(partial(writes.delete_session, session_id=session_id, force=force))

    def sessions(self, limit: int = 100, after: int = 0, owner: str | None = None) -> list[SessionSummary]:
        """Return up to `limit` sessions in order of creation, those after the position `after`.

        With `owner` only those of one API key.
        """
        with self.reading() as connection:
            return list_sessions(connection, limit, after, owner)

    def load_session(self, session_id: str, *, per_token: bool = False, extent: Extent | None = None) -> StoredSession:
        """Return a session with its hash chain checked; the arrays are read-only.

        With columns and payloads only if `per_token`: they can be many times larger than the ids. With an `extent`
        only what belongs to it. Raises `NotFound`, and `StoreCorrupt` if a record can't be read or doesn't fit the
        chain.
        """
        with self.reading() as connection:
            return reads.load_session(connection, session_id, per_token=per_token, extent=extent)

    def session_state(self, session_id: str, newest: int) -> SessionProgress | None:
        """Return how far a session has come, with the digest of its turn `newest`; None if there is no such session.

        One read by primary keys, for a process that is not the only writer to see whether it knows all of a session.
        """
        with self.reading_once() as connection:
            row = connection.execute(_STATE, {"session_id": session_id, "newest": newest}).one_or_none()
        return None if row is None else SessionProgress(float(row.created_at), row.turns, row.digest)

    def load_newer(self, session_id: str, known: tuple[Turn, ...]) -> StoredSession:
        """Return a session's turns after those that are `known`, with their answers, setups and events; nothing else.

        Raises as `load_session`: `StoreCorrupt` too if the known turns are not those that are recorded.
        """
        with self.reading() as connection:
            return reads.load_newer(connection, session_id, known)

    def events(self, session_id: str, kind: str) -> tuple[Event, ...]:
        """Return the events of one kind of a session, in order of arrival; empty if there is no such session."""
        with self.reading() as connection:
            return reads.load_events(connection, session_id, kind)

    def session_of_call(self, owner: str, body_digest: str, since: float) -> str | None:
        """Return the session in which a call without a key was answered last, not before `since`; None if none was."""
        answers, sessions = schema.answers.c, schema.sessions
        found = select(answers.session_id).join(sessions, sessions.c.session_id == answers.session_id)
        found = found.where(answers.key.is_(None), sessions.c.owner == owner, answers.created_at >= since)
        found = found.where(answers.body_digest == bytes.fromhex(body_digest))
        statement = found.order_by(answers.created_at.desc()).limit(1)
        with self.reading_once() as connection:
            return connection.execute(statement).scalar()

    def checks_due(self, session_ids: Collection[str] | None = None) -> int:
        """Return how many turns of these sessions, of all if None, have a bridge that is still to be checked."""
        event, other = schema.events.c, schema.events.alias().c
        checked = exists().where(
            other.session_id == event.session_id, other.turn == event.turn, other.kind == BRIDGE_CHECKED
        )
        statement = select(func.count()).where(event.kind == BRIDGE_DUE, ~checked)
        with self.reading() as connection:
            if not schema.has_events(connection):
                return 0
            return sum(connection.execute(statement.where(some)).scalar_one() for some in _among(event, session_ids))

    def load_media(self, session_id: str, sha256: str) -> Media:
        """Return media that a session refers to: an image, or how images were processed.

        Raises `NotFound` if it refers to none of that hash, and `StoreCorrupt` if the bytes have another.
        """
        table, of_turn = schema.media, schema.turn_media.c
        referred = exists().where(of_turn.sha256 == table.c.sha256, of_turn.session_id == session_id)
        with self.reading() as connection:
            row = connection.execute(select(table).where(table.c.sha256 == sha256, referred)).one_or_none()
        if row is None:
            raise NotFound(f"session {session_id!r} has no media {sha256!r}")
        media: Media = decode(schema.media, row)
        return media

    def session_ids(self) -> Iterator[str]:
        """Yield the id of every session in order of creation."""
        after = 0
        while page := self.sessions(limit=1000, after=after):
            yield from (summary.info.session_id for summary in page)
            after = page[-1].position

    def iter_sessions(self, *, per_token: bool = False) -> Iterator[StoredSession]:
        """Yield every session in order of creation, loading one at a time. Raises as `load_session`."""
        for session_id in self.session_ids():
            # It may have been deleted since the page was read.
            with suppress(NotFound):
                yield self.load_session(session_id, per_token=per_token)

    def extra_names(self, session_ids: Collection[str] | None = None) -> ExtraNames:
        """Return the names of all columns and payloads of these sessions, of all if None."""
        found: list[set[str]] = [set(), set()]
        with self.reading() as connection:
            for names, table in zip(found, (schema.token_columns, schema.token_payloads), strict=True):
                for some in _among(table.c, session_ids):
                    names.update(connection.execute(select(table.c.name).distinct().where(some)).scalars())
        return ExtraNames(*(tuple(sorted(names)) for names in found))

    def turns_with_column(self, session_id: str, name: str) -> frozenset[int]:
        """Return `seq` of the turns of a session that have a column of this name."""
        of = schema.token_columns.c
        statement = select(of.turn).distinct().where(of.session_id == session_id, of.name == name)
        with self.reading_once() as connection:
            return frozenset(connection.execute(statement).scalars())

    async def transact(self, work: Work, again: Work | None = None, claims: Claims = None) -> None:
        """Run `work` in the writing thread, all of it or nothing; return when it is durable. For this room.

        `again` is explained at `CommitQueue.run`, and `claims` says what `work` changes, nothing else than that.
        """
        if self._commits is None:
            raise StoreError("the store was opened read-only")
        await self._commits.run(work, again, claims)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that sees one state of the record. For this room."""
        with self._connected(self._readers) as connection, connection.begin():
            yield connection

    @contextmanager
    def reading_once(self) -> Iterator[Connection]:
        """A connection for one statement. For this room."""
        with self.reading() as connection:
            yield connection

    @contextmanager
    def _connected(self, engine: Engine) -> Iterator[Connection]:
        if self._closed:
            raise StoreError("the store is closed")
        try:
            with engine.connect() as connection:
                yield connection
        except DBAPIError as error:
            # The driver's message may quote what it could not decode.
            raise self._explain(error).error() from None

    def keep_until_closed(self, held: ExitStack) -> None:
        """Let go of `held` when the store is closed, after the database."""
        release = ExitStack()
        release.push(held)
        release.push(self._release)
        self._release = release

    def close(self) -> None:
        """Write what is queued and let go of the database. Later calls raise `StoreError`."""
        self._closed = True
        self._release.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _among(columns: Any, session_ids: Collection[str] | None) -> Iterator[ColumnElement[bool]]:
    """Yield conditions for rows of these sessions, of all if None. A statement takes only so many parameters."""
    if session_ids is None:
        yield true()
    else:
        yield from (columns.session_id.in_(some) for some in reads.batched(session_ids, 500))


_OF_SESSION = schema.turns.c.session_id == bindparam("session_id")
_TURNS = select(func.coalesce(func.max(schema.turns.c.seq), -1) + 1).where(_OF_SESSION).scalar_subquery()
_NEWEST = select(schema.turns.c.digest).where(_OF_SESSION, schema.turns.c.seq == bindparam("newest")).scalar_subquery()
_STATE = select(schema.sessions.c.created_at, _TURNS.label("turns"), _NEWEST.label("digest")).where(
    schema.sessions.c.session_id == bindparam("session_id")
)
