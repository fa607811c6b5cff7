"""The sessions in memory, loaded or begun here, each with a lock, and dropped when they are idle.

If other gateways write to the same record, a session in memory is compared with the record before it is used.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tokentape._session.tree import UNREAD, Session
from tokentape.errors import Conflict, LimitReached, NotFound, StoreError, TokentapeError
from tokentape.gateway._access import RequestLog
from tokentape.gateway._events import Attempt
from tokentape.gateway._in_flight_call import InFlightCall
from tokentape.gateway._limits import Limits
from tokentape.gateway._prefix import ParsedPrefix
from tokentape.gateway._telemetry import Metrics
from tokentape.store import Store, StoredSession
from tokentape.store._snapshots import Snapshots
from tokentape.types import Event, RecordedReply, SessionInfo

_log = logging.getLogger("tokentape.gateway")

_KEPT_ANSWERS = 64
"""Per session; a client retries what it asked last."""

_CONTEXTS_AT_HAND = 16
"""Sessions whose ids are kept in one piece besides turn by turn: four bytes more for each token. To put them together
again with each call takes 5 µs more at 20 turns, 50 µs at 200."""

_KEPT_PREFIXES = 4
"""Per session: calls may come side by side, and subagents take turns."""


@dataclass(slots=True)
class OpenSession:
    """A session in memory: its turns, and the state that only the gateway needs."""

    session: Session
    stored: bool
    """False for one that begins with its first turn: stored together with it."""
    setups: set[str] = field(default_factory=set)
    """Digests of setups that the store has."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while turns are committed."""
    calls: list[InFlightCall] = field(default_factory=list)
    used_at: float = 0.0
    """Seconds of the monotonic clock."""
    deleted: bool = False
    """Deleted while calls are still in flight."""
    prefixes: deque[ParsedPrefix] = field(default_factory=lambda: deque(maxlen=_KEPT_PREFIXES))
    """The beginnings of the last requests, newest last: a later one may begin with them."""
    bridges: dict[int, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Per turn the length of its branch, and the kinds of bridges on it that were drawn to be checked."""
    delivered: set[str] = field(default_factory=set)
    """Ids of those of its newest replies that a client has got."""
    unmarked: set[int] = field(default_factory=set)
    """Turns with marks that only the memory has until they are recorded."""
    answers: OrderedDict[str, RecordedReply] = field(default_factory=OrderedDict)
    """The newest, by id, kept for retries."""

    @property
    def session_id(self) -> str:
        return self.session.info.session_id

    def remember(self, answer: RecordedReply) -> None:
        self.answers[answer.reply_id] = answer
        if len(self.answers) > _KEPT_ANSWERS:
            self.delivered.discard(self.answers.popitem(last=False)[0])

    def remember_recorded(self, answers: Iterable[RecordedReply], *, known_since: float) -> None:
        """Keep answers that were read from the record.

        Those recorded after `known_since` (Unix seconds) are marked if no client read them. Earlier ones may have been
        lost when the gateway ended, unless a later turn continues them.
        """
        for answer in answers:
            self.remember(answer)
            read = answer.created_at >= known_since or any(map(self.session.is_continued, answer.turns))
            if read and self.session.unread.isdisjoint(answer.turns):
                self.delivered.add(answer.reply_id)

    def check_turns(self, more: int, most: int) -> None:
        """Raise `LimitReached` if, with `more` turns and those under way, there are more than `most`; 0 is no limit."""
        turns, under_way = len(self.session.turns), sum(call.turns for call in self.calls)
        if most and turns + under_way + more > most:
            found = f"session {self.session_id!r} has {turns} turns and {under_way} under way; the limit is {most}"
            if turns + more > most:
                raise LimitReached(f"{found}; begin another session")
            # Calls that fail make room.
            raise LimitReached(f"{found}; wait, or begin another session", retry_after=1.0)

    def call_in_flight(self, attempt: Attempt) -> InFlightCall | None:
        """Return the call in flight that this one repeats. Raises as `Attempt.repeats`."""
        for call in reversed(self.calls):
            known = None if call.aborted else call.attempt
            if known is not None and attempt.repeats(known.key, known.body_digest):
                return call
        return None

    def answer_to(self, attempt: Attempt) -> RecordedReply | None:
        """Return the recorded answer to the call that this one repeats. Raises as `Attempt.repeats`."""
        answers = reversed(self.answers.values())
        return next((one for one in answers if attempt.repeats(one.key, one.body_digest)), None)


class SessionCache:
    """Sessions by id. An unknown id and another owner's session look the same. For one event loop."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        loaded: Callable[[OpenSession, StoredSession, bool], None] = lambda *_: None,
    ) -> None:
        self._store = store
        self._loaded = loaded
        """Called with what was read of a session, and whether that is all of it."""
        self._limits = limits
        self._open: OrderedDict[str, OpenSession] = OrderedDict()
        """Least recently used first."""
        self._loading: dict[str, asyncio.Lock] = {}
        self._at_hand: OrderedDict[str, OpenSession] = OrderedDict()
        """Those whose whole context may be kept in one piece, least recently used first."""
        self._known_since = -math.inf if store.shared else time.time()
        """Replies recorded later are marked if no client read them. Of a shared record other gateways may mark any."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(list(self._open.values()))

    async def find(self, session_id: str, owner: str | None) -> OpenSession | None:
        """Return the session from memory or the store; None if there is none.

        `owner` None may see all. Raises `NotFound` for another owner's session.
        """
        opened = self._open.get(session_id)
        if opened is not None and self._store.shared:
            async with opened.lock:
                await self.catch_up(opened)
            opened = self._open.get(session_id)
        if opened is None:
            lock = self._loading.setdefault(session_id, asyncio.Lock())
            try:
                async with lock:
                    opened = self._open.get(session_id) or await self._load(session_id)
            finally:
                self._loading.pop(session_id, None)
        return self._seen(opened, owner)

    def in_memory(self, session_id: str) -> OpenSession | None:
        return self._open.get(session_id)

    def prefixes(self, session_id: str, owner: str) -> Sequence[ParsedPrefix]:
        """Return the beginnings of earlier requests of this owner to a session in memory."""
        opened = self._open.get(session_id)
        return opened.prefixes if opened is not None and opened.session.info.owner == owner else ()

    async def get(self, session_id: str, owner: str | None) -> OpenSession:
        """Return the session. Raises `NotFound` if there is none or it belongs to another owner."""
        found = await self.find(session_id, owner)
        if found is None:
            raise not_found(session_id)
        return found

    async def find_or_begin(self, session_id: str, owner: str, *, begin: bool = True) -> OpenSession:
        """Return the session, or with `begin` a new one that is stored with its first turn.

        Raises `NotFound`, `LimitReached`, and `Conflict` for the id of a session that was dropped.
        """
        # One in memory may have been dropped by another gateway.
        found = await self.find(session_id, owner) if session_id in self._open else None
        if found is None and begin:
            await self._refuse_dropped(session_id, owner)
        # No await between a miss and the new session, so that two first turns begin one.
        found = found or await self.find(session_id, owner) or self._seen(self._open.get(session_id), owner)
        if found is None and not begin:
            raise not_found(session_id)
        return found or self._begin(SessionInfo(session_id, time.time(), {}, owner))

    async def catch_up(self, opened: OpenSession) -> bool:
        """Load what others have recorded of a session; return whether there was anything. Its lock must be held.

        A session that others have deleted is dropped here too, also if they have begun it again.
        """
        session, known = opened.session, len(opened.session.turns)
        state = await asyncio.to_thread(self._store.session_state, opened.session_id, known - 1)
        if state is None and not opened.stored:
            return False
        own = session.turns[-1].digest if known else None, session.info.created_at
        newer = None
        if state is not None and (not opened.stored or (state.digest, state.created_at) == own):
            if opened.stored and state.turns == known:
                return False
            with suppress(NotFound):
                newer = await asyncio.to_thread(self._store.load_newer, opened.session_id, tuple(session.turns))
        if newer is None or newer.info.owner != session.info.owner:
            # Others have deleted it, and perhaps begun one with this id meanwhile.
            opened.deleted = True
            self.drop(opened)
            return False
        # One that was begun here and there at once: there it was stored first.
        session.info, opened.stored = newer.info, True
        for turn in newer.turns:
            session.add(turn)
        opened.setups |= newer.setups.keys()
        opened.remember_recorded(newer.answers, known_since=self._known_since)
        self._loaded(opened, newer, False)
        return True

    async def create(self, session_id: str, metadata: Mapping[str, Any], owner: str) -> SessionInfo:
        """Create and store a session. Raises `Conflict` if the id is taken, and `LimitReached`."""
        self._make_room(owner)
        taken = True
        with suppress(NotFound):
            taken = await self.find(session_id, owner) is not None
        if taken:
            raise Conflict(f"session {session_id!r} exists already; use another id or none")
        info = SessionInfo(session_id, time.time(), metadata, owner)
        # In memory first and locked, so that a turn that comes now does not store it a second time.
        opened = self._begin(info)
        try:
            async with opened.lock:
                await self._store.write(info)
                opened.stored = True
        except BaseException:
            self.drop(opened)
            raise
        return info

    def drop(self, opened: OpenSession) -> None:
        if self._open.get(opened.session_id) is opened:
            del self._open[opened.session_id]
        if self._at_hand.get(opened.session_id) is opened:
            del self._at_hand[opened.session_id]

    def drop_unused(self, opened: OpenSession) -> None:
        """Forget a session of which nothing is or will be recorded: its calls were refused or have failed."""
        if not opened.stored and not opened.calls and not opened.lock.locked():
            self.drop(opened)

    def _seen(self, opened: OpenSession | None, owner: str | None) -> OpenSession | None:
        """Return the session if this owner may see it; owner None may see all. Raises `NotFound`."""
        if opened is None:
            return None
        if owner is not None and opened.session.info.owner != owner:
            raise not_found(opened.session_id)
        return self._touch(opened)

    async def _load(self, session_id: str) -> OpenSession | None:
        try:
            stored = await asyncio.to_thread(self._store.load_session, session_id)
        except NotFound:
            return None
        self._make_room(stored.info.owner)
        opened = OpenSession(stored.tree(), stored=True, setups={turn.setup for turn in stored.turns})
        opened.remember_recorded(stored.answers, known_since=self._known_since)
        self._loaded(opened, stored, True)
        return self._open.setdefault(session_id, opened)

    async def _refuse_dropped(self, session_id: str, owner: str) -> None:
        """Refuse a session whose first turn the store would refuse, before it is sampled."""
        dropped_of = await asyncio.to_thread(Snapshots(self._store).dropped_of, session_id)
        if dropped_of is None:
            return
        if dropped_of != owner:
            raise not_found(session_id)
        raise Conflict(f"session {session_id!r} was dropped once its snapshot was confirmed; use another id")

    def _begin(self, info: SessionInfo) -> OpenSession:
        self._make_room(info.owner)
        opened = self._open[info.session_id] = OpenSession(Session(info), stored=False)
        return self._touch(opened)

    def _touch(self, opened: OpenSession) -> OpenSession:
        opened.used_at = time.monotonic()
        self._open.move_to_end(opened.session_id)
        self._at_hand[opened.session_id] = opened
        self._at_hand.move_to_end(opened.session_id)
        if len(self._at_hand) > _CONTEXTS_AT_HAND:
            _, other = self._at_hand.popitem(last=False)
            other.session.forget_context()
        return opened

    def _make_room(self, owner: str) -> None:
        """Drop idle sessions from memory; they are loaded again when they are used. Raises `LimitReached`."""
        most = self._limits.open_sessions
        cutoff = time.monotonic() - self._limits.idle_seconds
        for opened in list(takewhile(lambda one: one.used_at < cutoff, self._open.values())):
            if not opened.calls and not opened.unmarked and not opened.lock.locked():
                self.drop(opened)
        if most and sum(one.session.info.owner == owner for one in self._open.values()) >= most:
            oldest = next(one for one in self._open.values() if one.session.info.owner == owner)
            wait = max(oldest.used_at - cutoff, 1.0)
            raise LimitReached(
                f"{most} sessions are open, which is the limit; one that idles {self._limits.idle_seconds:g} s "
                "makes room, or delete one",
                retry_after=wait,
            )


def not_found(session_id: str) -> NotFound:
    """Return the error for an unknown session and for another owner's: always the same."""
    return NotFound(f"there is no session {session_id!r}")


class UnreadMarks:
    """Marks recorded replies that no client has got, so that nothing trains on them unasked. For one event loop.

    A client may leave while its reply is committed or sent. What was handed to the network before it left counts as
    read: HTTP has no receipts. A retry that gets the reply from the record takes the mark back.
    """

    def __init__(self, store: Store, sessions: SessionCache, metrics: Metrics) -> None:
        self._store = store
        self._sessions = sessions
        self._metrics = metrics
        self._writing: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._due: dict[tuple[str, int], Event] = {}
        """By session and turn the newest marks that are not recorded. One that the store has refused is tried again
        with the next reply, before the record is read out, and at the end."""
        self._refused: set[tuple[str, int]] = set()

    def answered(self, line: RequestLog, *, complete: bool) -> None:
        """Note that a client was sent all of a reply, or left before."""
        opened = self._sessions.in_memory(line.session_id)
        if opened is None:
            return
        if complete:
            opened.delivered.add(line.reply_id)
            answer = opened.answers.get(line.reply_id)
            if answer is not None and line.replayed and self._store.shared:
                # Another gateway may have marked them since they were loaded.
                opened.session.unread.update(answer.turns)
        self.mark(opened, line.reply_id)

    def mark(self, opened: OpenSession, reply_id: str | None) -> None:
        """Record whether the turns of a reply are unread, if they are recorded and not marked so already."""
        if reply_id is None:
            return
        answer, unread = opened.answers.get(reply_id), reply_id not in opened.delivered
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
        """Return when all marks are in the record, or were tried once more."""
        self._start()
        await asyncio.gather(*self._writing)

    async def recorded(self, session_id: str | None = None) -> None:
        """Return when all marks that are due are recorded. Raises `StoreError` if one (of this session) is refused."""
        await self.written()
        if any(session_id in (None, one) for one, _ in self._refused):
            raise StoreError("which replies were received could not be recorded yet; see to the disk and try again")

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
        self._refused.difference_update(due)
        try:
            await self._store.write(*due.values())
        except StoreError as error:
            _log.warning("it could not be recorded yet whether a reply was read (%s)", error.code)
            self._due = {**due, **self._due}
            self._refused.update(due)
            return
        except TokentapeError as error:
            # The session was deleted.
            _log.warning("it could not be recorded whether a reply was read (%s)", error.code)
        for session_id, seq in due.keys() - self._due.keys():
            if (opened := self._sessions.in_memory(session_id)) is not None:
                opened.unmarked.discard(seq)
