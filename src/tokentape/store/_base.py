"""Define the base class of stores: reads see one state of the record, writes are durable when they return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import eq
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import ColumnElement, Connection, Engine, bindparam, exists, func, select, true
from sqlalchemy.exc import DBAPIError

from tokentape._batches import batched
from tokentape._session.arrow import ExtraNames
from tokentape._session.verdict import BRIDGE_CHECKED, BRIDGE_DUE
from tokentape.errors import NotFound, StoreCorrupt, StoreError
from tokentape.store import _reads as reads
from tokentape.store import _schema as schema
from tokentape.store import _writes as writes
from tokentape.store._commit import Claims, CommitQueue, StoreFailure, Work, explaining
from tokentape.store._files import PayloadFolder
from tokentape.store._listing import TOKENS, SessionSummary, summaries
from tokentape.store._reads import Extent, SessionProgress, StoredSession
from tokentape.store._rows import Record, decode
from tokentape.store._served_model import ServedModel, bind_vocabulary
from tokentape.types import Event, Media, Turn, TurnPayload

if TYPE_CHECKING:
    from tokentape.chat._tokenizer import Tokenizer


class Store:
    """A record of sessions. Await `write` and `delete_session` on an event loop. Reads block and can run in any thread.

    Open a store with `SqliteStore.open` or `PostgresStore.open`. As a context manager, it closes itself.
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
        """Whether other processes can also write, so that sessions in this process's memory can be out of date."""
        self._readers, self._commits, self._release, self._explain = readers, commits, release, explain
        self._closed = False
        self._payloads: PayloadFolder | None = None
        self._once: Engine | None = None
        """The connections for single statements, without a transaction; None if those of `readers` are as fast."""

    def keep_payloads_at(self, location: str) -> None:
        """Write later calls' payloads to files at an fsspec path or URL, and only the files' locations to the record.

        Raises `InvalidRequest` if the location can't be reached.
        """
        self._payloads = PayloadFolder(location)

    @property
    def healthy(self) -> bool:
        """False once the store is closed or broken. Every write then fails until a restart."""
        return not self._closed and not self.broken

    @property
    def broken(self) -> bool:
        """True if nothing can be recorded until the store is opened again."""
        return self._commits is not None and self._commits.broken

    def check(self) -> None:
        """Raise `StoreError` or a subclass, all with status 503, if nothing can be recorded now."""
        if not self.healthy:
            raise StoreError("the store is closed or broken, so nothing can be recorded; restart the gateway")

    async def write(self, *records: Record) -> None:
        """Write `records` in the given order, all or none. Return when they are durable.

        Setups and media that are already recorded are skipped. Don't modify the records before this returns. If the
        awaiting task is cancelled, either all or none of the records become durable.

        Raises `Conflict` if a session already exists or a turn is not its session's next turn, `NotFound` if a record
        refers to a missing session or turn, `InvalidRequest` or `InvariantViolation` if a record is invalid, and
        `StoreFull` or `StoreError` if the disk is full or fails. After these errors, none of the records is recorded.
        After `StoreUnavailable`, a lost connection to the database server, they may or may not be recorded.
        """
        if records:
            if self._payloads is not None and any(isinstance(record, TurnPayload) for record in records):
                records = tuple(await asyncio.to_thread(self._payloads.write, records))
            work = partial(writes.insert_records, records=records)
            again = partial(writes.insert_again, records=records)
            await self.transact(work, again, writes.claims(records) if self.shared else None)

    def served_model(self) -> ServedModel | None:
        """Return the model that a gateway last served with this record; None if it is not known."""
        return None

    async def bind(self, tokenizer: Tokenizer, gateway_id: str | None = None) -> None:
        """Accept only gateways with this tokenizer's vocabulary, from the first turn on. Each gateway calls this first.

        Templates, weights and folders may change. `gateway_id` is the calling gateway's id; None if it has none yet.
        Raises `InvalidRequest` if the record has ids of another vocabulary.
        """
        served = None
        with suppress(StoreCorrupt):
            served = await asyncio.to_thread(self.served_model)
        work = partial(bind_vocabulary, tokenizer=tokenizer, served=served, gateway_id=gateway_id)
        await self.transact(work, again=work)

    async def delete_session(self, session_id: str, *, force: bool = False) -> None:
        """Delete a session and all of its records. Return when the deletion is durable.

        Raises `NotFound`, and, without `force`, `Conflict` if an unconfirmed snapshot contains the session.
        """
        await self.transact(partial(writes.delete_session, session_id=session_id, force=force))

    def sessions(self, limit: int = 100, after: int = 0, owner: str | None = None) -> list[SessionSummary]:
        """Return up to `limit` sessions after the position `after`, in order of creation.

        `owner` selects the sessions that belong to one API key; None selects all sessions.
        """
        table = schema.sessions
        conditions = [table.c.position > after, *([] if owner is None else [table.c.owner == owner])]
        page = select(table.c.position).where(*conditions).order_by(table.c.position).limit(limit)
        with self.reading() as connection:
            return summaries(connection, table.c.position.in_(page))

    def load_session(self, session_id: str, *, per_token: bool = False, extent: Extent | None = None) -> StoredSession:
        """Load a session and check its hash chain. Its arrays are read-only.

        Columns and payloads are loaded only with `per_token`: they can be many times larger than the ids. `extent`
        limits the result to that part of the session. Raises `NotFound`, and `StoreCorrupt` if a record can't be read
        or doesn't match the hash chain.
        """
        with self.reading() as connection:
            sessions = reads.load_sessions(connection, [session_id], per_token=per_token, extent=extent)
        if not sessions:
            raise NotFound(f"there is no session {session_id!r}")
        return sessions[0]

    def session_state(self, session_id: str, newest: int) -> SessionProgress | None:
        """Return a session's number of turns and the digest of its turn `newest`; None if the session does not exist.

        This is one read by primary keys. It shows whether other processes have added turns to a session.
        """
        with self.reading_once() as connection:
            row = connection.execute(_STATE, {"session_id": session_id, "newest": newest}).one_or_none()
        return None if row is None else SessionProgress(float(row.created_at), row.turns, row.digest)

    def load_newer(self, session_id: str, known: tuple[Turn, ...]) -> StoredSession:
        """Load the turns after the `known` turns, with only their answers, setups and events.

        Raises `NotFound`, and `StoreCorrupt` if a record is damaged or the known turns differ from the recorded turns.
        """
        with self.reading() as connection:
            return reads.load_newer(connection, session_id, known)

    def events(self, session_id: str, kind: str) -> tuple[Event, ...]:
        """Return a session's events of one kind, in order of arrival; empty if the session does not exist."""
        of = schema.events.c
        with self.reading() as connection:
            return reads.Reading(connection, [session_id]).records(of.position, eq, kind, of.kind).get(session_id, ())

    def session_of_call(self, owner: str, body_digest: str, since: float) -> str | None:
        """Return the session of the last answer to a call with this body, without Idempotency-Key, since `since`.

        Return None if no such call was answered.
        """
        answers, sessions = schema.answers.c, schema.sessions
        statement = select(answers.session_id).join(sessions, sessions.c.session_id == answers.session_id)
        statement = statement.where(answers.key.is_(None), sessions.c.owner == owner, answers.created_at >= since)
        statement = statement.where(answers.body_digest == bytes.fromhex(body_digest))
        statement = statement.order_by(answers.created_at.desc()).limit(1)
        with self.reading_once() as connection:
            return connection.execute(statement).scalar()

    def checks_due(self, session_ids: Collection[str] | None = None) -> int:
        """Count the turns with a pending bridge check in these sessions (None: in all sessions)."""
        event, other = schema.events.c, schema.events.alias().c
        checked = exists().where(
            other.session_id == event.session_id, other.turn == event.turn, other.kind == BRIDGE_CHECKED
        )
        statement = select(func.count()).where(event.kind == BRIDGE_DUE, ~checked)
        with self.reading() as connection:
            return sum(
                connection.execute(statement.where(condition)).scalar_one() for condition in _among(event, session_ids)
            )

    def load_media(self, session_id: str, sha256: str) -> Media:
        """Return an image of a session, or the settings of its image processor, which are recorded like an image.

        Raises `NotFound` if the session has neither with this hash, and `StoreCorrupt` if the bytes don't match it.
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
        return (session_id for session_id, _ in self._sizes())

    def _sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the id and number of tokens of every session in order of creation."""
        of = schema.sessions.c
        page, after = select(of.position, of.session_id, TOKENS).order_by(of.position).limit(1000), 0
        while True:
            with self.reading() as connection:
                rows = connection.execute(page.where(of.position > after)).all()
            if not rows:
                return
            yield from ((session_id, tokens) for _, session_id, tokens in rows)
            after = rows[-1].position

    def iter_sessions(self, *, per_token: bool = False, together: bool = False) -> Iterator[StoredSession]:
        """Yield every session in order of creation. Raises `StoreCorrupt` for a session with a damaged record.

        With `together`, several short sessions are loaded at once, as of that moment, which costs less CPU.
        """
        for chunk in reads.together(self._sizes(), reads.TOKENS_AT_ONCE if together else 0):
            with self.reading() as connection:
                # A session may have been deleted since the page was read. `pop` frees each one when it is yielded.
                loaded = reads.load_sessions(connection, chunk, per_token=per_token)[::-1]
            while loaded:
                yield loaded.pop()

    def extra_names(self, session_ids: Collection[str] | None = None) -> ExtraNames:
        """Return the names of the columns and payloads in these sessions. None selects all sessions."""
        name_sets: list[set[str]] = [set(), set()]
        with self.reading() as connection:
            for names, table in zip(name_sets, (schema.token_columns, schema.token_payloads), strict=True):
                for condition in _among(table.c, session_ids):
                    names.update(connection.execute(select(table.c.name).distinct().where(condition)).scalars())
        return ExtraNames(*(tuple(sorted(names)) for names in name_sets))

    def turns_with_column(self, session_id: str, name: str) -> frozenset[int]:
        """Return the numbers of a session's turns that have a column with this name."""
        of = schema.token_columns.c
        statement = select(of.turn).distinct().where(of.session_id == session_id, of.name == name)
        with self.reading_once() as connection:
            return frozenset(connection.execute(statement).scalars())

    async def transact(self, work: Work, again: Work | None = None, claims: Claims = None) -> None:
        """Run `work` in a transaction in the writing thread. Return when it is durable. Private to the package.

        For `again`, see `CommitQueue.run`. `claims` names everything that `work` changes.
        """
        if self._commits is None:
            raise StoreError("the store is read-only; open it without `read_only` to write")
        await self._commits.run(work, again, claims)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection that sees one state of the record. Private to the package."""
        with self._connected(self._readers) as connection, connection.begin():
            yield connection

    @contextmanager
    def reading_once(self) -> Iterator[Connection]:
        """Yield a connection for one statement. Private to the package."""
        with self.reading() if self._once is None else self._connected(self._once) as connection:
            yield connection

    @contextmanager
    def _connected(self, engine: Engine) -> Iterator[Connection]:
        if self._closed:
            raise StoreError("the store is closed")
        with explaining(self._explain), engine.connect() as connection:
            yield connection

    def keep_until_closed(self, resources: ExitStack) -> None:
        """Close `resources` when the store is closed, after the database."""
        release = ExitStack()
        release.push(resources)
        release.push(self._release)
        self._release = release

    def close(self) -> None:
        """Write the queued records and close the database. Later calls raise `StoreError`."""
        self._closed = True
        self._release.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _among(columns: Any, session_ids: Collection[str] | None) -> Iterator[ColumnElement[bool]]:
    """Yield conditions for these sessions' rows (None: all rows), in batches because parameters are limited."""
    if session_ids is None:
        yield true()
    else:
        yield from (columns.session_id.in_(chunk) for chunk in batched(session_ids, 500))


_OF_SESSION = schema.turns.c.session_id == bindparam("session_id")
_TURNS = select(func.coalesce(func.max(schema.turns.c.seq), -1) + 1).where(_OF_SESSION).scalar_subquery()
_NEWEST = select(schema.turns.c.digest).where(_OF_SESSION, schema.turns.c.seq == bindparam("newest")).scalar_subquery()
_STATE = select(schema.sessions.c.created_at, _TURNS.label("turns"), _NEWEST.label("digest")).where(
    schema.sessions.c.session_id == bindparam("session_id")
)
