"""HTTP/1.1 as servers may speak it: how a body ends, what is used again, and what is no reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import pytest
from tests.waiting import PATIENCE

from tokentape.engines.connections import ConnectionBroken, Connections, Response

_T = TypeVar("_T")


def asked(use: Callable[[Connections], Awaitable[_T]], *answers: bytes, close: bool = False) -> tuple[_T, int]:
    """What `use` returns with a server that gives these answers, one per request, and how often it was connected to."""
    left, connected = list(answers), 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while left:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(left.pop(0))
                await writer.drain()
                if close:
                    break
        writer.close()

    async def main() -> tuple[_T, int]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = Connections(f"http://127.0.0.1:{port}", {}, idle_seconds=60, most_idle=2)
        async with server:
            try:
                return await asyncio.wait_for(use(connections), PATIENCE), connected
            finally:
                connections.close()

    return asyncio.run(main())


def _soon() -> float:
    return asyncio.get_running_loop().time() + 60


async def get(connections: Connections) -> tuple[int, bytes]:
    """One request; status and body."""
    response = await connections.send(await connections.connect(), "GET", "/", {}, [])
    body = b""
    while chunk := await response.read(_soon()):
        body += chunk
    response.close()
    return response.status, body


async def twice(connections: Connections) -> list[tuple[int, bytes]]:
    return [await get(connections), await get(connections)]


TOLD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1;x=y\r\ni\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [TOLD, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + TOLD])
def test_a_connection_is_used_again_after_a_whole_body(answer: bytes) -> None:
    assert asked(twice, answer, answer) == ([(200, b"hi"), (200, b"hi")], 1)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_body_without_a_length_ends_with_its_connection(version: bytes) -> None:
    answer = b"HTTP/" + version + b" 200 OK\r\n\r\nhi"
    assert asked(twice, answer, answer, close=True) == ([(200, b"hi"), (200, b"hi")], 2)


def test_a_server_that_will_close_is_connected_to_anew() -> None:
    answer = TOLD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert asked(twice, answer, answer, close=True) == ([(200, b"hi"), (200, b"hi")], 2)


@pytest.mark.parametrize("answer", [TOLD[:-1], CHUNKED[:-5], b"HTTP/1.1 200 OK\r\n", b"no http\r\n\r\n", b""])
def test_what_is_no_whole_reply_is_broken(answer: bytes) -> None:
    with pytest.raises(ConnectionBroken):
        asked(get, answer, close=True)


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_more_than_was_asked_for_is_read_by_nobody(pause: float) -> None:
    async def use(connections: Connections) -> list[tuple[int, bytes]]:
        first = await get(connections)
        await asyncio.sleep(pause)
        return [first, await get(connections)]

    other = TOLD.replace(b"hi", b"no")
    assert asked(use, TOLD + other, TOLD) == ([(200, b"hi"), (200, b"hi")], 2)


def test_a_protocol_that_was_not_asked_for_is_no_reply(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConnectionBroken, match="not HTTP"):
        asked(get, b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
    assert not caplog.records


async def left(connections: Connections, by: Callable[[Response], Awaitable[object]]) -> tuple[int, bytes]:
    """A request after one whose reply was left in the midst of its body."""
    response = await connections.send(await connections.connect(), "GET", "/", {}, [])
    await by(response)
    response.close()
    return await get(connections)


async def _nothing(response: Response) -> None: ...


async def _a_part(response: Response) -> None:
    assert await response.read(_soon()) == b"h"


async def _until_cancelled(response: Response) -> None:
    await response.read(_soon())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(response.read(_soon()), 0.05)


@pytest.mark.parametrize("by", [_nothing, _a_part, _until_cancelled])
def test_a_connection_is_not_used_again_behind_a_reply_that_was_left(
    by: Callable[[Response], Awaitable[object]],
) -> None:
    assert asked(lambda connections: left(connections, by), TOLD[:-1], TOLD) == ((200, b"hi"), 2)


def test_a_body_that_is_not_read_waits_in_the_server() -> None:
    size = 64 << 20
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)

    async def use(connections: Connections) -> tuple[int, int]:
        response = await connections.send(await connections.connect(), "GET", "/", {}, [])
        await asyncio.sleep(0.2)
        first = len(await response.read(_soon()))
        rest = 0
        while chunk := await response.read(_soon()):
            rest += len(chunk)
        return first, rest

    (first, rest), _ = asked(use, answer)
    assert first + rest == size
    assert first < size // 8
