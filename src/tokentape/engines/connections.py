"""HTTP/1.1 connections to one server, kept alive between requests: the transport below `HttpClient`.

A call to an engine is a request that moves a prompt and little else, so what the client itself costs counts: this is
httptools' parser on asyncio's transports and nothing between (docs/decisions/0012).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools

_HIGH_WATER = 1 << 20
"""Bytes of a body that may wait to be read before the server is made to wait."""

_MAX_HEAD = 64 << 10
"""Bytes of a reply before its body."""


class ConnectionBroken(Exception):
    """The connection ended before the reply did. The text says how, and nothing that was sent or received."""


class Connections:
    """Connections to the server at `base_url`, as many as there are calls under way.

    Args:
        base_url: `http://host:port` or `https://...`; a path in it begins every request's.
        headers: sent with every request.
        idle_seconds: a connection that was not used for so long is closed instead of used again.
        most_idle: that many are kept.

    """

    def __init__(self, base_url: str, headers: Mapping[str, str], *, idle_seconds: float, most_idle: int) -> None:
        url = urlsplit(base_url)
        assert url.hostname is not None
        self._host = url.hostname
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._path = url.path
        self._head = _lines({"host": url.netloc, **headers})
        self._idle_seconds = idle_seconds
        self._most_idle = most_idle
        self._idle: deque[tuple[float, _Protocol]] = deque()
        self._busy: set[_Protocol] = set()
        self.closed = False
        self.generation = 0
        """How often a connection was opened when no other was alive: a server that restarts ends all of them."""

    async def connect(self) -> _Protocol:
        """A connection that is free, a new one if there is none. Raises OSError."""
        loop = asyncio.get_running_loop()
        expired = loop.time() - self._idle_seconds
        alone = not any(one.alive for one in (*self._busy, *(free for _, free in self._idle)))
        while self._idle:
            since, free = self._idle.pop()
            if since > expired and free.usable:
                self._busy.add(free)
                return free
            free.close()
        _, protocol = await loop.create_connection(_Protocol, self._host, self._port, ssl=self._tls)
        if self.closed:
            protocol.close()
        self.generation += alone
        self._busy.add(protocol)
        return protocol

    async def send(
        self, connection: _Protocol, method: str, path: str, headers: Mapping[str, str], body: Sequence[bytes]
    ) -> Response:
        """The reply to a request, with its body still to be read. `connection` is one from `connect`.

        Raises `ConnectionBroken`. Whatever is raised, also by cancelling, the connection is closed.
        """
        size = sum(map(len, body))
        length = f"content-length: {size}\r\n" if method != "GET" else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{_lines(headers)}{length}\r\n".encode("latin-1")
        try:
            status = await connection.ask([head, *body])
        except BaseException:
            self.release(connection, reusable=False)
            raise
        return Response(status, connection, self)

    def release(self, connection: _Protocol, *, reusable: bool) -> None:
        """Take a connection back."""
        self._busy.discard(connection)
        connection.rest()
        if reusable and not self.closed and len(self._idle) < self._most_idle:
            self._idle.append((asyncio.get_running_loop().time(), connection))
        else:
            connection.close()

    def close(self) -> None:
        """Close all connections; calls under way end with `ConnectionBroken`."""
        self.closed = True
        for connection in [*self._busy, *(free for _, free in self._idle)]:
            connection.close()
        self._idle.clear()


class Response:
    """A reply whose head has arrived."""

    def __init__(self, status: int, connection: _Protocol, owner: Connections) -> None:
        self.status = status
        self._connection: _Protocol | None = connection
        self._owner = owner

    def read(self, until: float) -> Awaitable[bytes]:
        """What has arrived of the body since, waiting for it until then, in the event loop's time; nothing at the end.

        Raises `ConnectionBroken`, and TimeoutError if nothing arrives. Not to be called behind `close`.
        """
        assert self._connection is not None
        return self._connection.read(until)

    def close(self) -> None:
        """Give up the rest. A connection is used again only if there is none."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._owner.release(connection, reusable=connection.usable)


class _Protocol(asyncio.Protocol):
    """One connection, with at most one request on it."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._waiting_bytes = 0
        self._paused = False
        self._broken: str | None = None
        self._idle = True
        self._head_bytes = 0
        self._has_head = False
        self._complete = False
        self._until_close = False
        self._unasked = False
        self._status = 0
        self._keep = True
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # What is asked of it.

    @property
    def alive(self) -> bool:
        """Whether neither side has closed it."""
        return self._broken is None and not self._transport.is_closing()

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        whole = self._idle or (self._complete and not self._chunks)
        return whole and self._keep and self.alive

    async def ask(self, pieces: Sequence[bytes]) -> int:
        """Send a request; returns the status of the reply."""
        self._idle = self._has_head = self._complete = False
        self._until_close, self._head_bytes, self._keep = True, 0, True
        if self._broken is None:
            self._transport.writelines(pieces)
        while not self._has_head:
            if self._broken is not None:
                raise ConnectionBroken(self._broken)
            await self._wait()
        return self._status

    async def read(self, until: float) -> bytes:
        """The next bytes of the body; nothing at its end."""
        while not self._chunks:
            if self._complete:
                return b""
            if self._broken is not None:
                raise ConnectionBroken(self._broken)
            self._allow(until)
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._waiting_bytes = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def rest(self) -> None:
        """Nobody waits for anything from here on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Close it, unsent data included."""
        self.rest()
        self._break("closed")
        if self._transport is not None:
            self._transport.abort()

    def _wait(self) -> asyncio.Future[None]:
        """Done once something has changed."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _allow(self, until: float) -> None:
        """Have the next wait end then. The timer of the wait before is kept if it is not too late: each token waits."""
        self._until = until
        if self._timer is None or self._timer.when() > until:
            self.rest()
            self._timer = asyncio.get_running_loop().call_at(until, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if asyncio.get_running_loop().time() < self._until:
            self._allow(self._until)
        else:
            waiter, self._waiter = self._waiter, None
            waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _break(self, how: str) -> None:
        if self._broken is None:
            self._broken = how
        self._wake()

    # What asyncio tells it.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._idle or self._complete:
            # Nobody asked. What has arrived before is whole, and may still be read.
            self._keep = False
            self._transport.abort()
            return
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"not HTTP: {type(error).__name__}")
            self._transport.abort()
            return
        if not self._has_head and self._head_bytes > _MAX_HEAD:
            self._break("its head is too long")
            self._transport.abort()
            return
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._has_head and self._until_close and error is None and not self._complete and self._broken is None:
            # The end of the connection is the end of a body whose length was not told.
            self._complete = True
        self._keep = False
        self._break("closed by the server" if error is None else type(error).__name__)

    # What httptools tells it.

    def on_message_begin(self) -> None:
        if self._complete:
            # More than was asked for: it is no part of this reply, nor of a later one.
            self._unasked = True
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        # 100 Continue and other news that are no reply.
        status = self._parser.get_status_code()
        if not self._has_head and status >= 200:
            self._has_head, self._status = True, status

    def on_body(self, data: bytes) -> None:
        if self._unasked:
            return
        self._chunks.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > _HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._has_head and not self._unasked:
            self._complete = True
            self._keep = self._parser.should_keep_alive()


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
