"""How long a client may take to send a request: uvicorn itself waits for ever (Kludex/uvicorn#157)."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 10.0
"""From the connection, or the first byte of a later request on it, to the end of the headers."""

BODY_SECONDS = 300.0
"""From there to the end of the body."""


class DeadlineConfig(uvicorn.Config):
    """What uvicorn is configured with, and the deadlines."""

    def __init__(self, app: Any, *, header_seconds: float, body_seconds: float, **options: Any) -> None:
        super().__init__(app, http=DeadlineProtocol, **options)
        self.header_seconds = header_seconds
        self.body_seconds = body_seconds


class DeadlineProtocol(HttpToolsProtocol):
    """uvicorn's protocol, that closes a connection whose request is too slow in coming."""

    config: DeadlineConfig
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came: it has a request to send."""
        super().connection_made(transport)
        self._allow(self.config.header_seconds)

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        super().on_message_begin()
        self._allow(self.config.header_seconds)

    def on_headers_complete(self) -> None:
        """Its body may still have to come."""
        super().on_headers_complete()
        self._allow(self.config.body_seconds)

    def on_message_complete(self) -> None:
        """All of it came."""
        super().on_message_complete()
        self._allow(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._allow(None)
        super().connection_lost(exc)

    def _allow(self, seconds: float | None) -> None:
        """Give the client so long to the next of its steps; None: it has none to take."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)
