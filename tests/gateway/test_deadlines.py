"""Clients that send their request slowly, or never, or headers without end."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import httptools
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.waiting import PATIENCE, trickle
from tokentape.gateway import _serve as serve
from tokentape.gateway._serve import running

HEADERS = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"


async def quick_echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


async def slow_echo(request: Request) -> PlainTextResponse:
    answer = await quick_echo(request)
    await asyncio.sleep(2.5)
    return answer


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Address of a server that waits for clients for two seconds."""
    monkeypatch.setattr(serve, "HEADER_SECONDS", 2.0)
    monkeypatch.setattr(serve, "BODY_SECONDS", 2.0)
    with served() as found:
        yield found


@pytest.fixture
def patient() -> Iterator[tuple[str, int]]:
    """Address of a server that waits as usual, for tests in which no deadline should end anything."""
    with served() as found:
        yield found


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    routes = [Route(path, echo, methods=["POST"]) for path, echo in (("/", slow_echo), ("/quick", quick_echo))]
    with running(Starlette(routes=routes)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEADERS[:-2], HEADERS, HEADERS + b"a"])
def test_idle_or_incomplete_connection_is_closed(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_trickling_client_is_disconnected(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection, pytest.raises(ConnectionError):
        trickle(connection, HEADERS * 100)


def test_slow_answer_and_a_late_next_request_are_allowed(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        for pause in (0, 2.5):
            time.sleep(pause)
            connection.sendall(HEADERS + b"abc")
            answer = connection.recv(1000)
            while not answer.endswith(b"abc"):
                answer += connection.recv(1000)


def answer_to(connection: socket.socket, body: bytes) -> bytes:
    """Read until an answer ends with this body."""
    answer = b""
    while not answer.endswith(body):
        piece = connection.recv(1000)
        assert piece, answer
        answer += piece
    return answer


def test_empty_lines_do_not_keep_a_connection_open(address: tuple[str, int]) -> None:
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(HEADERS.replace(b"/", b"/quick", 1) + b"abc")
        answer_to(connection, b"abc")
        connection.sendall(b"\r\n")
        assert connection.recv(1) == b""


@pytest.mark.parametrize("begun", [b"POST / HT", HEADERS + b"d", b"\r\n"])
def test_early_next_request_does_not_cut_off_the_answer(address: tuple[str, int], begun: bytes) -> None:
    """The answer takes longer than either deadline."""
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(HEADERS + b"abc" + begun)
        answer_to(connection, b"abc")
        if begun.strip():
            connection.sendall((HEADERS + b"def")[len(begun) :])
            answer_to(connection, b"def")


@pytest.mark.parametrize("begun", [b"POST / HT", HEADERS + b"d"])
def test_deadline_of_an_early_request_starts_after_the_answer(address: tuple[str, int], begun: bytes) -> None:
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(HEADERS + b"abc" + begun)
        answer_to(connection, b"abc")
        # This ends uvicorn's wait for another request.
        connection.sendall((HEADERS + b"def")[len(begun) :][:1])
        assert connection.recv(1) == b""


@pytest.mark.parametrize("pipelined", [0, 1, 2])
def test_request_before_pipelined_ones_learns_that_its_client_left(pipelined: int) -> None:
    answering, left = threading.Semaphore(0), threading.Semaphore(0)

    async def wait(request: Request) -> PlainTextResponse:
        while (await request.receive())["type"] != "http.disconnect":
            answering.release()
        left.release()
        return PlainTextResponse()

    with running(Starlette(routes=[Route("/", wait, methods=["POST"])])) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall((HEADERS + b"abc") * (1 + pipelined))
            assert answering.acquire(timeout=PATIENCE)
        assert left.acquire(timeout=PATIENCE)


OFFER = (
    HEADERS.replace(b"/", b"/quick", 1)[:-2]
    + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n\r\n"
)


@pytest.mark.parametrize("cuts", [(), (-3,), (30, -1), (-5, -4, -3)])
def test_a_request_that_offers_http_2_keeps_its_body(patient: tuple[str, int], cuts: tuple[int, ...]) -> None:
    """As Java's HttpClient sends all of its requests."""
    request = OFFER + b"abc"
    edges = [0, *(cut % len(request) for cut in cuts), len(request)]
    with socket.create_connection(patient, PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in pairwise(edges):
            connection.sendall(request[start:end])
            # So that each piece arrives by itself, as a rule.
            time.sleep(0.05)
        assert answer_to(connection, b"abc").startswith(b"HTTP/1.1 200")
        connection.sendall(OFFER + b"def" + OFFER + b"ghi")
        # Both answers may arrive together.
        assert b"\r\n\r\ndef" in answer_to(connection, b"ghi")


def test_a_tunnel_is_refused_and_parsed_once(patient: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    parser, made = httptools.HttpRequestParser, list[object]()

    def counted(protocol: object) -> object:
        made.append(protocol)
        return parser(protocol)

    monkeypatch.setattr(httptools, "HttpRequestParser", counted)
    with socket.create_connection(patient, PATIENCE) as connection:
        connection.sendall(b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\nabc")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert len(made) == 1


LINE = b"x-name: " + b"a" * 80 + b"\r\n"
CHUNKED = HEADERS.replace(b"Content-Length: 3", b"Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\n"
ENDLESS = {
    "header lines": (HEADERS[:-2], LINE * 1000),
    "one header": (HEADERS[:-2] + b"x-name: ", b"a" * 90_000),
    "a URL": (b"GET /", b"a" * 90_000),
    "empty lines": (b"", b"\r\n" * 45_000),
    "trailers": (CHUNKED, LINE * 1000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_header_is_refused_and_not_buffered(address: tuple[str, int], name: str) -> None:
    """Without a key, and with no more memory than the limit: 500 MiB are offered."""
    begin, more = ENDLESS[name]
    before, sent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    answer = b""
    with socket.create_connection(address, PATIENCE) as connection, suppress(ConnectionError):
        connection.sendall(begin)
        while sent < 500 << 20:
            connection.sendall(more)
            sent += len(more)
    assert sent < 50 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"
    # A client that keeps sending may not read the answer; one that waits does.
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(begin + more[:66_000])
        while piece := connection.recv(1000):
            answer += piece
    if name != "trailers":
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code":"headers_too_large"' in answer


@pytest.mark.parametrize(
    ("begin", "status"),
    [
        (b"POST %s HTTP/1.1\r\nx-name: " + b"a" * 90_000, b"431"),
        (b"POST %s HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n", b"400"),
    ],
)
@pytest.mark.parametrize("path", [b"/v1/messages", b"/sessions/s/v1/messages?beta=true", b"/v1/chat/completions"])
def test_protocol_errors_have_the_error_body_of_their_api(
    patient: tuple[str, int], begin: bytes, status: bytes, path: bytes
) -> None:
    answer = b""
    with socket.create_connection(patient, PATIENCE) as connection:
        connection.sendall(begin % path)
        while piece := connection.recv(1000):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert json.loads(body).get("type") == ("error" if b"messages" in path else None)
    assert json.loads(body)["error"]["message"]


def test_bad_request_does_not_replace_the_previous_answer(patient: tuple[str, int]) -> None:
    with socket.create_connection(patient, PATIENCE) as connection:
        connection.sendall(HEADERS + b"abc" + b"no request\r\n\r\n")
        assert connection.recv(1000) == b""


@pytest.mark.parametrize("pipelined", [1, 40])
def test_header_within_the_limit_is_accepted(patient: tuple[str, int], pipelined: int) -> None:
    request = b"GET /no HTTP/1.1\r\n" + LINE * 500 + b"\r\n"
    with socket.create_connection(patient, PATIENCE) as connection:
        for _ in range(pipelined):
            connection.sendall(request)
        answer = b""
        while answer.count(b"HTTP/1.1 404") < pipelined:
            piece = connection.recv(1 << 16)
            assert piece
            answer += piece
