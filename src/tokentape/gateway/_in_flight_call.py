"""Calls in flight, independent of the connections that wait for them.

A client that disconnects and retries joins the same call, so that one completion serves both requests. A call without
connected clients is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any

from tokentape.errors import EngineUnavailable
from tokentape.gateway._events import Attempt, TurnDelta, TurnEvent, TurnStarted


class InFlightCall:
    """A call with `turns` choices. It keeps its events for clients that join later. Call its methods on one event loop.

    After all clients have disconnected, the call continues for `grace` seconds if no client has read any of its reply,
    because official clients retry half a second after a timeout. A stream that a client has begun to read is aborted
    at once.
    """

    def __init__(self, attempt: Attempt | None, turns: int, *, stream: bool, grace: float) -> None:
        self.attempt = attempt
        self.turns = turns
        self.abort_cause = "client_left"
        self.aborted = False
        """Whether the work is cancelled. Retries can't join the call then."""
        self._stream = stream
        self._grace = grace
        self._events: list[TurnEvent] = []
        self._changed = asyncio.Event()
        self._readers = 0
        self._read = False
        self._read_to_end = False
        self._expiry: asyncio.TimerHandle | None = None
        self._committing = False
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[BaseException | None], None]) -> None:
        """Start `work`, which calls `publish`. It is cancelled once no client waits for it. `on_end` gets its error."""
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(partial(self._ended, on_end))

    def publish(self, event: TurnEvent) -> None:
        self._events.append(event)
        # A reply that is not streamed is sent when the call has ended, which wakes the clients too.
        if self._stream or isinstance(event, TurnStarted):
            self._wake()

    async def wait_for_reader(self) -> None:
        while not self._readers:
            await self._changed.wait()

    def begin_commit(self) -> None:
        """Forbid aborts from now on, because only recording remains, and a retry will find the reply."""
        self._committing = True

    def abort(self, cause: str = "client_left") -> None:
        if self._task is not None and not self._committing:
            self.abort_cause = cause
            self.aborted = True
            self._task.cancel()

    @property
    def left_reply(self) -> str | None:
        """Id of the reply if it has begun and all clients disconnected before its end, else None."""
        started = self._events[0] if self._events else None
        abandoned = not self._readers and not self._read_to_end
        return started.reply_id if isinstance(started, TurnStarted) and abandoned else None

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def follow(self) -> AsyncGenerator[TurnEvent, None]:
        """Yield all events from the first one on. Raises the error that ended the work."""
        assert self._task is not None
        self._readers += 1
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._wake()
        index = 0
        try:
            while index < len(self._events) or not self._task.done():
                if index < len(self._events):
                    yield self._events[index]
                    self._read = self._read or (self._stream and isinstance(self._events[index], TurnDelta))
                    index += 1
                    continue
                await self._changed.wait()
            self._read_to_end = True
        finally:
            self._readers -= 1
            if not self._readers and not self._task.done():
                self._leave()
        if self._task.cancelled():
            raise EngineUnavailable("the gateway cancelled this call before it was finished; send it again")
        self._task.result()

    def _leave(self) -> None:
        if self._read or self._grace <= 0:
            self.abort()
        else:
            self._expiry = asyncio.get_running_loop().call_later(self._grace, self.abort)

    def _ended(self, on_end: Callable[[BaseException | None], None], task: asyncio.Task[None]) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        # Retrieve the exception, or asyncio logs a failure that no client was waiting for.
        on_end(None if task.cancelled() else task.exception())
        self._wake()

    def _wake(self) -> None:
        # Only what waits now continues.
        self._changed.set()
        self._changed.clear()
