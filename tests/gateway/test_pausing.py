from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from tokentape.gateway import _pausing as pausing
from tokentape.store import Store
from tokentape.store._gateways import GateState


class Record:
    """A record on which another gateway pauses just before a heartbeat is written."""

    shared = True
    state = GateState()

    @contextmanager
    def reading_once(self) -> Iterator[None]:
        yield

    async def transact(self, *args: Any, **options: Any) -> None:
        self.state = GateState(position=1, closed=True)


def test_a_gateway_that_returns_stays_closed_if_the_others_paused_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt() -> None: ...

    async def main() -> bool:
        gate, record = pausing.Gate(1.0), Record()
        monkeypatch.setattr(pausing.shared, "gate_state", lambda _: record.state)
        gate.close()
        await pausing.Pausing(gate, cast(Store, record), interrupt)._look()
        return gate.closed

    assert asyncio.run(main())


def test_a_pause_is_not_undone_by_a_resume_that_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt() -> None: ...

    class Slow(Record):
        async def transact(self, work: Any, **options: Any) -> None:
            if work.func is pausing.shared.change_gate:
                self.state = GateState(position=2, closed=True)
            elif work.func is pausing.shared.tell and work.keywords["state"].heard == 1:
                applying.set()
                await asyncio.sleep(0.05)

    async def main() -> bool:
        gate, record = pausing.Gate(1.0), Slow()
        monkeypatch.setattr(pausing.shared, "gate_state", lambda _: record.state)
        monkeypatch.setattr(pausing.shared, "gateways", lambda _: [])
        gateway = pausing.Pausing(gate, cast(Store, record), interrupt)
        async with gateway.together():
            record.state = GateState(position=1)
            await applying.wait()
            await gateway.pause(abort=False, seconds=0)
            await asyncio.sleep(0.1)
            return gate.closed

    applying = asyncio.Event()
    assert asyncio.run(main())
