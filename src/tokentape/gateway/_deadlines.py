"""Limits on receiving requests: uvicorn has no receive timeout (Kludex/uvicorn#157) and no header size limit."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokentape.errors import HeadersTooLarge, InvalidRequest, TokentapeError
from tokentape.gateway._http import encode_json, error_body
from tokentape.gateway._wire.anthropic_messages import AnthropicMessages

HEADER_SECONDS = 10.0
"""Time limit for the headers, from the start of the connection or from the first byte of a later request."""

BODY_SECONDS = 300.0
"""Time limit for the body, from the end of the headers."""

MAX_HEAD_BYTES = 64 << 10
"""Size limit for the request line and headers, and for trailers. Enforced to within about 16 KiB."""

_PIECE_BYTES = 16 << 10


class DeadlineConfig(uvicorn.Config):
    """uvicorn's configuration with two receive timeouts, in seconds."""

    def __init__(self, app: Any, *, header_seconds: float, body_seconds: float, **options: Any) -> None:
        super().__init__(app, http=_DeadlineProtocol, **options)
        self.header_seconds = header_seconds
        self.body_seconds = body_seconds


class _DeadlineProtocol(HttpToolsProtocol):
    """Closes connections if a request arrives too slowly, or if its headers are too large (431).

    While an earlier request on the connection is being answered, the timeouts of the next request don't run.
    """

    config: DeadlineConfig
    _deadline: asyncio.TimerHandle | None = None
    _seconds: float | None = None
    """Receive timeout of the request that is arriving; None if no request is."""
    _earlier: RequestResponseCycle | None = None
    """The previous request on the connection."""
    _answered: RequestResponseCycle | None = None
    """The request that is being answered or was answered last. Pipelined requests wait for it."""
    _kept = 0
    """Bytes received since the parser last completed headers, body data or a request. It may buffer all of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._allow(self.config.header_seconds)

    def data_received(self, data: bytes) -> None:
        # Feed it in pieces, so that a large chunk can't exceed the limit unnoticed.
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self._kept += len(piece)
            self._parse(piece)
            if self.transport.is_closing():
                return
            if self._kept > MAX_HEAD_BYTES:
                most = f"{MAX_HEAD_BYTES >> 10} KiB that this gateway accepts"
                self._refuse(HeadersTooLarge(f"request line and headers exceed the {most}; send shorter ones"))
                return
        if self._seconds is None and (self.cycle is None or self.cycle.response_complete):
            # Empty lines don't begin a request, but they have cancelled uvicorn's keep-alive timeout.
            self._earlier = self.cycle
            self._allow(self.config.header_seconds)

    def _parse(self, data: bytes) -> None:
        """Feed received bytes to the HTTP parser. Unlike uvicorn, keep the body after an `Upgrade` header."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            if not self._offers_upgrade():
                return
            # Java's client asks for h2c by default. The parser treats everything after the headers as the new protocol,
            # so the request is parsed again without its `Upgrade` header.
            head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
            for name, value in self.headers:
                if name != b"upgrade":
                    head += [name, b": ", value, b"\r\n"]
            self.parser = httptools.HttpRequestParser(self)
            self._parse(b"".join([*head, b"\r\n", data[stopped.args[0] :]]))
        except httptools.HttpParserError:
            self._refuse(InvalidRequest("this is not a valid HTTP/1.1 request; check the client and its proxy"))

    def _offers_upgrade(self) -> bool:
        """Return whether the request offers a protocol upgrade. CONNECT requests a tunnel instead."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _refuse(self, error: TokentapeError) -> None:
        """Answer with an error, unless an earlier request or a part of this one is already answered, and close."""
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if self._earlier_answered() and not begun:
            anthropic = AnthropicMessages.path.encode() in getattr(self, "url", b"")
            body = encode_json((AnthropicMessages.error_body if anthropic else error_body)(error))
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-length: {len(body)}\r\n"
            rest = "content-type: application/json\r\nx-should-retry: false\r\nconnection: close\r\n\r\n"
            self.transport.write(f"{head}{rest}".encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._earlier = self.cycle
        self._allow(self.config.header_seconds)

    def on_headers_complete(self) -> None:
        if self._offers_upgrade():
            return
        super().on_headers_complete()
        self._kept = 0
        self._allow(self.config.body_seconds)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._kept = 0

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        super().on_message_complete()
        self._kept = 0
        self._allow(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_deadline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._allow(None)
        super().connection_lost(exc)
        if self._answered is not None:
            # uvicorn notifies only the newest request.
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _allow(self, seconds: float | None) -> None:
        """Reset the receive timeout; None disables it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._seconds = None, seconds
        self._start_deadline()

    def _start_deadline(self) -> None:
        if self._earlier_answered() and self._deadline is None and self._seconds is not None:
            self._deadline = self.loop.call_later(self._seconds, self.transport.close)

    def _earlier_answered(self) -> bool:
        return self._earlier is None or self._earlier.response_complete
