"""Calls in flight, detached from the connections that wait for them.

A client that gives up and asks again joins the call that it left, so that one generation serves both. A call without
clients is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from tokentape.errors import EngineUnavailable
from tokentape.gateway._events import Attempt, TurnDelta, TurnEvent, TurnStarted


class InFlightCall:
    """One call of `turns` choices, its events kept for whoever joins. All methods belong to one event loop.

    `grace` is how many seconds a call continues after all clients have left, if nothing of its reply was read: official
    clients ask again half a second after a timeout. A stream that has begun can't be joined; it is aborted at once.
    """

    def __init__(self, attempt: Attempt | None, turns: int, *, stream: bool, grace: float) -> None:
        self.attempt = attempt
        self.turns = turns
        self.abort_cause = "client_left"
        self.aborted = False
        """Its work is cancelled, so there is nothing left to join."""
        self._stream = stream
        self._grace = grace
        self._events: list[TurnEvent] = []
        self._changed = asyncio.Event()
        """Set and replaced with every change."""
        self._readers = 0
        self._read = False
        self._read_to_end = False
        self._expiry: asyncio.TimerHandle | None = None
        self._committing = False
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[], None]) -> None:
        """Run `work`, which publishes its events here. It is cancelled once no client waits for it."""
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(lambda _: self._ended(on_end))

    def publish(self, event: TurnEvent) -> None:
        self._events.append(event)
        self._wake()

    async def wait_for_reader(self) -> None:
        while not self._readers:
            await self._changed.wait()

    def begin_commit(self) -> None:
        """Only recording is left: from here on nothing aborts the call, and a retry finds it."""
        self._committing = True

    def abort(self, cause: str = "client_left") -> None:
        if self._task is not None and not self._committing:
            self.abort_cause = cause
            self.aborted = True
            self._task.cancel()

    @property
    def left_reply(self) -> str | None:
        """The id of the reply if all clients have left before its end; None also if nothing was begun."""
        started = self._events[0] if self._events else None
        left = not self._readers and not self._read_to_end
        return started.reply_id if isinstance(started, TurnStarted) and left else None

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def follow(self) -> AsyncGenerator[TurnEvent, None]:
        """Every event from the first on, as they come. Raises what the work raised."""
        assert self._task is not None
        self._readers += 1
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._wake()
        at = 0
        try:
            while at < len(self._events) or not self._task.done():
                if at < len(self._events):
                    yield self._events[at]
                    self._read = self._read or (self._stream and isinstance(self._events[at], TurnDelta))
                    at += 1
                    continue
                await self._changed.wait()
            self._read_to_end = True
        finally:
            self._readers -= 1
            if not self._readers and not self._task.done():
                self._leave()
        if self._task.cancelled():
            raise EngineUnavailable("the gateway ended this call before it was finished; send it again")
        self._task.result()

    def _leave(self) -> None:
        if self._read or self._grace <= 0:
            self.abort()
        else:
            self._expiry = asyncio.get_running_loop().call_later(self._grace, self.abort)

    def _ended(self, on_end: Callable[[], None]) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        on_end()
        self._wake()
        if self._task is not None and not self._task.cancelled():
            # Fetched once, so that asyncio does not log a failure without a client as never retrieved.
            self._task.exception()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
