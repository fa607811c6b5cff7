"""Limits of one gateway, and counters of calls in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tokentape._settings import option
from tokentape.errors import GatewayUnavailable, LimitReached

_log = logging.getLogger("tokentape.serve")

CheckBridges: TypeAlias = Literal["all", "sample", "off"]
"""Which bridges are checked: all; the first of each kind on a branch and a sample of the others; none."""


OnAbort: TypeAlias = Literal["resume", "keep", "resample"]
"""What to do with a completion that the engine aborts: continue it, return it as it is, or answer with an error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a gateway. 0 means no limit, where a count is meant."""

    body_bytes: int = option(64 * 2**20, "Largest request body, in bytes. Default: 64 MiB.", "--max-body-bytes")
    open_sessions: int = option(
        0, "Sessions in memory per API key, idle ones not counted; 0 for no limit.", "--max-open-sessions"
    )
    turns_per_session: int = option(0, "Turns per session; 0 for no limit.", "--max-turns-per-session")
    idle_seconds: float = option(
        3600.0, "Time after which an unused session leaves the memory. The store still has it."
    )
    calls_per_key: int = option(0, "Calls in flight per API key; 0 for no limit.", "--max-calls-per-key")
    calls_per_window: int = option(0, "Calls per API key in a window; 0 for no limit.", "--max-calls-per-window")
    tokens_per_window: int = option(
        0, "Prompt and sampled tokens per API key in a window; 0 for no limit.", "--max-tokens-per-window"
    )
    window_seconds: float = option(
        3600.0, "Length of the windows of these two limits.", "--limit-window-seconds", least=1
    )
    pause_patience: float = 600.0
    """Seconds that a call waits while sampling is paused."""
    resumes: int = option(
        32, "How often an aborted completion is continued before it is kept as it is.", "--max-resumes"
    )
    retry_grace: float = 2.0
    """Seconds that a call continues after its client has left, so that a retry can join it. 0: it is aborted."""


class InFlightCounter:
    """Counts what is in flight, and waits until nothing is. For one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def track(self) -> Iterator[None]:
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._idle.set()

    async def idle(self, seconds: float) -> bool:
        """Wait until nothing is in flight; return False if that takes longer."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return not self.count


class CallsPerKey:
    """Counts the calls of each API key: those in flight, and with their tokens those of the window that is running.

    Windows begin at multiples of their length, in Unix time. All counts are of this process, and begin anew with it.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._in_flight: Counter[str] = Counter()
        self._window = 0
        self._calls: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @contextmanager
    def track(self, owner: str) -> Iterator[None]:
        """Count a call as long as the context lasts, and in its window. Raises `LimitReached`."""
        self._begin_window()
        most, per_window = self._limits.calls_per_key, self._limits.calls_per_window
        if most and self._in_flight[owner] >= most:
            raise LimitReached(f"{most} calls are in flight with this key, which is the limit", retry_after=1.0)
        if per_window and self._calls[owner] >= per_window:
            raise self._spent(f"{per_window} calls")
        if self._limits.tokens_per_window and self._tokens[owner] >= self._limits.tokens_per_window:
            raise self._spent(f"{self._limits.tokens_per_window} tokens")
        self._calls[owner] += 1
        self._in_flight[owner] += 1
        try:
            yield
        finally:
            self._in_flight[owner] -= 1

    def spend(self, owner: str, ids: Iterable[Sized]) -> None:
        """Count the ids of the prompt and of each choice of a call that has ended."""
        self._begin_window()
        self._tokens[owner] += sum(map(len, ids))

    def _begin_window(self) -> None:
        now = int(time.time() // self._limits.window_seconds)
        # A clock that is set back does not begin a new one.
        if now > self._window:
            self._window = now
            self._calls.clear()
            self._tokens.clear()

    def _spent(self, what: str) -> LimitReached:
        seconds = self._limits.window_seconds
        left = (self._window + 1) * seconds - time.time()
        return LimitReached(f"this key has used its {what} per {seconds:g} s; more in {left:.0f} s", max(left, 1.0))


_TICK_SECONDS = 0.1
_GRACE_SECONDS = 2.0


class Drain:
    """Waits for the requests in flight once the shutdown has begun.

    `seconds` is how long calls may continue then. The server begins and finishes it; the application counts its
    requests here and refuses calls from then on. The socket still listens, so that health checks are answered.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds = seconds
        self.abort: Callable[[], Awaitable[None]] | None = None
        """Ends the calls in flight; the application sets it."""
        self.begun = False
        self.requests = InFlightCounter()

    def begin(self) -> None:
        """Take no more calls. May be called in a signal handler."""
        self.begun = True

    def refuse(self) -> None:
        """Raise `GatewayUnavailable` if no more calls are taken."""
        if self.begun:
            raise GatewayUnavailable("this gateway is shutting down; send the request again, to the next one")

    async def finish(self, force: Callable[[], bool]) -> None:
        """Return when no request is in flight; after `seconds`, or when `force`, abort the calls that still are."""
        deadline = asyncio.get_running_loop().time() + self.seconds
        if self.requests.count and not force():
            _log.info(
                "stopping: waiting up to %g s for %d requests in flight; interrupt again to end them now",
                self.seconds,
                self.requests.count,
            )
        while self.requests.count and not force() and asyncio.get_running_loop().time() < deadline:
            await self.requests.idle(_TICK_SECONDS)
        if self.requests.count and self.abort is not None:
            await self.abort()
            # For the answers to the calls that were aborted.
            await self.requests.idle(_GRACE_SECONDS)
