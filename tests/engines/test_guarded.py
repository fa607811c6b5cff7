"""An engine whose server may switch to another model: when it is checked, and the results of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.engines import fake_vllm
from tests.engines.stand_in import StandIn
from tests.waiting import PATIENCE

from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.engines import _guarded as guarded
from tokentape.engines._base import UNVERIFIED, EngineInfo, SampleDelta, SamplingParams, StartedCompletion
from tokentape.engines._distributions import logprobs_of
from tokentape.engines._guarded import GuardedEngine, ModelCheck
from tokentape.engines._http import HttpClient
from tokentape.engines._pool import EnginePool
from tokentape.engines._vllm import VllmEngine
from tokentape.errors import EngineContractError, EngineError, EngineUnavailable, InvalidRequest
from tokentape.gateway._serve import running
from tokentape.types import TokenDistribution

PROMPT = np.array([3, 4, 5], np.int32)
PARAMS = SamplingParams(max_tokens=3)
OK, OTHER = ModelCheck("ok"), ModelCheck("refused", "it has other ids")


class Looked:
    """A model check with a set result, counted."""

    def __init__(self) -> None:
        self.found = OK
        self.count = 0
        self.hangs = False

    async def look(self, http: HttpClient, info: EngineInfo) -> ModelCheck:
        self.count += 1
        if self.hangs:
            await asyncio.Event().wait()
        await VllmEngine.served_as(http)
        return self.found


class Server(StandIn):
    """A fake server that may end each connection after a reply, and has a `--logprobs-mode`."""

    hangs_up = False
    processed = False
    counts_wrong = False

    def _completion(self, body: dict[str, Any]) -> Response:
        if self.counts_wrong and body["max_tokens"] > 1:
            body = body | {"prompt": [*body["prompt"], 1]}
        if not self.processed or body["top_p"] == 1:
            return super()._completion(body)
        events = fake_vllm.sampled_events(body)
        for event in events[:-1]:
            # Only one id is left, so there are no alternatives.
            logprobs = event["choices"][0]["logprobs"]
            logprobs |= {"token_logprobs": [0.0], "top_logprobs": [{logprobs["tokens"][0]: 0.0}]}
        return fake_vllm.streaming(fake_vllm.sse(events)) if body["stream"] else JSONResponse(fake_vllm.whole(events))

    async def handle(self, request: Request) -> Response:
        response = await super().handle(request)
        if self.hangs_up:
            response.headers["connection"] = "close"
        return response


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(MODEL)


@pytest.fixture
def server(renderer: Renderer) -> Server:
    return Server(renderer)


@pytest.fixture
def looked() -> Looked:
    return Looked()


async def open_engine(url: str, looked: Looked, **options: Any) -> GuardedEngine:
    return await GuardedEngine.open(await VllmEngine.open(url, vocab_size=4000), looked.look, **options)


@asynccontextmanager
async def opened(url: str, looked: Looked, **options: Any) -> AsyncGenerator[GuardedEngine, None]:
    engine = await open_engine(url, looked, **options)
    try:
        yield engine
    finally:
        await engine.close()


async def call(engine: GuardedEngine) -> SampleDelta:
    return [delta async for delta in engine.sample(PROMPT, PARAMS, stream=True, request_id="q")][-1]


def test_server_is_checked_once_while_nothing_changes(server: Server, looked: Looked) -> None:
    async def run() -> None:
        async with opened(url, looked) as engine:
            lasts = [await call(engine) for _ in range(3)]
            assert looked.count == 1
            assert UNVERIFIED not in engine.info.capabilities
            assert {last.engine for last in lasts} == {str(engine.info)}

    with running(server.app) as url:
        asyncio.run(run())


def test_a_server_of_another_model_is_refused(server: Server, looked: Looked) -> None:
    looked.found = OTHER
    with running(server.app) as url, pytest.raises(InvalidRequest, match=r"different model: it has other ids$"):
        asyncio.run(open_engine(url, looked))


@pytest.mark.parametrize(
    ("check", "options"), [(ModelCheck("unverified", "it does not say"), {}), (OTHER, {"refuse": False})]
)
def test_unverified_model_is_marked_in_the_engine_name(
    server: Server, looked: Looked, check: ModelCheck, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    looked.found = check

    async def run() -> None:
        async with opened(url, looked, **options) as engine:
            last = await call(engine)
            assert last.engine is not None
            assert last.engine.split()[-1] == UNVERIFIED

    with running(server.app) as url:
        asyncio.run(run())
    assert check.reason in caplog.text


def test_server_that_does_not_answer_in_time_is_unverified(
    server: Server, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "FIRST_LOOK_SECONDS", 0.05)
    looked.hangs = True

    async def run() -> None:
        async with opened(url, looked) as engine:
            assert UNVERIFIED in engine.info.capabilities
            looked.hangs = False
            monkeypatch.setattr(guarded, "LOOK_SECONDS", PATIENCE)
            # An undetermined mode is tried again before the next completion ends.
            last = await call(engine)
            assert last.engine is not None
            assert UNVERIFIED not in last.engine

    with running(server.app) as url:
        asyncio.run(run())


def test_restarted_server_is_checked_again(server: Server, looked: Looked) -> None:
    async def run() -> None:
        with running(server.app) as url:
            engine = await open_engine(url, looked)
            await call(engine)
        port = int(url.rpartition(":")[2])
        looked.found = OTHER
        with running(server.app, port=port):
            # The first call may notice only when sending that its connection is closed.
            with pytest.raises(EngineUnavailable):
                await call(engine)
            for ask in (call, call, GuardedEngine.check):
                with pytest.raises(EngineUnavailable, match="other ids"):
                    await ask(engine)
            looked.found = OK
            await call(engine)
            await engine.check()
            await engine.close()

    asyncio.run(run())


RAW = logprobs_of("vllm 0.33.0 raw_logprobs", replace(PARAMS, temperature=0.5))
PROCESSED = logprobs_of("vllm 0.33.0 processed_logprobs", replace(PARAMS, temperature=0.5))


async def mode_of_a_call(engine: GuardedEngine) -> TokenDistribution | None:
    last = await call(engine)
    assert last.engine == str(engine.info)
    return logprobs_of(last.engine, replace(PARAMS, temperature=0.5))


def test_restart_in_another_logprobs_mode_is_recorded(
    server: Server, looked: Looked, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        with running(server.app) as url:
            engine = await open_engine(url, looked)
            assert await mode_of_a_call(engine) == RAW
        server.processed = True
        with running(server.app, port=int(url.rpartition(":")[2])):
            with pytest.raises(EngineUnavailable):
                await call(engine)
            assert await mode_of_a_call(engine) == PROCESSED
            await engine.close()

    asyncio.run(run())
    assert "changed from raw_logprobs to processed_logprobs" in caplog.text


def test_logprobs_mode_is_checked_again_with_other_weights(server: Server, looked: Looked) -> None:
    version = "1"

    async def run() -> None:
        nonlocal version
        async with opened(url, looked, weights_now=lambda: version) as engine:
            assert await mode_of_a_call(engine) == RAW
            server.processed = True
            assert await mode_of_a_call(engine) == RAW
            version = "2"
            assert await mode_of_a_call(engine) == PROCESSED

    with running(server.app) as url:
        asyncio.run(run())


def test_mode_that_can_no_longer_be_determined_is_unknown(
    server: Server, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = "1"

    async def fail(engine: VllmEngine) -> str:
        raise EngineError("no")

    async def run() -> None:
        nonlocal version
        async with opened(url, looked, weights_now=lambda: version) as engine:
            assert await mode_of_a_call(engine) == RAW
            monkeypatch.setattr(VllmEngine, "find_logprobs_mode", fail)
            version = "2"
            assert await mode_of_a_call(engine) is None
            monkeypatch.undo()
            assert await mode_of_a_call(engine) == RAW

    with running(server.app) as url:
        asyncio.run(run())


def test_refused_model_stays_refused_if_the_server_fails_other_requests(
    server: Server, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = "1"

    async def fail(engine: VllmEngine) -> str:
        raise InvalidRequest("the engine does not serve m")

    async def run() -> None:
        nonlocal version
        async with opened(url, looked, weights_now=lambda: version) as engine:
            await call(engine)
            monkeypatch.setattr(VllmEngine, "find_logprobs_mode", fail)
            looked.found, version = OTHER, "2"
            with pytest.raises(EngineUnavailable, match="it has other ids"):
                await call(engine)

    with running(server.app) as url:
        asyncio.run(run())


def test_server_restarted_with_options_that_change_the_samples_fails_calls(
    server: Server, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = "1"

    async def fail(engine: VllmEngine) -> str:
        raise EngineContractError("its start options change the samples")

    async def run() -> None:
        nonlocal version
        async with opened(url, looked, refuse=False, weights_now=lambda: version) as engine:
            await call(engine)
            monkeypatch.setattr(VllmEngine, "find_logprobs_mode", fail)
            version = "2"
            for _ in range(2):
                with pytest.raises(EngineContractError, match="start options"):
                    await call(engine)
            monkeypatch.undo()
            await call(engine)

    with running(server.app) as url:
        asyncio.run(run())


def test_restarted_server_is_checked_again_if_its_reply_is_wrong(server: Server, looked: Looked) -> None:
    async def run() -> None:
        with running(server.app) as url:
            engine = await open_engine(url, looked)
            await call(engine)
        server.counts_wrong = True
        with running(server.app, port=int(url.rpartition(":")[2])):
            with pytest.raises(EngineUnavailable):
                await call(engine)
            for _ in range(2):
                with pytest.raises(EngineContractError):
                    await call(engine)
            await engine.close()

    asyncio.run(run())
    assert looked.count == 2


def test_restarted_server_that_must_not_be_used_is_checked_once_per_call(
    server: Server, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def fail(engine: VllmEngine) -> str:
        asked.append(engine)
        raise EngineContractError("its start options change the samples")

    async def run() -> None:
        with running(server.app) as url:
            engine = await open_engine(url, looked)
            await call(engine)
        monkeypatch.setattr(VllmEngine, "find_logprobs_mode", fail)
        with running(server.app, port=int(url.rpartition(":")[2])):
            with pytest.raises(EngineUnavailable):
                await call(engine)
            for _ in range(2):
                with pytest.raises(EngineContractError, match="start options"):
                    await call(engine)
            await engine.close()

    asyncio.run(run())
    assert len(asked) == 2


def test_new_connections_beside_live_ones_are_no_restart(server: Server, looked: Looked) -> None:
    async def run() -> None:
        async with opened(url, looked) as engine:
            await asyncio.gather(*(call(engine) for _ in range(8)))

    with running(server.app) as url:
        asyncio.run(run())
    assert looked.count == 1


def test_server_without_kept_connections_is_checked_each_time(server: Server, looked: Looked) -> None:
    server.hangs_up = True

    async def run() -> None:
        async with opened(url, looked) as engine:
            await call(engine)
            await call(engine)

    with running(server.app) as url:
        asyncio.run(run())
    assert looked.count == 3


async def call_with_version(server: Server, engine: GuardedEngine, version: str) -> None:
    server.weight_version = version
    await call(engine)


def test_new_weights_are_checked_before_their_first_completion_ends(server: Server, looked: Looked) -> None:
    async def run() -> None:
        async with opened(url, looked) as engine:
            await call_with_version(server, engine, "1")
            await call_with_version(server, engine, "1")
            assert looked.count == 1
            looked.found = OTHER
            with pytest.raises(EngineUnavailable, match="other ids"):
                await call_with_version(server, engine, "2")

    with running(server.app) as url:
        asyncio.run(run())


def test_weights_named_only_by_the_trainer_are_checked(server: Server, looked: Looked) -> None:
    version: list[str | None] = [None]

    async def run() -> None:
        async with opened(url, looked, weights_now=lambda: version[0]) as engine:
            await call(engine)
            version[0] = "1"
            await call(engine)
            await call(engine)

    with running(server.app) as url:
        asyncio.run(run())
    assert looked.count == 2


async def checked(engine: GuardedEngine) -> None:
    await engine.check()


async def called(engine: GuardedEngine) -> None:
    await call(engine)


@pytest.mark.parametrize("ask", [checked, called])
def test_server_with_changed_model_names_is_checked(
    server: Server,
    looked: Looked,
    ask: Callable[[GuardedEngine], Coroutine[None, None, None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guarded, "NAMES_SECONDS", 0.0)

    async def run() -> None:
        async with opened(url, looked) as engine:
            await ask(engine)
            assert looked.count == 1
            server.root, looked.found = "/models/other", OTHER
            with pytest.raises(EngineError, match="other ids"):
                await ask(engine)

    with running(server.app) as url:
        asyncio.run(run())


def test_calls_that_end_together_share_a_check(server: Server, looked: Looked) -> None:
    server.weight_version = "1"

    async def run() -> None:
        async with opened(url, looked) as engine:
            await call(engine)
            server.weight_version = "2"
            await asyncio.gather(*(call(engine) for _ in range(8)))

    with running(server.app) as url:
        asyncio.run(run())
    assert looked.count == 2


def test_unread_call_is_closed_with_its_deltas(server: Server, looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def sampled() -> AsyncGenerator[SampleDelta, None]:
        try:
            yield SampleDelta((), ())
            yield SampleDelta((), ())
        finally:
            ended.append(True)

    async def begin() -> StartedCompletion:
        deltas = sampled()
        await anext(deltas)
        return StartedCompletion(PROMPT, deltas)

    async def run() -> None:
        async with opened(url, looked) as engine:
            monkeypatch.setattr(engine._engine, "begin", begin, raising=False)
            call = await engine.begin()
            await call.deltas.aclose()
            assert ended == [True]

    with running(server.app) as url:
        asyncio.run(run())


def test_pool_with_a_replica_of_another_model_does_not_open(server: Server, looked: Looked) -> None:
    mismatched = Looked()
    mismatched.found = OTHER

    with running(server.app) as url, pytest.raises(InvalidRequest, match="other ids"):
        asyncio.run(EnginePool.open({"a": lambda: open_engine(url, looked), "b": lambda: open_engine(url, mismatched)}))


def test_pool_with_an_unverified_replica_is_marked(server: Server, looked: Looked) -> None:
    silent = Looked()
    silent.found = ModelCheck("unverified")

    async def run() -> None:
        pool = await EnginePool.open({"a": lambda: open_engine(url, looked), "b": lambda: open_engine(url, silent)})
        assert UNVERIFIED in pool.info.capabilities
        names = set()
        for session in range(16):
            params = SamplingParams(max_tokens=3, session_id=f"s{session}")
            deltas = [delta async for delta in pool.sample(PROMPT, params, stream=True, request_id="q")]
            names.add(UNVERIFIED in str(deltas[-1].engine))
        assert names == {True, False}
        await pool.close()

    with running(server.app) as url:
        asyncio.run(run())
