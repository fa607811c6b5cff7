"""Sessions in memory, each with a lock. Idle sessions are dropped, and loaded again when they are used.

If other gateways write to the same record, a session in memory is compared with the record before each use.
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
from itertools import islice, takewhile
from typing import Any

from tokentape._session.tree import Session
from tokentape.errors import Conflict, LimitReached, NotFound
from tokentape.gateway._events import Attempt, InFlightCall
from tokentape.gateway._limits import Limits
from tokentape.gateway._prefix import ParsedPrefix
from tokentape.store import Store, StoredSession
from tokentape.store._snapshots import Snapshots
from tokentape.types import RecordedReply, SessionInfo

_log = logging.getLogger("tokentape.gateway")

_KEPT_ANSWERS = 64
"""Replies kept per session for retries, because clients retry their latest calls."""

_CONTEXTS_AT_HAND = 16
"""Number of sessions whose context is also kept as one array, at four more bytes per token. Joining the turns' arrays
in each call would take 5 µs at 20 turns, 50 µs at 200."""

_KEPT_PREFIXES = 4
"""Body prefixes kept per session, because concurrent calls and alternating subagents have different prefixes."""


@dataclass(slots=True)
class OpenSession:
    """A session in memory: its turns, and the gateway's own state for it."""

    session: Session
    stored: bool
    """Whether the session is in the store. A session that a call creates is stored with its first turn."""
    setups: set[str] = field(default_factory=set)
    """Digests of the setups that are in the store."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while turns are committed."""
    calls: list[InFlightCall] = field(default_factory=list)
    used_at: float = 0.0
    """Time of the last use, in seconds of the monotonic clock."""
    deleted: bool = False
    """Whether the session was deleted. Its calls may still be in flight."""
    prefixes: deque[ParsedPrefix] = field(default_factory=lambda: deque(maxlen=_KEPT_PREFIXES))
    """The prefixes of the latest request bodies, newest last, to compare later requests with."""
    bridges: dict[int, frozenset[str]] = field(default_factory=dict)
    """For each turn, the kinds of bridges on its branch that were drawn for checks."""
    undelivered: set[str] = field(default_factory=set)
    """Ids of the replies in `answers` that no client has received completely."""
    sending: list[str] = field(default_factory=list)
    """Ids of the replies that are being sent, one per request."""
    unmarked: set[int] = field(default_factory=set)
    """Turns with a changed unread mark that is not recorded yet."""
    answers: dict[str, RecordedReply] = field(default_factory=dict)
    """The newest replies by id, kept for retries."""

    @property
    def session_id(self) -> str:
        return self.session.info.session_id

    def remember(self, answer: RecordedReply) -> None:
        if answer.reply_id not in self.answers:
            self.undelivered.add(answer.reply_id)
        self.answers[answer.reply_id] = answer
        if len(self.answers) > _KEPT_ANSWERS:
            oldest = next(iter(self.answers))
            del self.answers[oldest]
            self.undelivered.discard(oldest)

    def remember_recorded(self, answers: Iterable[RecordedReply], *, known_since: float) -> None:
        """Keep replies loaded from the record, and note which of them a client has received.

        Replies recorded after `known_since` (Unix seconds) count as received unless marked as unread. An earlier reply
        may have been lost when the gateway exited, so it counts as received only if a later turn continues it.
        """
        for answer in answers:
            self.remember(answer)
            was_read = answer.created_at >= known_since or any(map(self.session.is_continued, answer.turns))
            if was_read and self.session.unread.isdisjoint(answer.turns):
                self.undelivered.discard(answer.reply_id)

    def check_turns(self, new_turns: int, most: int) -> None:
        """Raise `LimitReached` if `new_turns` would exceed the limit `most`, counting turns in flight.

        `most` 0 means no limit.
        """
        turns, under_way = len(self.session.turns), sum([call.turns for call in self.calls])
        if most and turns + under_way + new_turns > most:
            problem = f"session {self.session_id!r} has {turns} turns and {under_way} in flight; the limit is {most}"
            if turns + new_turns > most:
                raise LimitReached(f"{problem}; start a new session")
            # A call in flight may fail, so that its turns don't count.
            raise LimitReached(f"{problem}; wait, or start a new session", retry_after=1.0)

    def call_in_flight(self, attempt: Attempt) -> InFlightCall | None:
        """Return the call in flight that `attempt` repeats. Raises `IdempotencyMismatch` if only the key is equal."""
        for call in reversed(self.calls):
            attempted = None if call.aborted else call.attempt
            if attempted is not None and attempt.repeats(attempted.key, attempted.body_digest):
                return call
        return None

    def answer_to(self, attempt: Attempt) -> RecordedReply | None:
        """Return the recorded reply to the call that `attempt` repeats. Raises `IdempotencyMismatch`."""
        answers = reversed(self.answers.values()) if attempt.key or attempt.retried else ()
        return next((answer for answer in answers if attempt.repeats(answer.key, answer.body_digest)), None)


class SessionCache:
    """Sessions by id. Unknown ids and other owners' sessions raise the same error. Use it on one event loop."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        loaded: Callable[[OpenSession, StoredSession, bool], None] = lambda *_: None,
        dropped: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._loaded = loaded
        """Called with the loaded part of a session, and whether it is the whole session."""
        self._dropped = dropped
        """Called with the id of a session that was deleted or is removed from memory."""
        self._limits = limits
        self._open: OrderedDict[str, OpenSession] = OrderedDict()
        """Sessions by id, least recently used first."""
        self._loading: dict[str, asyncio.Lock] = {}
        self._known_since = -math.inf if store.shared else time.time()
        """Unread replies recorded after this time have a mark. In a shared record other gateways mark them any time."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(list(self._open.values()))

    async def find(self, session_id: str, owner: str | None) -> OpenSession | None:
        """Return the session from memory or the store, or None if it does not exist.

        `owner` None may see all sessions. Raises `NotFound` for a session that belongs to a different owner.
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
        """Return the body prefixes of earlier requests to a session in memory, if it belongs to `owner`."""
        opened = self._open.get(session_id)
        return opened.prefixes if opened is not None and opened.session.info.owner == owner else ()

    async def get(self, session_id: str, owner: str | None) -> OpenSession:
        """Return the session. Raises `NotFound` if it does not exist or belongs to a different owner."""
        opened = await self.find(session_id, owner)
        if opened is None:
            raise not_found(session_id)
        return opened

    async def find_or_begin(self, session_id: str, owner: str, *, begin: bool = True) -> OpenSession:
        """Return the session. With `begin`, create it if missing; it is then stored with its first turn.

        Raises `NotFound`, `LimitReached`, and `Conflict` for the id of a dropped session.
        """
        # `find`, because another gateway may have dropped a session that is in memory here.
        opened = await self.find(session_id, owner) if session_id in self._open else None
        if opened is None and begin:
            await self.refuse_dropped(session_id, owner)
        # Don't await between a miss and the new session, so that two first turns create only one session.
        opened = opened or await self.find(session_id, owner) or self._seen(self._open.get(session_id), owner)
        if opened is None and not begin:
            raise not_found(session_id)
        return opened or self._begin(SessionInfo(session_id, time.time(), {}, owner))

    async def catch_up(self, opened: OpenSession) -> bool:
        """Load turns that other gateways have recorded in a session. Return whether there were any.

        The session's lock must be held. If another gateway has deleted the session, drop it here too, even if a new
        session has its id.
        """
        session, turns = opened.session, len(opened.session.turns)
        state = await asyncio.to_thread(self._store.session_state, opened.session_id, turns - 1)
        if state is None and not opened.stored:
            return False
        expected = session.turns[-1].digest if turns else None, session.info.created_at
        newer = None
        if state is not None and (not opened.stored or (state.digest, state.created_at) == expected):
            if opened.stored and state.turns == turns:
                return False
            with suppress(NotFound):
                newer = await asyncio.to_thread(self._store.load_newer, opened.session_id, tuple(session.turns))
        if newer is None or newer.info.owner != session.info.owner:
            # Another gateway has deleted the session, and perhaps created a new one with its id.
            opened.deleted = True
            self.drop(opened)
            return False
        # If two gateways created the session at once, the gateway that stored it first determines its info.
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
        exists = True
        with suppress(NotFound):
            exists = await self.find(session_id, owner) is not None
        # Meanwhile a first turn may have begun the session; don't await between here and `_begin`.
        if exists or session_id in self._open:
            raise Conflict(f"session {session_id!r} already exists; use a different id, or omit it to get a new one")
        info = SessionInfo(session_id, time.time(), metadata, owner)
        # Add it in memory first, and locked, so that a concurrent turn does not store the session too.
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
        self._dropped(opened.session_id)

    def drop_unused(self, opened: OpenSession) -> None:
        """Drop a session that has no records and no calls, because its calls were refused or failed."""
        if not opened.stored and not opened.calls and not opened.lock.locked():
            self.drop(opened)

    def _seen(self, opened: OpenSession | None, owner: str | None) -> OpenSession | None:
        """Mark `opened` as just used and return it. Raises `NotFound` if `owner` may not see it; None sees all."""
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

    async def refuse_dropped(self, session_id: str, owner: str) -> None:
        """Raise for the id of a dropped session before a turn is sampled, because the store would refuse the turn."""
        dropped_of = await asyncio.to_thread(Snapshots(self._store).dropped_of, session_id)
        if dropped_of is None:
            return
        if dropped_of != owner:
            raise not_found(session_id)
        raise Conflict(f"session {session_id!r} was dropped after its snapshot was confirmed; use a different id")

    def _begin(self, info: SessionInfo) -> OpenSession:
        self._make_room(info.owner)
        opened = self._open[info.session_id] = OpenSession(Session(info), stored=False)
        return self._touch(opened)

    def _touch(self, opened: OpenSession) -> OpenSession:
        opened.used_at = time.monotonic()
        self._open.move_to_end(opened.session_id)
        for older in islice(reversed(self._open.values()), _CONTEXTS_AT_HAND, _CONTEXTS_AT_HAND + 1):
            older.session.forget_context()
        return opened

    def _make_room(self, owner: str) -> None:
        """Drop idle sessions from memory. Raises `LimitReached` if `owner` still has too many sessions in memory."""
        most = self._limits.open_sessions
        cutoff = time.monotonic() - self._limits.idle_seconds
        for opened in list(takewhile(lambda opened: opened.used_at < cutoff, self._open.values())):
            if not (opened.calls or opened.sending or opened.unmarked or opened.lock.locked()):
                self.drop(opened)
        if most and sum(opened.session.info.owner == owner for opened in self._open.values()) >= most:
            oldest = next(opened for opened in self._open.values() if opened.session.info.owner == owner)
            wait = max(oldest.used_at - cutoff, 1.0)
            raise LimitReached(
                f"this key has {most} open sessions, which is the limit; delete one, or wait until one has been idle "
                f"for {self._limits.idle_seconds:g} s",
                retry_after=wait,
            )


def not_found(session_id: str) -> NotFound:
    """Return the error for unknown sessions and, without distinction, other owners' sessions."""
    return NotFound(f"there is no session {session_id!r}")
