"""Compare bridges with the template's own rendering while the gateway runs.

In the background: the first bridge of each kind on each branch, and a sample of the others, are put into a queue after
their turns are durable, and a thread renders the real conversations (`chat.bridge_check`). When the queue is full, a
check is left out and the verdict goes on saying so. What is found is appended to the record as events; a difference
ends the use of the bridge's strategy for its setup and kind.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokentape._canonical import canonical_json
from tokentape._session.verdict import BRIDGE_CHECKED, BRIDGE_DUE, BRIDGE_SKIPPED
from tokentape.chat._bridge_check import BridgeCheck, check_bridge
from tokentape.chat._certificate import Strategy
from tokentape.chat._renderer import PromptTokens, Renderer
from tokentape.errors import TokentapeError
from tokentape.gateway._limits import CheckBridges
from tokentape.gateway._prompts import Prompt
from tokentape.gateway._session_cache import OpenSession
from tokentape.gateway._telemetry import BackgroundThread, Metrics
from tokentape.store import Store
from tokentape.types import Event, Provenance, Setup, Turn

_log = logging.getLogger("tokentape.gateway")

WAITING = 128
"""Checks that may wait."""

_CLOSE_SECONDS = 5.0
"""How long waiting checks continue when the gateway ends. The others are done when their session is loaded."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Turns with the same bridge: the choices of one call."""

    opened: OpenSession
    turns: Sequence[Turn]
    setup: Setup
    body: Mapping[str, Any]
    """Of the event that says that it is due."""
    loop: asyncio.AbstractEventLoop


class BridgeChecks:
    """Samples bridges, checks them in a thread and records the results. Its methods belong to the event loop.

    `revoke` is called with a setup's digest, a continuation's name and the strategy to go on with.
    """

    def __init__(
        self,
        policy: CheckBridges,
        renderer: Renderer,
        store: Store,
        metrics: Metrics,
        revoke: Callable[[str, str, Strategy], None],
    ) -> None:
        self._policy, self._renderer, self._store = policy, renderer, store
        self._metrics, self._revoke = metrics, revoke
        self._thread = BackgroundThread("tokentape-bridges", self._check, WAITING)
        self._writing: set[asyncio.Task[None]] = set()
        self._random = random.Random()

    def due(self, opened: OpenSession, prompt: Prompt, turns: Sequence[Turn]) -> list[Event]:
        """Return the events to record with these turns: whether their bridge will be checked."""
        if prompt.bridge is None or prompt.parent is None or turns[0].abort_cause is not None:
            return []
        depth, seen = opened.bridges.get(prompt.parent.seq, _UNSEEN)
        like = _like(prompt.bridge.name, prompt.parent, prompt.added)
        first = like not in seen or self._policy == "all"
        # One in as many as the branch has turns: what a check costs grows with the branch, what a turn costs does not.
        if not first and (self._policy == "off" or self._random.random() * (depth + 1) >= 1):
            return []
        kind = BRIDGE_SKIPPED if self._policy == "off" or self._thread.full else BRIDGE_DUE
        if kind == BRIDGE_SKIPPED and not first:
            self._metrics.bridge_checks.labels("skipped").inc()
            return []
        body = {"continuation": prompt.bridge.name, "strategy": prompt.bridge.strategy, "like": like}
        return [Event(opened.session_id, turn.seq, kind, body, turn.created_at) for turn in turns]

    def recorded(self, opened: OpenSession, setup: Setup, turns: Sequence[Turn], events: Sequence[Event]) -> None:
        """Queue the checks of durable turns, with the events that `due` returned for them. Returns at once."""
        self._follow(opened, turns, events)
        if events and events[0].kind == BRIDGE_DUE:
            self._offer(_Job(opened, turns, setup, events[0].body, asyncio.get_running_loop()))
        elif events:
            self._metrics.bridge_checks.labels("skipped").inc()

    def loaded(
        self, opened: OpenSession, turns: Sequence[Turn], events: Sequence[Event], setups: Mapping[str, Setup]
    ) -> None:
        """Take in turns and events read from the store; with `setups`, do the checks that are still due."""
        self._follow(opened, turns, events)
        done = {event.turn for event in events if event.kind == BRIDGE_CHECKED}
        for event in events:
            turn = None if event.turn is None else opened.session.turns[event.turn]
            if turn is None:
                continue
            if event.kind == BRIDGE_CHECKED and "goes_on" in event.body:
                self._revoke(turn.setup, event.body["continuation"], event.body["goes_on"])
            elif event.kind == BRIDGE_DUE and event.turn not in done and turn.setup in setups:
                job = _Job(opened, [turn], setups[turn.setup], event.body, asyncio.get_running_loop())
                self._offer(job, again=True)

    async def wait(self, session_ids: Sequence[str] | None, seconds: float) -> None:
        """Return when no check of these sessions, of any if None, is due any more, or after so many seconds."""
        until = time.monotonic() + seconds
        # Other gateways over the same record may be doing them.
        while await asyncio.to_thread(self._store.checks_due, session_ids) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Continue with waiting checks for some seconds, then end. The next gateway does those that are left."""
        await asyncio.to_thread(self._thread.close, _CLOSE_SECONDS)
        # What the thread has handed over last is taken by now.
        await asyncio.sleep(0)
        await asyncio.gather(*self._writing)

    def _follow(self, opened: OpenSession, turns: Iterable[Turn], events: Iterable[Event]) -> None:
        """Note per turn how long its branch is, and which kinds of bridges were drawn on it."""
        likes = {
            event.turn: event.body["like"]
            for event in events
            if event.kind == BRIDGE_DUE or (event.kind == BRIDGE_SKIPPED and self._policy == "off")
        }
        for turn in turns:
            depth, seen = _UNSEEN if turn.parent is None else opened.bridges.get(turn.parent, _UNSEEN)
            opened.bridges[turn.seq] = depth + 1, seen | {likes[turn.seq]} if turn.seq in likes else seen

    def _offer(self, job: _Job, *, again: bool = False) -> None:
        # One that comes after the end stays due: the next gateway checks it.
        if not self._thread.offer(job) and not again and not self._thread.closed:
            self._found(job, BridgeCheck("unknown", "there was no room in the queue"))

    def _check(self, job: _Job) -> None:
        try:
            found = _check(self._renderer, job)
        except Exception as error:
            # Its text may hold what was said.
            found = BridgeCheck("unknown", f"the check failed ({type(error).__name__})")
        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(self._found, job, found)

    def _found(self, job: _Job, found: BridgeCheck) -> None:
        self._metrics.bridge_checks.labels(found.outcome).inc()
        body: dict[str, Any] = {"continuation": job.body["continuation"], "outcome": found.outcome}
        if found.detail:
            body["detail"] = found.detail
        if found.outcome == "differs":
            local = job.body["strategy"] == "local"
            goes_on: Strategy = "contextual" if local and found.contextual else "fork"
            body |= {"goes_on": goes_on, "template": found.expected, "bridge": found.found}
            self._revoke(job.setup.digest, job.body["continuation"], goes_on)
            self._metrics.bridge_revocations.labels(goes_on).inc()
            where = f"session {job.opened.session_id} turn {job.turns[0].seq}, setup {job.setup.digest[:12]}"
            what = f"the {job.body['strategy']} bridge for {job.body['continuation']}"
            _log.warning("%s is not what the template writes (%s): goes on %s", what, where, goes_on)
        events = [Event(turn.session_id, turn.seq, BRIDGE_CHECKED, body, time.time()) for turn in job.turns]
        task = asyncio.get_running_loop().create_task(self._note(job.opened, events))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _note(self, opened: OpenSession, events: Sequence[Event]) -> None:
        try:
            if not opened.deleted:
                await self._store.write(*events)
        except TokentapeError as error:
            _log.warning("what a check of a bridge found could not be recorded (%s)", error.code)


_UNSEEN: tuple[int, frozenset[str]] = (0, frozenset())
"""Of a branch without turns: its length, and the kinds of bridges drawn on it."""

_POLL_SECONDS = 0.05


def _like(name: str, parent: Turn, added: PromptTokens) -> str:
    """Return the kind of a bridge: a hash of the continuation, the tools called and how the turn ended."""
    calls = parent.reply.get("tool_calls") or ()
    tools = sorted({str(call["function"]["name"]) for call in calls})
    closed = bool((added.provenance == Provenance.CLOSE).any())
    beside = bool(calls) and bool(parent.reply.get("content"))
    kind = canonical_json([name, tools, closed, added.stop_mismatch, beside])
    return hashlib.sha256(kind.encode()).hexdigest()[:16]


def _check(renderer: Renderer, job: _Job) -> BridgeCheck:
    turn, session = job.turns[0], job.opened.session
    assert turn.parent is not None
    *path, parent = session.path(turn.parent)
    history = [message for one in path for message in (*one.messages, one.reply)] + [*parent.messages]
    added = PromptTokens(turn.added_ids, turn.added_provenance)
    return check_bridge(renderer, job.setup, history, parent.reply, turn.messages, parent.completion_ids, added)
