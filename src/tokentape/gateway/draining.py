"""The end of a gateway in good order: no new calls, those under way finished or aborted, then nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from tokentape.errors import GatewayUnavailable

_TICK_SECONDS = 0.1
_FAREWELL_SECONDS = 2.0


class Drain:
    """Counts the requests under way, and waits for them once the end has begun.

    `seconds` is how long calls may go on then. The server begins and finishes it; the application counts its requests
    here and refuses calls from then on. The socket still listens, so that health checks and refusals are heard.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds = seconds
        self.abort: Callable[[], Awaitable[None]] = _nothing
        """Ends the calls under way; the application sets it."""
        self.begun = False
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Take no more calls. May be called in a signal handler."""
        self.begun = True

    def refuse(self) -> None:
        """Raise `GatewayUnavailable` if no more calls are taken."""
        if self.begun:
            raise GatewayUnavailable("this gateway is shutting down; send the request again, to the next one")

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a request for as long as the context lasts."""
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def finish(self, hurried: Callable[[], bool]) -> None:
        """Return when no request is under way; after `seconds`, or when `hurried`, abort the calls that still are."""
        deadline = asyncio.get_running_loop().time() + self.seconds
        while self._under_way and not hurried() and asyncio.get_running_loop().time() < deadline:
            await self._wait(_TICK_SECONDS)
        if self._under_way:
            await self.abort()
            # For the answers to those that were aborted.
            await self._wait(_FAREWELL_SECONDS)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)


async def _nothing() -> None:
    pass
