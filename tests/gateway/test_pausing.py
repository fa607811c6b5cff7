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
