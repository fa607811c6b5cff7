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
from tokentape.errors import EngineContractError, EngineError, EngineUnavailable, InvalidRequest
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
        self.silent: asyncio.Event | None = None
        """Opening waits for it."""
        self.closing: asyncio.Event | None = None
        """Closing waits for it."""
        self.interrupted: list[str] = []
        self.asked: list[SamplingParams] = []

    async def open(self) -> Replica:
        if self.silent is not None:
            await self.silent.wait()
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

    def interrupt(self, request_id: str) -> bool:
        self.interrupted.append(request_id)
        return True

    async def close(self) -> None:
        if self.closing is not None:
            await self.closing.wait()
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


def paused_error() -> EngineUnavailable:
    error = EngineUnavailable("503")
    error.paused = True
    return error


@pytest.mark.parametrize("first", [0, 1])
def test_a_paused_replica_can_be_waited_for_wherever_a_dead_one_is(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        paused, dead = replicas = Replica(), Replica()
        order = replicas if first == 0 else replicas[::-1]
        pool = await opened(*order)
        paused.error, dead.error = paused_error(), EngineUnavailable("connection refused")
        monkeypatch.setattr(pool, "_ranked", lambda _: pool._replicas)
        with pytest.raises(EngineUnavailable) as caught:
            await call(pool, "s")
        assert caught.value.paused
        assert (paused.calls, dead.calls) == (1, 1)
        await pool.close()

        async def refuse() -> Replica:
            raise paused_error()

        paused.open, dead.down = refuse, True  # type: ignore[method-assign]
        with pytest.raises(EngineUnavailable) as caught:
            await opened(*order)
        assert caught.value.paused

    asyncio.run(run())


def test_paused_replica_stays_available() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        for replica in replicas:
            replica.error = paused_error()
        pool = await opened(*replicas)
        with pytest.raises(EngineUnavailable) as caught:
            await call(pool, "s")
        assert caught.value.paused
        assert pool.available == {"r0": True, "r1": True}
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


def hopeless() -> EngineError:
    error = EngineError("the engine answered 404")
    error.retry = False
    return error


@pytest.mark.parametrize("error", [InvalidRequest("too long"), hopeless()])
def test_a_call_that_one_replica_refuses_is_served_by_another(error: Exception) -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        replicas[0].error = error
        pool = await opened(*replicas)
        for session in range(10):
            assert len(await call(pool, f"s{session}")) == 3
        assert replicas[0].calls
        assert all(pool.available.values())
        replicas[1].error = error
        with pytest.raises(type(error), match=str(error)):
            await call(pool, "s")
        await pool.close()

    asyncio.run(run())


def test_replica_that_fails_a_call_and_is_not_healthy_gets_no_more_calls() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        pool = await opened(*replicas)
        await call(pool, "s")
        (home,) = (replica for replica in replicas if replica.calls)
        home.error, home.down = EngineError("the engine answered 500"), True
        with pytest.raises(EngineError, match="500"):
            await call(pool, "s")
        assert len(await call(pool, "s")) == 3
        assert sorted(pool.available.values()) == [False, True]
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


def test_replica_returns_while_the_opening_of_another_gets_no_answer() -> None:
    async def run() -> None:
        silent, other = Replica(), Replica()
        pool = await opened(silent, other, recheck_seconds=0.01)
        silent.error = other.error = EngineUnavailable("gone")
        silent.silent = asyncio.Event()
        with pytest.raises(EngineUnavailable):
            await call(pool, "s")
        await until_available(pool, "r1")
        assert pool.available == {"r0": False, "r1": True}
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
    images = Replica(replace(INFO, media=frozenset({"image"})))
    small = Replica(replace(INFO, max_context=10, late_stops=64, early_stops=True, sampling=DISTRIBUTION - {"seed"}))
    pool = asyncio.run(opened(images, small))
    assert pool.info.max_context == 10
    assert (pool.info.late_stops, pool.info.early_stops) == (64, True)
    assert pool.info.sampling == (DISTRIBUTION - {"seed"}) | {"session_id"}
    assert pool.info.media == frozenset()


def test_replica_that_joins_later_changes_how_stops_and_penalties_are_handled() -> None:
    async def run() -> None:
        late, other = Replica(), Replica(replace(INFO, prompt_penalties=frozenset({"repetition_penalty"})))
        late.info, late.down = replace(INFO, late_stops=64, early_stops=True), True
        pool = await opened(late, other, recheck_seconds=0.01)
        assert (pool.info.late_stops, pool.info.early_stops) == (0, False)
        assert pool.info.prompt_penalties
        late.down = False
        await call(pool, "s")
        await until_available(pool, "r0")
        assert (pool.info.late_stops, pool.info.early_stops) == (64, True)
        assert not pool.info.prompt_penalties
        await pool.close()

    asyncio.run(run())


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


def test_interrupt_reaches_a_running_call_of_a_failed_replica() -> None:
    async def run() -> None:
        replica = Replica()
        pool = await opened(replica)
        params = SamplingParams(max_tokens=3, session_id="s")
        async with aclosing(pool.sample(PROMPT, params, stream=True, request_id="a")) as slow:
            await anext(slow)
            replica.error = EngineUnavailable("gone")
            with pytest.raises(EngineUnavailable):
                await call(pool, "s")
            assert pool.interrupt("a")
        assert replica.interrupted == ["a"]
        assert not pool.interrupt("a")
        await pool.close()

    asyncio.run(run())


def test_failed_replica_is_closed_if_its_last_call_is_cancelled() -> None:
    async def run() -> None:
        replica = Replica()
        pool = await opened(replica)
        replica.error, replica.closing = EngineUnavailable("gone"), asyncio.Event()
        failing = asyncio.create_task(call(pool, "s"))
        await asyncio.to_thread(until, lambda: not pool.available["r0"])
        failing.cancel()
        await asyncio.wait([failing])
        replica.closing.set()
        await asyncio.to_thread(until, lambda: replica.closed)
        await pool.close()

    asyncio.run(run())


def test_running_call_is_checked_at_its_own_replica() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        pool = await opened(*replicas)
        for number in range(20):
            params = SamplingParams(max_tokens=3, session_id=f"s{number}")
            before = [replica.calls for replica in replicas]
            async with aclosing(pool.sample(PROMPT, params, stream=True, request_id="a")) as deltas:
                await anext(deltas)
                gained = [replica.calls - old for replica, old in zip(replicas, before, strict=True)]
                home = replicas[gained.index(1)]
                home.info = replace(INFO, version="2")
                assert await pool.check_call("a") == "fake 2 raw_logprobs"
                home.down, home.info = True, INFO
                with pytest.raises(EngineUnavailable):
                    await pool.check_call("a")
                home.down = False
        await pool.close()

    asyncio.run(run())
