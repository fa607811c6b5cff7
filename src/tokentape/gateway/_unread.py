"""Which recorded replies no client has got: marked in the record, so that nothing trains on them unasked.

A client may leave while its reply is committed or sent. What was handed to the network before it left counts as read:
HTTP has no receipts. A retry that gets the reply from the record takes the mark back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from tokentape._session.tree import UNREAD
from tokentape.errors import StoreError, TokentapeError
from tokentape.gateway._access import RequestLog
from tokentape.gateway._metrics import Metrics
from tokentape.gateway._session_cache import OpenSession, SessionCache
from tokentape.store import Store
from tokentape.types import Event

_log = logging.getLogger("tokentape.gateway")


class UnreadMarks:
    """Writes the marks. For one event loop."""

    def __init__(self, store: Store, sessions: SessionCache, metrics: Metrics) -> None:
        self._store = store
        self._sessions = sessions
        self._metrics = metrics
        self._writing: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._due: dict[tuple[str, int], Event] = {}
        """By session and turn the newest marks that are not recorded. One that the store fails to write is tried again
        with the next reply, and at the end."""

    def answered(self, line: RequestLog, *, complete: bool) -> None:
        """Note that a client was sent all of a reply, or left before."""
        opened = self._sessions.in_memory(line.session_id)
        if opened is None:
            return
        if complete:
            opened.delivered.add(line.reply_id)
            answer = opened.answer_named(line.reply_id)
            if answer is not None and line.replayed and self._store.shared:
                # Another gateway may have marked them since they were loaded.
                opened.session.unread.update(answer.turns)
        self.mark(opened, line.reply_id)

    def mark(self, opened: OpenSession, reply_id: str | None) -> None:
        """Record whether the turns of a reply are unread, if they are recorded and not marked so already."""
        if reply_id is None:
            return
        answer, unread = opened.answer_named(reply_id), reply_id not in opened.delivered
        marked = opened.session.unread
        turns = () if answer is None else tuple(seq for seq in answer.turns if (seq in marked) != unread)
        marked.symmetric_difference_update(turns)
        if unread:
            self._metrics.unread.inc(len(turns))
        for seq in turns:
            event = Event(opened.session_id, seq, UNREAD, {"unread": unread}, time.time())
            self._due[opened.session_id, seq] = event
        self._start()

    async def written(self) -> None:
        """Return when all marks are in the record, or were tried once more."""
        self._start()
        await asyncio.gather(*self._writing)

    def _start(self) -> None:
        if self._due:
            task = asyncio.get_running_loop().create_task(self._write())
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self) -> None:
        async with self._lock:
            due, self._due = self._due, {}
            by_session: dict[str, dict[tuple[str, int], Event]] = {}
            for key, event in due.items():
                by_session.setdefault(event.session_id, {})[key] = event
            await asyncio.gather(*map(self._write_session, by_session.values()))

    async def _write_session(self, due: Mapping[tuple[str, int], Event]) -> None:
        try:
            await self._store.write(*due.values())
        except StoreError as error:
            _log.warning("it could not be recorded yet whether a reply was read (%s)", error.code)
            self._due = {**due, **self._due}
        except TokentapeError as error:
            # The session was deleted.
            _log.warning("it could not be recorded whether a reply was read (%s)", error.code)
