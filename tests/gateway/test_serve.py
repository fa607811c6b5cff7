"""Binding, readiness and shutdown of the server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from openai._constants import DEFAULT_CONNECTION_LIMITS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.gateway._deadlines import BODY_SECONDS, HEADER_SECONDS
from tokentape.gateway._serve import _Server, bind, end_signals, running, serve


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", hello)])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "8.8.8.8"])
def test_host_that_others_can_reach_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest, match="no API keys"):
        serve(APP, host=host)


def test_host_that_is_not_an_address_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not an IP address"):
        serve(APP, host="example.org")


def test_running_server_answers_until_it_is_closed() -> None:
    with running(APP, host="localhost") as url:
        assert url.startswith("http://127.0.0.1:")
        assert httpx2.get(url).text == "hello"
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


def test_idle_timeout_exceeds_those_of_clients_and_load_balancers() -> None:
    ours = _Server(APP, HEADER_SECONDS, BODY_SECONDS, None).config.timeout_keep_alive
    assert ours > max(httpx2._config.DEFAULT_LIMITS.keepalive_expiry, DEFAULT_CONNECTION_LIMITS.keepalive_expiry, 60)


def test_running_servers_do_not_share_a_port() -> None:
    with running(APP) as first, running(APP) as other:
        assert first != other


def test_used_port_is_an_os_error() -> None:
    with running(APP) as url, pytest.raises(InvalidRequest, match="is taken"):
        serve(APP, port=int(url.rsplit(":", 1)[1]))


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"port 0 of 192\.0\.2\.1 can't be opened \(Cannot assign"):
        bind("192.0.2.1", 0, has_keys=True)


def test_failed_application_startup_raises() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("no model")

    with pytest.raises(TokentapeError, match="could not start"), running(broken):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_is_ready_when_announced_and_returns_on_a_signal(number: signal.Signals) -> None:
    texts: list[str] = []
    raised: list[int] = []

    def ask(url: str) -> None:
        texts.append(httpx2.get(url).text)
        os.kill(os.getpid(), number)

    before = signal.signal(number, lambda *_: raised.append(number))
    try:
        serve(APP, port=0, on_ready=lambda url: threading.Thread(target=ask, args=(url,)).start())
        assert signal.getsignal(number).__name__ == "<lambda>"
    finally:
        signal.signal(number, before)
    assert texts == ["hello"]
    assert not raised  # for the process the signal has been handled


def test_second_interrupt_does_not_cancel_the_end_of_the_application() -> None:
    ends: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        ends.append("in order")

    async def interrupt(request: Request) -> PlainTextResponse:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return PlainTextResponse("")

    app = Starlette(routes=[Route("/", interrupt)], lifespan=lifespan)
    serve(app, port=0, on_ready=lambda url: threading.Thread(target=httpx2.get, args=(url,)).start())
    assert ends == ["in order"]


def test_hangup_that_nohup_ignores_does_not_end_the_gateway() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in end_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
