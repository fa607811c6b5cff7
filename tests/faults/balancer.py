"""A load balancer that knows nothing of sessions: each connection goes to the next server, round and round."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from urllib.parse import urlsplit

from tests.waiting import PATIENCE


class Balancer:
    """Forwards connections to `servers`, base URLs that may be changed at any time. One that refuses is passed over."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.servers = list(servers)
        self.url = ""
        self._turn = count()

    async def listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(50):
            servers = self.servers
            to = urlsplit(servers[next(self._turn) % len(servers)])
            try:
                there, back = await asyncio.open_connection(to.hostname, to.port)
                break
            except OSError:
                await asyncio.sleep(0.05)
        else:
            writer.close()
            return
        await asyncio.gather(_pump(reader, back), _pump(there, writer))


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    with suppress(OSError):
        sink.close()


@contextmanager
def balancing(servers: Sequence[str]) -> Iterator[Balancer]:
    """A balancer in its own thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    balancer = Balancer(servers)
    server = asyncio.run_coroutine_threadsafe(balancer.listen(), loop).result(PATIENCE)

    async def stop() -> None:
        server.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    try:
        yield balancer
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
