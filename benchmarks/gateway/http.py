"""Minimal HTTP/1.1 client of the benchmark, so that the client itself costs little."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Self


class Connection:
    """One keep-alive connection; reopens it if the server has closed it."""

    def __init__(self, url: str) -> None:
        rest = url.partition("://")[2]
        address, _, self.path = rest.partition("/")
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def request(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body of the reply."""
        status, length = await self._ask(path, body, headers)
        if length is not None:
            return status, await self._reader.readexactly(length)
        return status, b"".join([chunk async for chunk in self._chunks()])

    async def events(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[tuple[float, bytes]]:
        """Yield the chunks of a streamed reply with their arrival times."""
        status, length = await self._ask(path, body, headers)
        if status != 200 or length is not None:
            raise RuntimeError(f"{path} answered {status} and does not stream: {await self._reader.read(2000)!r}")
        async for chunk in self._chunks():
            yield time.perf_counter(), chunk

    async def _ask(self, path: str, body: bytes | None, headers: Mapping[str, str] | None) -> tuple[int, int | None]:
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {self._host}:{self._port}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        head = "\r\n".join([*lines, "", ""]).encode()
        for attempt in range(2):
            reader, writer = await self._open()
            try:
                writer.write(head + (body or b""))
                await writer.drain()
                raw = await reader.readuntil(b"\r\n\r\n")
                break
            except (ConnectionError, asyncio.IncompleteReadError):
                # The server closed the idle connection.
                self.close()
                if attempt:
                    raise
        first, *rest = raw.decode("latin-1").split("\r\n")
        named = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        length = named.get("content-length")
        return int(first.split(" ")[1]), None if length is None else int(length)

    async def _chunks(self) -> AsyncGenerator[bytes]:
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")

    @property
    def _reader(self) -> asyncio.StreamReader:
        assert self._streams is not None
        return self._streams[0]

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=2**24)
        return self._streams


def message_of(answer: bytes) -> dict[str, Any]:
    """Return the assistant's message of a whole reply."""
    message: dict[str, Any] = json.loads(answer)["choices"][0]["message"]
    return message


def message_of_events(chunks: list[bytes]) -> dict[str, Any]:
    """Return the assistant's message of a streamed reply."""
    content, calls = "", []
    for line in b"".join(chunks).split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            content += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls") or []
    return {"content": content, "tool_calls": calls}
