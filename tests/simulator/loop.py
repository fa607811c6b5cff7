"""An event loop with virtual time: one seed decides how long each operation takes, and nothing really waits."""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

EPOCH = 1_800_000_000.0
"""Unix time at the beginning."""

DELAYS = (0.0, 0.0, 0.0, 0.001, 0.001, 0.002, 0.005, 0.01, 0.05, 0.3)
"""Seconds that a step outside of the loop takes. Few different ones, so that things often happen at the same time."""


class Deadlock(AssertionError):
    """Everything waits, and nothing will ever happen."""


class _Selector:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing is scheduled, and the run is not over")
        self._loop.now += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Callbacks run in the order of their registration, as asyncio promises; what is random is how long things take.

    `before_step` is called before each pass over the ready callbacks: there a process can be killed. Threads are none:
    their work is done in one piece, some time later.
    """

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.now = 0.0
        self.rng = rng
        self.steps = 0
        self.before_step: Callable[[], None] = lambda: None
        self._selector = _Selector(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def delay(self) -> float:
        """Return how long the next step outside of the loop takes."""
        return self.rng.choice(DELAYS)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()

        def run() -> None:
            if done.done():
                return
            try:
                done.set_result(func(*args))
            except BaseException as error:
                done.set_exception(error)

        self.call_later(self.delay(), run, context=contextvars.Context())
        return done

    def _run_once(self) -> None:
        self.steps += 1
        self.before_step()
        super()._run_once()  # type: ignore[misc]

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


@contextmanager
def running(rng: Random) -> Iterator[VirtualLoop]:
    """Yield a loop. Meanwhile it provides the clocks, and `rng` provides all randomness."""
    loop = VirtualLoop(rng)
    kept = time.time, time.monotonic, secrets.token_hex
    time.time, time.monotonic = (lambda: EPOCH + loop.now), (lambda: loop.now)
    secrets.token_hex = lambda nbytes=32: rng.randbytes(nbytes or 32).hex()
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        time.time, time.monotonic, secrets.token_hex = kept
        asyncio.set_event_loop(None)
        loop.close()
