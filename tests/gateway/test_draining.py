"""How a gateway stops while calls are running: in this process, and with SIGTERM in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Drain
from tokentape.gateway._serve import running, serve
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

CHAT = "/sessions/s/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def test_shutdown_waits_only_for_running_calls() -> None:
    async def run() -> None:
        drain = Drain(3600)
        ended = asyncio.Event()

        async def work() -> None:
            with drain.requests:
                await ended.wait()

        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        ending = asyncio.create_task(drain.finish(lambda: False))
        await asyncio.wait([ending], timeout=0.3)
        assert not ending.done()
        ended.set()
        await ending
        assert working.done()

    asyncio.run(run())


@pytest.mark.parametrize(("seconds", "force"), [(0.1, False), (3600, True)])
def test_calls_still_running_at_the_deadline_are_aborted(
    seconds: float, force: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tokentape.serve")

    async def run() -> None:
        drain = Drain(seconds)
        aborted = asyncio.Event()

        async def abort() -> None:
            aborted.set()

        async def work() -> None:
            with drain.requests:
                await aborted.wait()

        drain.abort = abort
        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        await drain.finish(lambda: force)
        assert working.done()

    asyncio.run(run())
    message = "stopping: waiting up to 0.1 s for 1 requests in flight; interrupt again to abort them now"
    assert caplog.messages == ([] if force else [message])


def test_stopping_gateway_refuses_calls_with_an_error(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["first reply", "never"], stall_after=1)
    drain = Drain()
    with (
        running(create_app(Turns(engine, renderer, store), model_id="m", drain=drain)) as url,
        httpx2.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as begun,
    ):
        assert engine.stalled.wait(PATIENCE)
        assert httpx2.get(f"{url}/readyz").status_code == 200
        drain.begin()
        ready, alive, call = (
            httpx2.get(f"{url}/readyz"),
            httpx2.get(f"{url}/healthz"),
            httpx2.post(url + CHAT, json=HELLO),
        )
        assert begun.status_code == 200
    assert (ready.status_code, alive.status_code, call.status_code) == (503, 200, 503)
    assert call.json()["error"]["code"] == "gateway_unavailable"
    assert call.headers["x-should-retry"] == "true"
    assert len(engine.requests) == 1


def serve_and_signal(engine: ScriptedEngine, renderer: Renderer, store: SqliteStore, seconds: float) -> httpx2.Response:
    """Serve in this thread; a client of another begins a call, which stalls, and then the signal comes."""
    drain = Drain(seconds)
    url: list[str] = []
    ready = threading.Event()

    def client() -> httpx2.Response:
        ready.wait(PATIENCE)
        return httpx2.post(url[0] + CHAT, json=HELLO, timeout=PATIENCE)

    def killer() -> None:
        engine.stalled.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(base_url: str) -> None:
        url.append(base_url)
        ready.set()

    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(client)
        pool.submit(killer)
        app = create_app(Turns(engine, renderer, store), model_id="m", drain=drain)
        serve(app, port=0, on_ready=on_ready, drain=drain)
        return answer.result(PATIENCE)


def test_call_over_the_deadline_is_recorded_as_aborted_and_gets_an_error(
    renderer: Renderer, store: SqliteStore, tmp_path: object
) -> None:
    engine = ScriptedEngine(renderer, ["one two three"], stall_after=2)
    answer = serve_and_signal(engine, renderer, store, seconds=0.3)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert engine.closed
    with SqliteStore.open(f"{tmp_path}/data", read_only=True) as record:
        (turn,) = record.load_session("s").turns
    assert (turn.finish_reason, turn.abort_cause, len(turn.completion_ids)) == ("abort", "shutdown", 2)
