"""Pause and resume sampling on every gateway over a record, asked of one of them.

Each gateway polls the record for the newest change of the gate, applies it and acknowledges it. The gateway that paused
waits until every other one has acknowledged it and has no call in flight. A gateway that can't write its heartbeat
closes its own gate before the others take it for dead.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from tokentape.errors import EngineUnavailable, StoreError
from tokentape.gateway._limits import InFlightCounter
from tokentape.store import Store
from tokentape.store import _gateways as shared
from tokentape.store._gateways import GatewayState

_T = TypeVar("_T")

_log = logging.getLogger("tokentape.gateway")

TICK_SECONDS = 0.25
BEAT_SECONDS = 2.0
ALONE_SECONDS = 8.0
"""A gateway without a heartbeat for so long lets no call pass."""
DEAD_SECONDS = 12.0
"""The others don't wait for a gateway without a heartbeat for so long."""


class Gate:
    """Calls pass while it is open and wait while it is closed, `patience` seconds at most. For one event loop.

    A trainer that updates weights closes it, so that rollouts wait instead of failing, and opens it with the new
    version's name. A version that the engine itself reports takes precedence.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._open = asyncio.Event()
        self._open.set()
        self._interrupts: dict[object, Callable[[], None]] = {}
        self.calls = InFlightCounter()
        """Calls that have passed and are not over."""
        self.weight_version: str | None = None
        """The weights that sample now, if a trainer named them."""

    @property
    def closed(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        self._open.clear()

    def open(self, weight_version: str | None = None) -> None:
        """Let calls pass again; `weight_version` names the weights that sample from now on."""
        if weight_version is not None:
            self.weight_version = weight_version
        self._open.set()

    @asynccontextmanager
    async def passing(self, interrupt: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Pass, and be in flight as long as the context lasts. `interrupt` is called if the call has to end early.

        Raises `EngineUnavailable` if the gate stays closed.
        """
        await self.opened()
        token = object()
        self._interrupts[token] = interrupt
        try:
            with self.calls.track():
                yield
        finally:
            del self._interrupts[token]

    def interrupt(self) -> None:
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


class Pausing:
    """Closes and opens `gate` together with the gates of the other gateways, where the store is shared.

    `interrupt_all` ends the calls of the engine that are in flight here.
    """

    def __init__(self, gate: Gate, store: Store, interrupt_all: Callable[[], Awaitable[None]]) -> None:
        self._gate = gate
        self._store = store
        self._interrupt_all = interrupt_all
        self._own = GatewayState(uuid.uuid4().hex, beat=0, heard=0, under_way=0)
        self._beat_at = 0.0
        self._alone = False

    async def pause(self, *, abort: bool, seconds: float) -> bool:
        """Let no more calls pass, and wait up to `seconds` for those in flight; return whether none is left."""
        until = time.monotonic() + seconds
        if self._store.shared:
            await self._store.transact(partial(shared.change_gate, closed=True, abort=abort))
        self._gate.close()
        if abort:
            await self._interrupt_all()
        idle = await self._gate.calls.idle(seconds)
        return await self._others_idle(until) and idle if self._store.shared else idle

    async def resume(self, weight_version: str | None) -> None:
        """Let calls pass again; `weight_version` names the weights that sample from now on."""
        if self._store.shared:
            change = partial(shared.change_gate, closed=False, weight_version=weight_version)
            await self._store.transact(change)
        self._gate.open(weight_version)

    async def in_flight_elsewhere(self) -> tuple[int, int]:
        """Return the number of other gateways over the record, and of the calls that they have in flight."""
        if not self._store.shared:
            return 0, 0
        others = await self._others()
        return len(others), sum(one.under_way for one in others)

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """While this context is open, pause and resume together with all gateways that use the same record."""
        if not self._store.shared:
            yield
            return
        await self._look()
        ended = asyncio.Event()
        looking = asyncio.create_task(self._look_until(ended))
        try:
            yield
        finally:
            # Not cancelled: a read in a thread has to end before the store is closed.
            ended.set()
            await looking
            with suppress(StoreError):
                await self._store.transact(partial(shared.leave, gateway_id=self._own.gateway_id))

    async def _look_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), TICK_SECONDS)
                return
            try:
                await self._look()
            except StoreError as error:
                if not self._alone and time.monotonic() - self._beat_at > ALONE_SECONDS:
                    _log.error("the gateways can't hear of each other (%s): no call passes until they do", error.code)
                    self._alone = True
                    self._gate.close()

    async def _look(self) -> None:
        """Apply the newest change of the gate, and acknowledge it."""
        state = await self._read(shared.gate_state)
        late = time.monotonic() - self._beat_at > ALONE_SECONDS
        if state.position != self._own.heard or self._alone or late:
            if state.closed:
                self._gate.close()
                if state.abort and state.position != self._own.heard:
                    await self._interrupt_all()
            else:
                self._gate.open(state.weight_version)
            self._alone = False
        now = time.monotonic()
        under_way = self._gate.calls.count
        changed = state.position != self._own.heard or (state.closed and under_way != self._own.under_way)
        if changed or now - self._beat_at > BEAT_SECONDS:
            own = GatewayState(self._own.gateway_id, self._own.beat + 1, state.position, under_way)
            await self._store.transact(partial(shared.tell, state=own), claims=frozenset())
            self._own, self._beat_at = own, now

    async def _others_idle(self, until: float) -> bool:
        """Wait until every other gateway has applied the newest change and is idle; False if it takes longer."""
        newest = (await self._read(shared.gate_state)).position
        seen: dict[str, tuple[int, float]] = {}
        while True:
            now = time.monotonic()
            busy = False
            for one in await self._others():
                beat, since = seen.get(one.gateway_id, (one.beat, now))
                seen[one.gateway_id] = (one.beat, now if one.beat != beat else since)
                if now - seen[one.gateway_id][1] > DEAD_SECONDS:
                    _log.warning("another gateway has not been heard of for %g s: it is taken for dead", DEAD_SECONDS)
                    await self._store.transact(partial(shared.leave, gateway_id=one.gateway_id, beat=one.beat))
                elif one.heard < newest or one.under_way:
                    busy = True
            if not busy or now > until:
                return not busy
            await asyncio.sleep(TICK_SECONDS)

    async def _others(self) -> list[GatewayState]:
        found = await self._read(shared.gateways)
        return [one for one in found if one.gateway_id != self._own.gateway_id]

    async def _read(self, read: Callable[[Connection], _T]) -> _T:
        def look() -> _T:
            with self._store.reading_once() as connection:
                return read(connection)

        return await asyncio.to_thread(look)
