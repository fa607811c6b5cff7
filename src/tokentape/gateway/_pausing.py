"""Pause and resume sampling on all gateways that share a record, through a request to any of them.

Each gateway polls the record for the newest gate change, applies it and acknowledges it. The gateway that got the
request to pause waits until every other gateway has acknowledged the change and has no call in flight. A gateway that
can't write its heartbeat closes its own gate and interrupts its calls before the others consider it dead.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from tokentape.errors import EngineUnavailable, StoreError, StoreUnavailable
from tokentape.gateway._limits import InFlightCounter
from tokentape.store import Store
from tokentape.store import _gateways as shared
from tokentape.store._gateways import GateState, GatewayState

_T = TypeVar("_T")

_log = logging.getLogger("tokentape.gateway")

TICK_SECONDS = 0.25
BEAT_SECONDS = 2.0
ALONE_SECONDS = 8.0
"""A gateway that has not written its heartbeat for this long closes its own gate."""
DEAD_SECONDS = 12.0
"""A gateway without a heartbeat for this long is considered dead, and the others don't wait for it."""


class Gate:
    """Lets calls pass while open. While closed, calls wait for at most `patience` seconds. Use it on one event loop.

    A trainer closes it to update weights, so that rollouts wait instead of failing, and opens it with the new weight
    version. A version that the engine reports takes precedence.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._open = asyncio.Event()
        self._open.set()
        self._interrupts: dict[object, Callable[[], None]] = {}
        self.calls = InFlightCounter()
        """Counts the calls that have passed and are still running."""
        self.weight_version: str | None = None
        """The current weight version, if a trainer has set it."""
        self.reported = False
        """Whether an engine has reported a version since `weight_version` was set."""
        self.adapter_versions: Mapping[str, str] = {}
        """The current version of each adapter for which a trainer has set one."""

    @property
    def closed(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        self._open.clear()

    def open(self, weight_version: str | None = None, adapter: str | None = None) -> None:
        """Let calls pass again. `weight_version` is the new weight version; None keeps the current version.

        With `adapter` it is that adapter's version.
        """
        if weight_version is not None and adapter is not None:
            self.adapter_versions = {**self.adapter_versions, adapter: weight_version}
        elif weight_version is not None:
            self.weight_version, self.reported = weight_version, False
        self._open.set()

    def version_of(self, adapter: str | None) -> str | None:
        """Return the weight version that a call with this adapter is sampled with, if a trainer has set it."""
        return self.adapter_versions.get(adapter or "", self.weight_version)

    @contextmanager
    def passed(self, interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Count a call that has passed the gate as in flight. `interrupt` is called to end the call early."""
        token = object()
        self._interrupts[token] = interrupt
        try:
            with self.calls:
                yield
        finally:
            del self._interrupts[token]

    def interrupt(self) -> None:
        for interrupt in list(self._interrupts.values()):
            interrupt()

    async def opened(self) -> None:
        """Wait until the gate is open. Raises `EngineUnavailable` if it stays closed."""
        if not self.closed:
            return
        try:
            async with asyncio.timeout(self._patience):
                while self.closed:
                    await self._open.wait()
        except TimeoutError:
            error = EngineUnavailable(
                f"sampling is paused, and the call waited {self._patience:g} s; send it again later"
            )
            error.retry_after = 5.0
            raise error from None


class Pausing:
    """Closes and opens `gate`, and the gates of all other gateways if the store is shared.

    `interrupt_all` interrupts this gateway's engine calls in flight.
    """

    def __init__(self, gate: Gate, store: Store, interrupt_all: Callable[[], Awaitable[None]]) -> None:
        self._gate = gate
        self._store = store
        self._interrupt_all = interrupt_all
        self._own = GatewayState(uuid.uuid4().hex, beat=0, heard=0, under_way=0)
        self._beat_at = 0.0
        self._alone = False
        self._failure: StoreError | None = None
        self._lock = asyncio.Lock()
        """Held while a pause or a look changes the gate, so that a look does not apply an older state after a pause."""

    @property
    def gateway_id(self) -> str:
        return self._own.gateway_id

    def check(self) -> None:
        """Raise `StoreError` if the newest attempt to read or write a shared record failed or has not ended in time."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    async def pause(self, *, abort: bool, seconds: float) -> bool:
        """Close the gates, and wait up to `seconds` for calls in flight. Return whether all have ended.

        With `abort` the calls in flight are interrupted.
        """
        until = time.monotonic() + seconds
        async with self._lock:
            await self._store.transact(partial(shared.change_gate, closed=True, abort=abort))
            self._gate.close()
        if abort:
            await self._interrupt_all()
        idle = await self._gate.calls.idle(seconds)
        return await self._others_idle(until) and idle if self._store.shared else idle

    async def resume(self, weight_version: str | None, adapter: str | None = None) -> None:
        """Open the gates; see `Gate.open`. The record keeps the version for gateways that start later."""
        change = partial(shared.change_gate, closed=False, weight_version=weight_version, adapter=adapter)
        await self._store.transact(change)
        self._gate.open(weight_version, adapter)

    async def in_flight_elsewhere(self) -> tuple[int, int]:
        """Return the number of other gateways on the record, and of their calls in flight."""
        if not self._store.shared:
            return 0, 0
        gateways = await self._others()
        return len(gateways), sum(gateway.under_way for gateway in gateways)

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Apply gate changes by other gateways on the record, and write heartbeats, during the `with` block.

        A gateway alone only takes the weight versions from the record, and an earlier pause that was not resumed.
        """
        if not self._store.shared:
            state = await self._read(shared.gate_state)
            self._open(state)
            if state.closed:
                self._gate.close()
                _log.warning("sampling is still paused, as before the restart; calls wait for POST /engine/resume")
            yield
            return
        await self._look()
        ended = asyncio.Event()
        tasks = asyncio.create_task(self._look_until(ended)), asyncio.create_task(self._stop_if_alone(ended))
        try:
            yield
        finally:
            # Don't cancel the tasks, because a read in a thread must end before the store is closed.
            ended.set()
            await asyncio.gather(*tasks)
            with suppress(StoreError):
                await self._store.transact(partial(shared.leave, gateway_id=self._own.gateway_id))

    async def _look_until(self, ended: asyncio.Event) -> None:
        async for _ in _ticks(ended):
            try:
                async with self._lock:
                    await self._look()
                self._failure = None
            except StoreError as error:
                self._failure = error

    async def _stop_if_alone(self, ended: asyncio.Event) -> None:
        """Stop sampling if the heartbeat is late. Another task, because a write to a database can hang."""
        async for _ in _ticks(ended):
            if not self._alone and self._late:
                self._failure = self._failure or StoreUnavailable(f"the record did not answer for {ALONE_SECONDS:g} s")
                _log.error("no heartbeat was recorded (%s); calls wait until the record answers", self._failure)
                self._alone = True
                self._gate.close()
                await self._interrupt_all()

    @property
    def _late(self) -> bool:
        return time.monotonic() - self._beat_at > ALONE_SECONDS

    async def _look(self) -> None:
        """Apply and acknowledge the newest gate change."""
        state = await self._read(shared.gate_state)
        news, returning = state.position != self._own.heard, self._alone or self._late
        if state.closed and (news or returning):
            self._gate.close()
            if state.abort and news:
                await self._interrupt_all()
        now = time.monotonic()
        under_way = self._gate.calls.count
        changed = news or (state.closed and under_way != self._own.under_way)
        if changed or now - self._beat_at > BEAT_SECONDS:
            beat = GatewayState(self._own.gateway_id, self._own.beat + 1, state.position, under_way)
            await self._store.transact(partial(shared.tell, state=beat), claims=frozenset())
            self._own, self._beat_at = beat, now
        # Read and open after the heartbeat, because without one the others don't wait for this gateway's calls.
        if returning and (await self._read(shared.gate_state)).position != state.position:
            # The others did not wait for this gateway. The next look applies the change.
            self._gate.close()
            await self._interrupt_all()
            return
        if not state.closed and (news or returning):
            self._open(state)
        if returning:
            self._alone = False

    def _open(self, state: GateState) -> None:
        self._gate.adapter_versions = state.adapter_versions
        self._gate.open(state.weight_version)

    async def _others_idle(self, until: float) -> bool:
        """Wait until every other gateway has applied the newest gate change and is idle. Return False after `until`."""
        newest = (await self._read(shared.gate_state)).position
        seen: dict[str, tuple[int, float]] = {}
        while True:
            now = time.monotonic()
            busy = False
            for gateway in await self._others():
                beat, since = seen.get(gateway.gateway_id, (gateway.beat, now))
                seen[gateway.gateway_id] = (gateway.beat, now if gateway.beat != beat else since)
                if now - seen[gateway.gateway_id][1] > DEAD_SECONDS:
                    _log.warning("another gateway wrote no heartbeat for %g s; it is considered dead", DEAD_SECONDS)
                    await self._store.transact(partial(shared.leave, gateway_id=gateway.gateway_id, beat=gateway.beat))
                elif gateway.heard < newest or gateway.under_way:
                    busy = True
            if not busy or now > until:
                return not busy
            await asyncio.sleep(TICK_SECONDS)

    async def _others(self) -> list[GatewayState]:
        gateways = await self._read(shared.gateways)
        return [gateway for gateway in gateways if gateway.gateway_id != self._own.gateway_id]

    async def _read(self, read: Callable[[Connection], _T]) -> _T:
        def look() -> _T:
            with self._store.reading_once() as connection:
                return read(connection)

        return await asyncio.to_thread(look)


async def _ticks(ended: asyncio.Event) -> AsyncIterator[None]:
    """Yield every `TICK_SECONDS` until the event is set."""
    while not ended.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), TICK_SECONDS)
            return
        yield
