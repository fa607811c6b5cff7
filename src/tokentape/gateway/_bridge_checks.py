"""Compare bridges with the template's own rendering, in the background while the gateway runs.

A bridge is the ids that are appended to the context between two replies. After a turn is durable, its bridge is queued
if it is the first of its kind on the branch or drawn at random. A thread renders the real conversation and compares it
with the bridge (`chat.bridge_check`). If the queue is full, the check is skipped and the verdict says so. Results are
recorded as events. After a difference the bridge's strategy is no longer used for that setup and continuation.
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
from tokentape.store import Store, StoredSession
from tokentape.types import Event, Provenance, Setup, Turn

_log = logging.getLogger("tokentape.gateway")

WAITING = 128
"""Maximum number of queued checks."""

_CLOSE_SECONDS = 5.0
"""Time for queued checks at shutdown. The remaining checks run when their sessions are loaded again."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A check for all choices of a call, whose turns share a bridge."""

    opened: OpenSession
    turns: Sequence[Turn]
    setup: Setup
    body: Mapping[str, Any]
    """Body of the event that records the check as pending."""
    loop: asyncio.AbstractEventLoop


class BridgeChecks:
    """Samples bridges, checks them in a thread and records the results. Call its methods on the event loop.

    With the policy None it does nothing.
    After a difference it calls `revoke` with the setup's digest, the continuation's name and the strategy to use
    instead.
    """

    def __init__(
        self,
        policy: CheckBridges | None,
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
        """Decide whether to check the bridge of new turns. Return the events to record with the turns."""
        parent = prompt.point.parent
        if self._policy is None or prompt.bridge is None or parent is None or turns[0].abort_cause is not None:
            return []
        similar = _like(prompt.bridge.name, parent, prompt.added)
        first = similar not in opened.bridges.get(parent.seq, _UNSEEN) or self._policy == "all"
        # The probability is the share of new tokens in the prompt, because a check costs as much as the whole prompt,
        # and a turn only as much as its new tokens.
        new = len(parent.completion_ids) + len(prompt.added.ids)
        if not first and (self._policy == "off" or self._random.random() * len(prompt.ids) >= new):
            return []
        kind = BRIDGE_SKIPPED if self._policy == "off" or self._thread.full else BRIDGE_DUE
        if kind == BRIDGE_SKIPPED and not first:
            self._metrics.bridge_checks.labels("skipped").inc()
            return []
        body = {"continuation": prompt.bridge.name, "strategy": prompt.bridge.strategy, "like": similar}
        return [Event(opened.session_id, turn.seq, kind, body, turn.created_at) for turn in turns]

    def recorded(self, opened: OpenSession, setup: Setup, turns: Sequence[Turn], events: Sequence[Event]) -> None:
        """Queue the check of turns that are now durable, without waiting. `events` are what `due` returned for them."""
        if self._policy is None:
            return
        self._follow(opened, turns, events)
        if events and events[0].kind == BRIDGE_DUE:
            self._offer(_Job(opened, turns, setup, events[0].body, asyncio.get_running_loop()))
        elif events:
            self._metrics.bridge_checks.labels("skipped").inc()

    def loaded(self, opened: OpenSession, stored: StoredSession, whole: bool) -> None:
        """Update `opened` from what was loaded of its session. Queue pending checks if it is the `whole` session.

        The gateway that added a turn runs its checks.
        """
        if self._policy is None:
            return
        self._follow(opened, stored.turns, stored.events)
        done = {event.turn for event in stored.events if event.kind == BRIDGE_CHECKED}
        for event in stored.events:
            turn = None if event.turn is None else opened.session.turns[event.turn]
            if turn is None:
                continue
            if event.kind == BRIDGE_CHECKED and "goes_on" in event.body:
                self._revoke(turn.setup, event.body["continuation"], event.body["goes_on"])
            elif whole and event.kind == BRIDGE_DUE and event.turn not in done and turn.setup in stored.setups:
                job = _Job(opened, [turn], stored.setups[turn.setup], event.body, asyncio.get_running_loop())
                self._offer(job, again=True)

    async def wait(self, session_ids: Sequence[str] | None, seconds: float) -> None:
        """Wait, at most `seconds`, until these sessions have no pending checks. None means all sessions."""
        if self._policy is None or not seconds:
            return
        until = time.monotonic() + seconds
        # Other gateways on the same record may run the checks, so ask the store.
        while await asyncio.to_thread(self._store.checks_due, session_ids) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Run queued checks for up to `_CLOSE_SECONDS`, then stop. The next gateway runs the remaining checks."""
        await asyncio.to_thread(self._thread.close, _CLOSE_SECONDS)
        # Let callbacks run that the thread has just scheduled.
        await asyncio.sleep(0)
        await asyncio.gather(*self._writing)

    def _follow(self, opened: OpenSession, turns: Iterable[Turn], events: Iterable[Event]) -> None:
        """Set `bridges` for new turns: the kinds of bridges already drawn on the branch."""
        likes = {
            event.turn: event.body["like"]
            for event in events
            if event.kind == BRIDGE_DUE or (event.kind == BRIDGE_SKIPPED and self._policy == "off")
        }
        for turn in turns:
            seen = _UNSEEN if turn.parent is None else opened.bridges.get(turn.parent, _UNSEEN)
            opened.bridges[turn.seq] = seen | {likes[turn.seq]} if turn.seq in likes else seen

    def _offer(self, job: _Job, *, again: bool = False) -> None:
        # A check offered after `close` stays pending, so that the next gateway runs it.
        if not self._thread.offer(job) and not again and not self._thread.closed:
            self._record_result(job, BridgeCheck("unknown", "the check could not be queued"))

    def _check(self, job: _Job) -> None:
        try:
            result = _check(self._renderer, job)
        except Exception as error:
            # The exception's text may quote the conversation.
            result = BridgeCheck("unknown", f"the check failed ({type(error).__name__})")
        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(self._record_result, job, result)

    def _record_result(self, job: _Job, result: BridgeCheck) -> None:
        self._metrics.bridge_checks.labels(result.outcome).inc()
        body: dict[str, Any] = {"continuation": job.body["continuation"], "outcome": result.outcome}
        if result.detail:
            body["detail"] = result.detail
        if result.outcome == "differs":
            local = job.body["strategy"] == "local"
            goes_on: Strategy = "contextual" if local and result.contextual else "fork"
            body |= {"goes_on": goes_on, "template": result.expected, "bridge": result.found}
            self._revoke(job.setup.digest, job.body["continuation"], goes_on)
            self._metrics.bridge_revocations.labels(goes_on).inc()
            where = f"session {job.opened.session_id} turn {job.turns[0].seq}, setup {job.setup.digest[:12]}"
            what = f"the {job.body['strategy']} bridge for {job.body['continuation']}"
            _log.warning("%s differs from the template's own text (%s); using %s from now on", what, where, goes_on)
        events = [Event(turn.session_id, turn.seq, BRIDGE_CHECKED, body, time.time()) for turn in job.turns]
        task = asyncio.get_running_loop().create_task(self._note(job.opened, events))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _note(self, opened: OpenSession, events: Sequence[Event]) -> None:
        try:
            if not opened.deleted:
                await self._store.write(*events)
        except TokentapeError as error:
            _log.warning("the result of a bridge check could not be recorded (%s)", error.code)


_UNSEEN: frozenset[str] = frozenset()

_CLOSE = int(Provenance.CLOSE)

_POLL_SECONDS = 0.05


def _like(name: str, parent: Turn, added: PromptTokens) -> str:
    """Return a hash that bridges of one kind share: of the continuation, called tools and the parent turn's end."""
    calls = parent.reply.get("tool_calls") or ()
    tools = sorted({str(call["function"]["name"]) for call in calls})
    closed = _CLOSE in added.provenance.tobytes()
    beside = bool(calls) and bool(parent.reply.get("content"))
    kind = canonical_json([name, tools, closed, added.stop_mismatch, beside])
    return hashlib.sha256(kind.encode()).hexdigest()[:16]


def _check(renderer: Renderer, job: _Job) -> BridgeCheck:
    turn, session = job.turns[0], job.opened.session
    assert turn.parent is not None
    *path, parent = session.path(turn.parent)
    history = [message for ancestor in path for message in (*ancestor.messages, ancestor.reply)] + [*parent.messages]
    added = PromptTokens(turn.added_ids, turn.added_provenance)
    return check_bridge(renderer, job.setup, history, parent.reply, turn.messages, parent.completion_ids, added)
