"""HTTP/1.1 as servers may speak it: how a body ends, which connection is reused, and which replies are invalid."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

import pytest
from test_http import Peer, call
from tests.waiting import PATIENCE

from tokentape.engines._http import HttpClient
from tokentape.errors import EngineError, EngineUnavailable

_T = TypeVar("_T")


def asked(use: Callable[[HttpClient], Awaitable[_T]], *answers: bytes, close: bool = False) -> tuple[_T, int]:
    """Return the result of `use` with a server of these answers, one per request, and the number of connections."""
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
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            try:
                return await asyncio.wait_for(use(client), PATIENCE), connected
            finally:
                await client.close()

    return asyncio.run(main())


async def get(client: HttpClient) -> bytes:
    return await client.get("/")


async def post(client: HttpClient) -> bytes:
    return await client.post("/", b"", {})


async def twice(client: HttpClient) -> list[bytes]:
    return [await get(client), await get(client)]


REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1;x=y\r\ni\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [REPLY, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + REPLY])
def test_connection_is_reused_after_a_whole_body(answer: bytes) -> None:
    assert asked(twice, answer, answer) == ([b"hi", b"hi"], 1)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_body_without_a_length_ends_with_its_connection(version: bytes) -> None:
    answer = b"HTTP/" + version + b" 200 OK\r\n\r\nhi"
    assert asked(twice, answer, answer, close=True) == ([b"hi", b"hi"], 2)


def test_closing_server_gets_a_new_connection() -> None:
    answer = REPLY.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert asked(twice, answer, answer, close=True) == ([b"hi", b"hi"], 2)


@pytest.mark.parametrize("answer", [REPLY[:-1], CHUNKED[:-5]])
def test_truncated_body_is_an_error(answer: bytes) -> None:
    with pytest.raises(EngineError, match="broke during the engine's reply") as caught:
        asked(post, answer, close=True)
    assert type(caught.value) is EngineError


ENDLESS = b"HTTP/1.1 200 OK\r\n"
MALFORMED = {
    "cut off": b"HTTP/1.1 200 OK\r\n",
    "empty": b"",
    "another protocol": b"no http\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a status that is no number": b"HTTP/1.1 two OK\r\n\r\n",
    "a header without a colon": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi",
    "a length that is no number": b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nhi",
    "a header without end": ENDLESS + b"x: " + b"y" * (1 << 20),
    "headers without end": ENDLESS + b"x: y\r\n" * (1 << 17),
}


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_response_without_a_head_is_refused(answer: bytes) -> None:
    with pytest.raises(EngineUnavailable, match="broke before it answered"):
        asked(post, answer, close=True)


@pytest.mark.parametrize("size", [b"nonsense", b"-1", b"F" * 40])
def test_a_chunk_of_an_impossible_size_is_an_error(size: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n" + size + b"\r\n"
    with pytest.raises(EngineError, match="the connection"):
        asked(post, answer)


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_bytes_after_the_reply_are_not_read(pause: float) -> None:
    async def use(client: HttpClient) -> list[bytes]:
        first = await get(client)
        await asyncio.sleep(pause)
        return [first, await get(client)]

    other = REPLY.replace(b"hi", b"no")
    assert asked(use, REPLY + other, REPLY) == ([b"hi", b"hi"], 2)


def test_unsolicited_reply_is_not_read() -> None:
    answered, sent = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REPLY)
        await answered.wait()
        writer.write(REPLY.replace(b"hi", b"no"))
        await writer.drain()
        sent.set()

    async def use(client: HttpClient, peer: Peer) -> tuple[bytes, bytes, int]:
        first = await get(client)
        answered.set()
        await sent.wait()
        # The bytes have arrived: the loop reads them in one of its next rounds.
        for _ in range(10):
            await asyncio.sleep(0)
        return first, await get(client), peer.connections

    assert call(script, use) == (b"hi", b"hi", 2)


def test_unrequested_protocol_switch_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineUnavailable, match="101"):
        asked(post, b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
    assert not caplog.records


@pytest.mark.parametrize("again", [get, post])
def test_only_get_is_retried_when_a_kept_connection_ends(again: Callable[[HttpClient], Awaitable[bytes]]) -> None:
    """The server may have processed a POST, so the caller decides whether to repeat it."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REPLY)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def use(client: HttpClient, peer: Peer) -> tuple[bytes | str, int]:
        await get(client)
        try:
            return await again(client), peer.connections
        except EngineUnavailable as error:
            return str(error), peer.connections

    answered, connections = call(script, use)
    if again is get:
        assert (answered, connections) == (b"hi", 2)
    else:
        assert "before it answered" in str(answered)
        assert connections == 1


async def _left(client: HttpClient, by: str) -> bytes:
    """Send a request after abandoning a reply in the middle of its body."""
    async with aclosing(client.arrivals("/", b"", {})) as arrivals:
        await anext(arrivals)
        if by == "cancelling":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(arrivals), 0.05)
    return await get(client)


@pytest.mark.parametrize("by", ["closing", "cancelling"])
def test_connection_is_not_reused_after_an_abandoned_reply(by: str) -> None:
    streamed = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: 1\n\n"
    assert asked(lambda client: _left(client, by), streamed, REPLY) == (b"hi", 2)


def test_unread_body_waits_in_the_server() -> None:
    event = b"data: " + bytes(1000).replace(b"\0", b"x") + b"\n\n"
    count = 64_000
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (count * len(event)) + event * count

    async def use(client: HttpClient) -> tuple[int, int]:
        async with aclosing(client.arrivals("/", b"", {})) as arrivals:
            first = len(await anext(arrivals))
            await asyncio.sleep(0.2)
            second = len(await anext(arrivals))
            return second, first + second + sum([len(several) async for several in arrivals])

    (second, total), _ = asked(use, answer)
    assert total == count
    assert second < count // 8


def test_a_long_request_arrives_whole() -> None:
    body = b'{"prompt": [' + b"1, " * (1 << 20) + b"1]}"
    received: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head.lower()
        received.append(await reader.readexactly(len(body)))
        writer.write(REPLY)
        writer.close()

    async def main() -> bytes:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            try:
                return await client.post("/", body, {})
            finally:
                await client.close()

    assert asyncio.run(main()) == b"hi"
    assert received == [body]
