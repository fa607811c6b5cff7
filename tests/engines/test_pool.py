from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from tests.waiting import until

from tokentape.engines._base import DISTRIBUTION, EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._pool import EnginePool
from tokentape.errors import EngineContractError, EngineUnavailable, InvalidRequest
from tokentape.types import TokenIds

INFO = EngineInfo("fake", "1", "m", 100, 1000, "raw_logprobs", DISTRIBUTION)
PROMPT = np.array([1, 2], np.int32)


class Replica:
    """A replica that counts its calls and fails on demand."""

    def __init__(self, info: EngineInfo = INFO) -> None:
        self.info = info
        self.calls = 0
        self.error: Exception | None = None
        self.fail_after = 0
        self.closed = 0
        self.opened = 0
        self.down = False
        self.asked: list[SamplingParams] = []

    async def open(self) -> Replica:
        if self.down:
            raise EngineUnavailable("connection refused")
        self.opened += 1
        return self

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        self.calls += 1
        self.asked.append(params)
        for at in range(3):
            if self.error is not None and at == self.fail_after:
                raise self.error
            yield SampleDelta((at,), (-1.0,), "length" if at == 2 else None)

    async def check(self) -> None:
        if self.down:
            raise EngineUnavailable("connection refused")

    async def close(self) -> None:
        self.closed += 1


async def opened(*replicas: Replica, recheck_seconds: float = 60.0) -> EnginePool:
    return await EnginePool.open(
        {f"r{n}": replica.open for n, replica in enumerate(replicas)}, recheck_seconds=recheck_seconds
    )


async def until_available(pool: EnginePool, *names: str) -> None:
    await asyncio.to_thread(until, lambda: all(pool.available[name] for name in names))


async def call(pool: EnginePool, session_id: str | None) -> list[SampleDelta]:
    params = SamplingParams(max_tokens=3, session_id=session_id)
    return [delta async for delta in pool.sample(PROMPT, params, stream=True, request_id="q")]


def test_a_session_stays_on_its_replica_and_sessions_spread() -> None:
    async def run() -> None:
        replicas = [Replica() for _ in range(3)]
        pool = await opened(*replicas)
        homes: Counter[int] = Counter()
        for session in range(60):
            before = [replica.calls for replica in replicas]
            for _ in range(3):
                await call(pool, f"s{session}")
            gained = [replica.calls - old for replica, old in zip(replicas, before, strict=True)]
            assert sorted(gained) == [0, 0, 3]
            homes[gained.index(3)] += 1
        assert min(homes.values()) > 5
        await pool.close()

    asyncio.run(run())


def test_only_sessions_of_a_failing_replica_move() -> None:
    async def run() -> None:
        replicas = [Replica() for _ in range(3)]
        pool = await opened(*replicas)

        async def homes() -> list[int]:
            serving = []
            for session in range(30):
                before = [replica.calls for replica in replicas]
                await call(pool, f"s{session}")
                # A replica that fails has also been called.
                gained = [replica.calls - old for replica, old in zip(replicas, before, strict=True)]
                serving.append(max(n for n, replica in enumerate(replicas) if gained[n] and replica.error is None))
            return serving

        first = await homes()
        replicas[1].error = EngineUnavailable("gone")
        second = await homes()
        assert [new for old, new in zip(first, second, strict=True) if old != 1] == [old for old in first if old != 1]
        assert 1 not in second
        await pool.close()

    asyncio.run(run())


def test_a_call_that_fails_before_its_first_token_is_served_by_another_replica() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        for replica in replicas:
            replica.error = EngineUnavailable("gone")
        pool = await opened(*replicas)
        with pytest.raises(EngineUnavailable):
            await call(pool, "s")
        assert [replica.calls for replica in replicas] == [1, 1]
        assert pool.available == {"r0": False, "r1": False}
        with pytest.raises(EngineUnavailable, match="no replica"):
            await call(pool, "s")
        await pool.close()

    asyncio.run(run())


def test_call_that_fails_midway_is_left_to_the_caller_to_repeat() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        for replica in replicas:
            replica.error, replica.fail_after = EngineUnavailable("gone"), 1
        pool = await opened(*replicas)
        with pytest.raises(EngineUnavailable, match="gone"):
            await call(pool, "s")
        assert sum(replica.calls for replica in replicas) == 1
        await pool.close()

    asyncio.run(run())


def test_contract_error_is_not_retried_on_another_replica() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        for replica in replicas:
            replica.error = EngineContractError("ids are missing")
        pool = await opened(*replicas)
        with pytest.raises(EngineContractError):
            await call(pool, "s")
        assert all(pool.available.values())
        await pool.close()

    asyncio.run(run())


def test_recovered_replica_gets_its_sessions_again() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        pool = await opened(*replicas, recheck_seconds=0.01)
        for replica in replicas:
            replica.down, replica.error = True, EngineUnavailable("gone")
        with pytest.raises(EngineUnavailable):
            await call(pool, "s")
        for replica in replicas:
            replica.down, replica.error, replica.info = False, None, replace(INFO, version="2")
        await until_available(pool, "r0", "r1")
        deltas = await call(pool, "s")
        assert {delta.engine for delta in deltas} == {"fake 2 raw_logprobs"}
        assert [replica.opened for replica in replicas] == [2, 2]
        await pool.close()

    asyncio.run(run())


def test_replica_that_returns_with_another_model_stays_out() -> None:
    async def run() -> None:
        good, other = Replica(), Replica()
        pool = await opened(good, other, recheck_seconds=0.01)
        other.error = good.error = EngineUnavailable("gone")
        with pytest.raises(EngineUnavailable):
            await call(pool, "s")
        other.error, other.info = None, replace(INFO, model="another")
        good.error = None
        await until_available(pool, "r0")
        await asyncio.sleep(0.05)
        assert pool.available == {"r0": True, "r1": False}
        await pool.close()

    asyncio.run(run())


def test_pool_opens_with_a_single_reachable_replica() -> None:
    async def run() -> None:
        down, up = Replica(), Replica()
        down.down = True
        pool = await opened(down, up)
        assert pool.available == {"r0": False, "r1": True}
        assert len(await call(pool, "s")) == 3
        await pool.check()
        await pool.close()
        assert (down.closed, up.closed) == (0, 1)

    asyncio.run(run())


def test_opening_without_a_reachable_replica_fails_with_the_reason() -> None:
    down = Replica()
    down.down = True
    with pytest.raises(EngineUnavailable, match="refused"):
        asyncio.run(opened(down, down))
    with pytest.raises(InvalidRequest, match="at least one"):
        asyncio.run(opened())


@pytest.mark.parametrize("field", ["model", "vocab_size", "logprobs_mode", "name"])
def test_replicas_that_differ_are_refused_and_closed(field: str) -> None:
    first, other = Replica(), Replica(replace(INFO, **{field: 7}))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=field):
        asyncio.run(opened(first, other))
    assert (first.closed, other.closed) == (1, 1)


def test_pool_accepts_parameters_that_all_replicas_accept() -> None:
    small = Replica(replace(INFO, max_context=10, late_stops=64, early_stops=True, sampling=DISTRIBUTION - {"seed"}))
    pool = asyncio.run(opened(Replica(), small))
    assert pool.info.max_context == 10
    assert (pool.info.late_stops, pool.info.early_stops) == (64, True)
    assert pool.info.sampling == (DISTRIBUTION - {"seed"}) | {"session_id"}


def test_replica_without_sessions_gets_no_session_calls() -> None:
    plain, routing = Replica(), Replica(replace(INFO, sampling=DISTRIBUTION | {"session_id"}))

    async def run() -> None:
        pool = await opened(plain, routing)
        for session in range(20):
            await call(pool, f"s{session}")
        await pool.close()

    asyncio.run(run())
    assert {params.session_id for params in plain.asked} == {None}
    assert None not in {params.session_id for params in routing.asked}


def test_a_failed_replica_is_closed_once_when_its_last_call_has_ended() -> None:
    async def run() -> None:
        replica = Replica()
        pool = await opened(replica)
        params = SamplingParams(max_tokens=3, session_id="s")
        async with aclosing(pool.sample(PROMPT, params, stream=True, request_id="a")) as slow:
            await anext(slow)
            replica.error = EngineUnavailable("gone")
            with pytest.raises(EngineUnavailable):
                await call(pool, "s")
            assert replica.closed == 0
        assert replica.closed == 1
        await pool.close()
        assert replica.closed == 1

    asyncio.run(run())
