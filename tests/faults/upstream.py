"""A stand-in for vLLM on a bare socket, with a plan for each request: cut, reset, stalled or spoilt at any byte.

Its replies have the form of `tests/engines/fake_vllm.py`, with ids of the tiny model.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from tests.engines.fake_vllm import Event, sampled_events, sse, whole
from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer

ANSWER = "Pears are 12, plums 7.<|im_end|>"


@dataclass(frozen=True)
class Plan:
    """What happens to one call. Without a fault it is answered with `text`."""

    text: str = ANSWER
    """What is sampled; control tokens are spelled out."""
    gate: threading.Event | None = None
    """Nothing is sent before it is set."""
    tamper: Callable[[list[Event]], None] | None = None
    """Changes the events of a stream, or the one whole reply."""
    pieces: Sequence[bytes] | None = None
    """The body's bytes, in place of a reply."""
    status: int = 200
    headers: str = ""
    """More header lines, each with its CRLF."""
    events: int | None = None
    """How many events of a stream are sent before what comes `then`; of a whole reply as many tenths. None: all."""
    then: Literal["end", "close", "reset", "stall"] = "end"
    """The reply ends as HTTP wants it, the connection is closed without that, is reset, or nothing more comes."""


class Upstream:
    """The server's state. Calls take the next of `plans`, and without one they get a normal reply."""

    def __init__(self, renderer: Renderer, loop: asyncio.AbstractEventLoop) -> None:
        self._tokenizer = renderer.tokenizer
        self._loop = loop
        self.url = ""
        self.plans: list[Plan] = []
        self.bodies: list[dict[str, Any]] = []
        """Of the calls, in order of arrival; those by which an engine gets to know the server are left out."""
        self.called = threading.Semaphore(0)
        """Released by each call."""
        self.stalled = threading.Semaphore(0)
        """Released by each call that has come to its stall."""
        self.left = threading.Semaphore(0)
        """Released by each call whose client closed the connection before the reply was complete."""

    def listening(self, on: bool) -> None:
        """Stop listening on the port, so that connections are refused, or listen on it again."""
        asyncio.run_coroutine_threadsafe(self._listen() if on else self._refuse(), self._loop).result(PATIENCE)

    async def _listen(self) -> None:
        port = int(self.url.rpartition(":")[2] or "0")
        self._server = await asyncio.start_server(self.handle, "127.0.0.1", port, limit=1 << 26)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _refuse(self) -> None:
        self._server.close()

    async def close(self) -> None:
        """Stop listening and break off all calls."""
        self._server.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request on one connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = next((line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length:")), 0)
            data = await reader.readexactly(int(length))
            path = head.split(" ")[1]
            answering = asyncio.create_task(self._answer(path, "tokentape-probe" in head, data, writer))
            leaving = asyncio.create_task(reader.read(1))
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or isinstance(answering.exception(), ConnectionError):
                self.left.release()
            answering.cancel()
            leaving.cancel()
            await asyncio.wait({answering, leaving})
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, probe: bool, data: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/version":
            await _send(writer, [json.dumps({"version": "0.32.0"}).encode()])
        elif path == "/v1/models":
            await _send(writer, [json.dumps({"data": [{"id": "tiny", "max_model_len": 1 << 15}]}).encode()])
        elif path == "/health":
            await _send(writer, [b""])
        elif path != "/v1/completions":
            await _send(writer, [b'{"detail": "Not Found"}'], 404)
        else:
            await self._sample(json.loads(data), probe, writer)

    async def _sample(self, body: dict[str, Any], probe: bool, writer: asyncio.StreamWriter) -> None:
        plan = Plan()
        if not probe:
            plan = self.plans.pop(0) if self.plans else plan
            self.bodies.append(body)
            self.called.release()
        # The gate is opened from another thread, which can't set an asyncio.Event.
        while plan.gate is not None and not plan.gate.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        pieces = self._pieces(body, plan) if plan.pieces is None else plan.pieces
        await _send(writer, pieces[: plan.events], plan.status, plan.headers, end=plan.then == "end")
        if plan.then == "stall":
            self.stalled.release()
            await asyncio.Event().wait()
        elif plan.then == "reset":
            # The sent bytes must arrive first: a reset drops those that the other side has not read.
            await asyncio.sleep(0.1)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def _pieces(self, body: dict[str, Any], plan: Plan) -> list[bytes]:
        events = sampled_events(body, self._tokenizer.encode_plain(plan.text))
        if body["stream"]:
            if plan.tamper is not None:
                plan.tamper(events)
            return [piece + b"\n\n" for piece in sse(events).split(b"\n\n")[:-1]]
        reply = [whole(events)]
        if plan.tamper is not None:
            plan.tamper(reply)
        data = json.dumps(reply[0], separators=(",", ":")).encode()
        tenth = len(data) // 10
        return [data[at * tenth : (at + 1) * tenth if at < 9 else None] for at in range(10)]


async def _send(
    writer: asyncio.StreamWriter, pieces: Sequence[bytes], status: int = 200, headers: str = "", *, end: bool = True
) -> None:
    writer.write(f"HTTP/1.1 {status} Planned\r\nconnection: close\r\n{headers}".encode())
    writer.write(b"transfer-encoding: chunked\r\n\r\n")
    for piece in pieces:
        if piece:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
    if end:
        writer.write(b"0\r\n\r\n")
    await writer.drain()


@contextmanager
def running(renderer: Renderer) -> Iterator[Upstream]:
    """The server on loopback, in its own thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    upstream = Upstream(renderer, loop)
    upstream.listening(True)
    try:
        yield upstream
    finally:
        asyncio.run_coroutine_threadsafe(upstream.close(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
