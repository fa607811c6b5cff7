"""A gateway's limits, counters of calls in flight, and the drain at shutdown."""

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
"""Bridges to check: `all`; `sample`, the first of each kind on a branch and a sample of the rest; `off`, none."""


OnAbort: TypeAlias = Literal["resume", "keep", "resample"]
"""What to do with a completion that the engine aborts: continue it, return it as it is, or answer with an error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a gateway. For counts, 0 means no limit."""

    body_bytes: int = option(64 * 2**20, "Largest request body, in bytes. Default: 64 MiB.", "--max-body-bytes")
    open_sessions: int = option(
        0, "Sessions in memory per API key, not counting idle sessions; 0 for no limit.", "--max-open-sessions"
    )
    turns_per_session: int = option(0, "Turns per session; 0 for no limit.", "--max-turns-per-session")
    idle_seconds: float = option(
        3600.0, "Time after which an unused session is removed from memory. It stays in the store."
    )
    calls_per_key: int = option(0, "Calls in flight per API key; 0 for no limit.", "--max-calls-per-key")
    calls_per_window: int = option(0, "Calls per API key in a window; 0 for no limit.", "--max-calls-per-window")
    tokens_per_window: int = option(
        0, "Prompt and sampled tokens per API key in a window; 0 for no limit.", "--max-tokens-per-window"
    )
    window_seconds: float = option(
        3600.0, "Length of the window for the two limits per window.", "--limit-window-seconds", least=1
    )
    pause_patience: float = 600.0
    """Maximum time in seconds that a call waits while the gateway is paused for new weights."""
    resumes: int = option(
        32, "How many times an aborted completion is resumed before it is kept as it is.", "--max-resumes"
    )
    retry_grace: float = 2.0
    """Seconds that a call continues after its client disconnected, so that a retry can join it. 0 aborts it at once."""


class InFlightCounter:
    """Counts calls or requests in flight, and can wait until there are none. Use it on one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        """Set while nothing is in flight."""
        self._idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()

    async def idle(self, seconds: float) -> bool:
        """Wait at most `seconds` until no request is in flight. Return whether none is in flight."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return not self.count


class CallsPerKey:
    """Counts, for each API key, the calls in flight, and the calls and tokens in the current window.

    Windows begin at multiples of their length, in Unix time. Each process has its own counts, which start at 0.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._in_flight: Counter[str] = Counter()
        self._window = 0
        self._calls: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @contextmanager
    def track(self, owner: str) -> Iterator[None]:
        """Count a call as in flight during the `with` block, and in the current window. Raises `LimitReached`."""
        self._begin_window()
        most, per_window = self._limits.calls_per_key, self._limits.calls_per_window
        if most and self._in_flight[owner] >= most:
            raise LimitReached(
                f"{most} calls are in flight with this key, which is the limit; wait for one to end", retry_after=1.0
            )
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
        """Add the tokens of a call that has ended. `ids` contains the ids of its prompt and of each choice."""
        self._begin_window()
        self._tokens[owner] += sum(map(len, ids))

    def _begin_window(self) -> None:
        now = int(time.time() // self._limits.window_seconds)
        # If the clock is set back, stay in the current window.
        if now > self._window:
            self._window = now
            self._calls.clear()
            self._tokens.clear()

    def _spent(self, what: str) -> LimitReached:
        seconds = self._limits.window_seconds
        wait = (self._window + 1) * seconds - time.time()
        return LimitReached(f"this key has used its {what} per {seconds:g} s; retry in {wait:.0f} s", max(wait, 1.0))


_TICK_SECONDS = 0.1
_GRACE_SECONDS = 2.0


class Drain:
    """Drains requests at shutdown. Calls in flight may continue for `seconds`.

    The server calls `begin` and `finish`. The application counts its requests in `requests` and refuses calls after
    `begin`. The socket stays open during the drain, so that health checks are answered.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds = seconds
        self.abort: Callable[[], Awaitable[None]] | None = None
        """Aborts the calls in flight. The application sets it."""
        self.begun = False
        self.requests = InFlightCounter()

    def begin(self) -> None:
        """Refuse calls from now on. It is safe to call in a signal handler."""
        self.begun = True

    def refuse(self) -> None:
        """Raise `GatewayUnavailable` if the drain has begun."""
        if self.begun:
            raise GatewayUnavailable("this gateway is shutting down; send the request again")

    async def finish(self, force: Callable[[], bool]) -> None:
        """Wait until no request is in flight. After `seconds`, or when `force()` is true, abort the remaining calls."""
        deadline = asyncio.get_running_loop().time() + self.seconds
        if self.requests.count and not force():
            _log.info(
                "stopping: waiting up to %g s for %d requests in flight; interrupt again to abort them now",
                self.seconds,
                self.requests.count,
            )
        while self.requests.count and not force() and asyncio.get_running_loop().time() < deadline:
            await self.requests.idle(_TICK_SECONDS)
        if self.requests.count and self.abort is not None:
            await self.abort()
            # Give aborted calls time to send their replies.
            await self.requests.idle(_GRACE_SECONDS)
