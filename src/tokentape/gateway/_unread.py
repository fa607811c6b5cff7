"""Records which replies no client has received, so that they are not trained by default."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from tokentape._session.tree import UNREAD
from tokentape.errors import NotFound, StoreError, TokentapeError
from tokentape.gateway._access import RequestLog
from tokentape.gateway._session_cache import OpenSession, SessionCache, not_found
from tokentape.gateway._telemetry import Metrics
from tokentape.store import Store
from tokentape.types import Event, RecordedReply

_log = logging.getLogger("tokentape.gateway")

_Result = TypeVar("_Result")


class UnreadMarks:
    """Marks recorded replies that no client has received as unread, so that they are not trained on by default.

    A client may disconnect while its reply is committed or sent. A reply that was fully sent before that counts as
    read, because HTTP has no receipts. A retry that gets the reply from the record removes the mark. Use it on one
    event loop.
    """

    def __init__(self, store: Store, sessions: SessionCache, metrics: Metrics) -> None:
        self._store = store
        self._sessions = sessions
        self._metrics = metrics
        self._writing: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()
        self._due: dict[tuple[str, int], Event] = {}
        """The newest unrecorded mark for each session and turn. A failed write is retried with the next reply, before
        an export, and at shutdown."""
        self._refused: set[tuple[str, int]] = set()

    def sending(self, line: RequestLog) -> None:
        """Keep the session of a request with a reply in memory until `answered` is called."""
        opened = self._sessions.in_memory(line.session_id)
        if opened is not None:
            opened.sending.append(line.reply_id)

    async def claim(self, line: RequestLog) -> None:
        """Record that a retry receives an unread reply, before anything of the reply is sent.

        Otherwise a snapshot without the reply could be confirmed, and the session dropped, while the reply is sent. If
        the client leaves before the end, the reply is marked as unread again. If the disk refuses the record, the reply
        is sent all the same: no session is dropped before its mark is recorded.

        Raises `Conflict` if the session was dropped, and `NotFound` if it was deleted.
        """
        opened = self._sessions.in_memory(line.session_id)
        answer = None if opened is None else opened.answers.get(line.reply_id)
        # With a shared store, another gateway may have marked the turns since they were loaded here.
        if opened is None or answer is None or not (self._store.shared or opened.session.unread & {*answer.turns}):
            return
        claim = self._write_soon(self._claim(opened, answer))
        # The write continues if the client leaves.
        if not await asyncio.shield(claim):
            await self._sessions.refuse_dropped(line.session_id, opened.session.info.owner)
            raise not_found(line.session_id)

    async def _claim(self, opened: OpenSession, answer: RecordedReply) -> bool:
        """Record that a reply's turns are read. Return False if the session does not exist."""
        async with self._lock:
            events = [Event(opened.session_id, seq, UNREAD, {"unread": False}, time.time()) for seq in answer.turns]
            try:
                await self._store.write(*events)
            except StoreError as error:
                _log.warning("could not record that a retry gets a reply (%s); trying again later", error.code)
                return True
            except NotFound:
                return False
            opened.session.unread.difference_update(answer.turns)
            opened.unmarked.difference_update(answer.turns)
            for seq in answer.turns:
                self._due.pop((opened.session_id, seq), None)
                self._refused.discard((opened.session_id, seq))
        if answer.reply_id not in opened.sending:
            self.mark(opened, answer.reply_id)
        return True

    def answered(self, line: RequestLog, *, complete: bool) -> None:
        """Note that a request with a reply has ended. `complete` is whether the whole reply was sent."""
        opened = self._sessions.in_memory(line.session_id)
        if opened is None:
            return
        if line.reply_id in opened.sending:
            opened.sending.remove(line.reply_id)
        if complete:
            opened.undelivered.discard(line.reply_id)
            answer = opened.answers.get(line.reply_id)
            if answer is not None and line.replayed and self._store.shared:
                # Another gateway may have marked the turns since they were loaded here.
                opened.session.unread.update(answer.turns)
        self.mark(opened, line.reply_id)

    def mark(self, opened: OpenSession, reply_id: str | None) -> None:
        """Record whether a reply's turns are unread, if this has changed and the turns are recorded."""
        if reply_id is None:
            return
        answer, unread = opened.answers.get(reply_id), reply_id in opened.undelivered
        marked = opened.session.unread
        turns = () if answer is None else tuple(seq for seq in answer.turns if (seq in marked) != unread)
        marked.symmetric_difference_update(turns)
        opened.unmarked.update(turns)
        if unread:
            self._metrics.unread.inc(len(turns))
        for seq in turns:
            event = Event(opened.session_id, seq, UNREAD, {"unread": unread}, time.time())
            self._due[opened.session_id, seq] = event
        self._start()

    async def written(self) -> None:
        """Wait until every pending mark has been recorded or has failed again."""
        self._start()
        await asyncio.gather(*self._writing)

    async def recorded(self, session_id: str | None = None) -> None:
        """Wait until all marks are recorded. Raises `StoreError` if a mark (of `session_id`, if set) can't be."""
        await self.written()
        if any(session_id in (None, refused) for refused, _ in self._refused):
            raise StoreError("could not record which replies were received; check the database's disk and try again")

    def _start(self) -> None:
        if self._due:
            self._write_soon(self._write())

    def _write_soon(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task

    async def _write(self) -> None:
        async with self._lock:
            due, self._due = self._due, {}
            by_session: dict[str, dict[tuple[str, int], Event]] = {}
            for key, event in due.items():
                by_session.setdefault(event.session_id, {})[key] = event
            await asyncio.gather(*map(self._write_session, by_session.values()))

    async def _write_session(self, due: Mapping[tuple[str, int], Event]) -> None:
        self._refused.difference_update(due)
        try:
            await self._store.write(*due.values())
        except StoreError as error:
            _log.warning("could not record whether a reply was read (%s); trying again later", error.code)
            self._due = {**due, **self._due}
            self._refused.update(due)
            return
        except TokentapeError as error:
            # The session was deleted.
            _log.warning("could not record whether a reply was read (%s)", error.code)
        for session_id, seq in due.keys() - self._due.keys():
            if (opened := self._sessions.in_memory(session_id)) is not None:
                opened.unmarked.discard(seq)
