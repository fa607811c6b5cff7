"""The gate in front of the engine: closed while a trainer changes the weights, and told which ones sample."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tokentape.errors import EngineUnavailable


class Gate:
    """Calls pass while it is open and wait while it is closed, `patience` seconds at most. For one event loop.

    A trainer that updates weights closes it, so that rollouts wait instead of failing, and opens it with the new
    version's name. Engines that tell their version by themselves are believed before that.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way = 0
        self._interrupts: dict[object, Callable[[], None]] = {}
        self.weight_version: str | None = None
        """What samples now, as far as somebody said."""

    @property
    def closed(self) -> bool:
        """Whether calls wait."""
        return not self._open.is_set()

    @property
    def under_way(self) -> int:
        """Calls that have passed and are not over."""
        return self._under_way

    def close(self) -> None:
        """Let no more calls pass."""
        self._open.clear()

    def open(self, weight_version: str | None = None) -> None:
        """Let calls pass again; `weight_version` names the weights that sample from now on."""
        if weight_version is not None:
            self.weight_version = weight_version
        self._open.set()

    async def idle(self, seconds: float) -> bool:
        """Wait until no call is under way; False if that took longer."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def passing(self, interrupt: Callable[[], None] | None = None) -> AsyncIterator[None]:
        """Pass, and be under way as long as the context lasts. `interrupt` is called if it has to end early.

        Raises `EngineUnavailable` if the gate stays closed.
        """
        await self.opened()
        self._under_way += 1
        self._idle.clear()
        token = object()
        if interrupt is not None:
            self._interrupts[token] = interrupt
        try:
            yield
        finally:
            self._interrupts.pop(token, None)
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    def interrupt(self) -> None:
        """Have those who passed end early, as far as they can."""
        for interrupt in list(self._interrupts.values()):
            interrupt()

    async def opened(self) -> None:
        """Return when the gate is open. Raises `EngineUnavailable` if it stays closed."""
        try:
            async with asyncio.timeout(self._patience):
                while self.closed:
                    await self._open.wait()
        except TimeoutError:
            error = EngineUnavailable(f"sampling has been paused for {self._patience:g} s; send it again later")
            error.retry_after = 5.0
            raise error from None
