"""Deadlines for a client to send its request: uvicorn itself waits for ever (Kludex/uvicorn#157)."""

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
    """uvicorn's configuration, and the deadlines in seconds."""

    def __init__(self, app: Any, *, header_seconds: float, body_seconds: float, **options: Any) -> None:
        super().__init__(app, http=_DeadlineProtocol, **options)
        self.header_seconds = header_seconds
        self.body_seconds = body_seconds


class _DeadlineProtocol(HttpToolsProtocol):
    """Closes a connection that takes too long to send its request."""

    config: DeadlineConfig
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._allow(self.config.header_seconds)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._allow(self.config.header_seconds)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._allow(self.config.body_seconds)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._allow(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._allow(None)
        super().connection_lost(exc)

    def _allow(self, seconds: float | None) -> None:
        """Reset the receive timeout; None disables it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)
