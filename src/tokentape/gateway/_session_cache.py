"""The sessions in memory, loaded or begun here, each with a lock, and dropped when they are idle.

If other gateways write to the same record, a session in memory is compared with the record before it is used.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tokentape._session.tree import Session, unread_turns
from tokentape.errors import Conflict, IdempotencyMismatch, LimitReached, NotFound
from tokentape.gateway._events import Attempt
from tokentape.gateway._in_flight_call import InFlightCall
from tokentape.gateway._limits import Limits
from tokentape.gateway._prefix import ParsedPrefix
from tokentape.store import Store, StoredSession
from tokentape.store._snapshots import Snapshots
from tokentape.types import RecordedReply, SessionInfo

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
    prefixes: tuple[ParsedPrefix, ...] = ()
    """The beginnings of the last requests, newest last: a later one may begin with them."""
    bridges: dict[int, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Per turn the length of its branch, and the kinds of bridges on it that were drawn to be checked."""
    delivered: set[str] = field(default_factory=set)
    """Ids of those of its newest replies that a client has got."""
    _answers: OrderedDict[str, RecordedReply] = field(default_factory=OrderedDict)

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.session.info.session_id

    def remember(self, answer: RecordedReply) -> None:
        """Keep an answer for retries."""
        self._answers[answer.reply_id] = answer
        if len(self._answers) > _KEPT_ANSWERS:
            self.delivered.discard(self._answers.popitem(last=False)[0])

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

    def remember_prefix(self, prefix: ParsedPrefix) -> None:
        """Keep the beginning of a request for later ones that begin with it."""
        self.prefixes = (*self.prefixes[-_KEPT_PREFIXES + 1 :], prefix)

    def check_turns(self, more: int, most: int) -> None:
        """Raise `LimitReached` if, with `more` turns and those under way, there are more than `most`; 0 is no limit."""
        turns, under_way = len(self.session.turns), sum(call.turns for call in self.calls)
        if most and turns + under_way + more > most:
            found = f"session {self.session_id!r} has {turns} turns and {under_way} under way; the limit is {most}"
            if turns + more > most:
                raise LimitReached(f"{found}; begin another session")
            # Calls that fail make room.
            raise LimitReached(f"{found}; wait, or begin another session", retry_after=1.0)

    def call_in_flight(self, attempt: Attempt | None) -> InFlightCall | None:
        """Return the call in flight that this one repeats. Raises `IdempotencyMismatch` for a key with another body."""
        for call in reversed(self.calls):
            known = None if call.aborted else call.attempt
            if attempt is not None and known is not None and _repeats(attempt, known.key, known.body_digest):
                return call
        return None

    def answer_to(self, attempt: Attempt | None) -> RecordedReply | None:
        """Return the recorded answer to the call that this one repeats. Raises as `call_in_flight`."""
        for answer in reversed(self._answers.values()):
            if attempt is not None and _repeats(attempt, answer.key, answer.body_digest):
                return answer
        return None

    def answer_named(self, reply_id: str) -> RecordedReply | None:
        """The answer with this id, if it is one of the newest."""
        return self._answers.get(reply_id)


def _repeats(attempt: Attempt, key: str | None, body_digest: str) -> bool:
    if attempt.key is not None:
        if attempt.key != key:
            return False
        if attempt.body_digest != body_digest:
            raise IdempotencyMismatch("this Idempotency-Key came with another body before; use a new key")
        return True
    return attempt.retried and key is None and attempt.body_digest == body_digest


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
        """Return the session if it is in memory."""
        return self._open.get(session_id)

    def prefixes(self, session_id: str, owner: str) -> tuple[ParsedPrefix, ...]:
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
        if begin and session_id not in self._open:
            await self._refuse_dropped(session_id, owner)
        # No await between a miss and the new session, so that two first turns begin one.
        found = await self.find(session_id, owner) or self._seen(self._open.get(session_id), owner)
        if found is None and not begin:
            raise not_found(session_id)
        return found or self._begin(SessionInfo(session_id, time.time(), {}, owner), stored=False)

    async def catch_up(self, opened: OpenSession) -> bool:
        """Load what others have recorded of a session; return whether there was anything. Its lock must be held.

        A session that others have deleted is dropped here too, also if they have begun it again.
        """
        session, known = opened.session, len(opened.session.turns)
        state = await asyncio.to_thread(self._store.session_state, opened.session_id, known - 1)
        if state is None:
            if opened.stored:
                self._lose(opened)
            return False
        same = state.digest == (session.turns[-1].digest if known else None)
        if opened.stored and not (same and state.created_at == session.info.created_at):
            self._lose(opened)
            return False
        if opened.stored and state.turns == known:
            return False
        try:
            newer = await asyncio.to_thread(self._store.load_newer, opened.session_id, tuple(session.turns))
        except NotFound:
            self._lose(opened)
            return False
        if newer.info.owner != session.info.owner:
            # Another owner has begun a session with this id meanwhile.
            self._lose(opened)
            return False
        # One that was begun here and there at once: there it was stored first.
        session.info, opened.stored = newer.info, True
        for turn in newer.turns:
            session.add(turn)
        session.unread |= unread_turns(newer.events)
        opened.setups |= newer.setups.keys()
        opened.remember_recorded(newer.answers, known_since=self._known_since)
        self._loaded(opened, newer, False)
        return True

    async def create(self, session_id: str, metadata: Mapping[str, Any], owner: str) -> SessionInfo:
        """Create and store a session. Raises `Conflict` if the id is taken, and `LimitReached`."""
        self._make_room(owner)
        try:
            taken = await self.find(session_id, owner) is not None
        except NotFound:
            taken = True
        if taken:
            raise Conflict(f"session {session_id!r} exists already; use another id or none")
        info = SessionInfo(session_id, time.time(), metadata, owner)
        # In memory first and locked, so that a turn that comes now does not store it a second time.
        opened = self._begin(info, stored=False)
        try:
            async with opened.lock:
                await self._store.write(info)
                opened.stored = True
        except BaseException:
            self.drop(opened)
            raise
        return info

    def drop(self, opened: OpenSession) -> None:
        """Forget a session."""
        if self._open.get(opened.session_id) is opened:
            del self._open[opened.session_id]
        if self._at_hand.get(opened.session_id) is opened:
            del self._at_hand[opened.session_id]

    def drop_unused(self, opened: OpenSession) -> None:
        """Forget a session of which nothing is or will be recorded: its calls were refused or have failed."""
        if not opened.stored and not opened.calls and not opened.lock.locked():
            self.drop(opened)

    def _lose(self, opened: OpenSession) -> None:
        opened.deleted = True
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

    def _begin(self, info: SessionInfo, *, stored: bool) -> OpenSession:
        self._make_room(info.owner)
        opened = self._open[info.session_id] = OpenSession(Session(info), stored)
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
            if not opened.calls and not opened.lock.locked():
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
