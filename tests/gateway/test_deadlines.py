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

from tokentape.gateway import serve
from tokentape.gateway.serve import running

HEADERS = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"


async def slow_echo(request: Request) -> PlainTextResponse:
    body = await request.body()
    await asyncio.sleep(0.6)
    return PlainTextResponse(body)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(serve, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(serve, "BODY_SECONDS", 0.3)
    with running(Starlette(routes=[Route("/", slow_echo, methods=["POST"])])) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def closed_after(connection: socket.socket) -> float:
    began = time.monotonic()
    connection.settimeout(5)
    assert connection.recv(1) == b""
    return time.monotonic() - began


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEADERS[:-2], HEADERS, HEADERS + b"a"])
def test_a_connection_that_waits_for_its_client_is_closed(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert closed_after(connection) < 3


def test_a_client_that_trickles_is_closed(address: tuple[str, int]) -> None:
    began = time.monotonic()
    with socket.create_connection(address) as connection:
        try:
            for byte in HEADERS * 100:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        except OSError:
            pass
    assert time.monotonic() - began < 3


def test_an_answer_may_take_longer_and_the_next_request_too(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        for _ in range(2):
            connection.sendall(HEADERS + b"abc")
            answer = connection.recv(1000)
            while not answer.endswith(b"abc"):
                answer += connection.recv(1000)
            time.sleep(0.5)
