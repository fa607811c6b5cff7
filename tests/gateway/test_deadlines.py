"""Clients that send their request slowly, or never."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.waiting import PATIENCE, trickle
from tokentape.gateway import serve
from tokentape.gateway.serve import running

HEADERS = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"


async def slow_echo(request: Request) -> PlainTextResponse:
    body = await request.body()
    await asyncio.sleep(2.5)
    return PlainTextResponse(body)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(serve, "HEADER_SECONDS", 2.0)
    monkeypatch.setattr(serve, "BODY_SECONDS", 2.0)
    with running(Starlette(routes=[Route("/", slow_echo, methods=["POST"])])) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEADERS[:-2], HEADERS, HEADERS + b"a"])
def test_a_connection_that_waits_for_its_client_is_closed(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_a_client_that_trickles_is_closed(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection, pytest.raises(ConnectionError):
        trickle(connection, HEADERS * 100)


def test_an_answer_may_take_longer_and_the_next_request_too(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        for pause in (0, 2.5):
            time.sleep(pause)
            connection.sendall(HEADERS + b"abc")
            answer = connection.recv(1000)
            while not answer.endswith(b"abc"):
                answer += connection.recv(1000)
