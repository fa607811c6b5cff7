"""A fake of any engine's HTTP server on a real socket: answers set by a test, and the received requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokentape.engines._base import Engine, SampleDelta
from tokentape.errors import EngineUnavailable

Body = dict[str, Any]
Answer = Response | Callable[[Body], Response]


class FakeServer:
    """Answers by path, and the received requests."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, Body]] = []
        self.headers: dict[str, str] = {}
        self.client_left = threading.Event()

    def reset(self, answers: dict[str, Answer]) -> None:
        """Forget the received requests and set new answers."""
        self.answers = dict(answers)
        self.asked.clear()
        self.client_left.clear()

    def bodies(self, path: str) -> list[Body]:
        """Return the bodies sent to a path, in order."""
        return [body for asked, body in self.asked if asked == path]

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        received = await request.body()
        body = json.loads(received) if received else {}
        self.headers = dict(request.headers)
        self.asked.append((request.url.path, body))
        answer = self.answers.get(request.url.path) or JSONResponse({"detail": "Not Found"}, status_code=404)
        return answer if isinstance(answer, Response) else answer(body)


@contextmanager
def running() -> Iterator[FakeServer]:
    """Run a fake server on loopback, in a separate thread."""
    fake = FakeServer()
    app = Starlette(routes=[Route("/{path:path}", fake.handle, methods=["GET", "POST"])])

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        async def noted() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                fake.client_left.set()
            return message

        await app(scope, noted, send)

    config = uvicorn.Config(noting, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join()


async def sampled_before_the_error(engine: Engine, deltas: AsyncIterator[SampleDelta]) -> list[SampleDelta]:
    """Return the deltas before they raise `EngineUnavailable`, as they must. Closes the engine."""
    seen = []
    try:
        async for delta in deltas:
            seen.append(delta)
    except EngineUnavailable:
        return seen
    finally:
        await engine.close()
    raise AssertionError("the call ended")
