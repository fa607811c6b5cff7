"""The HTTP client of remote engines: connections, timeouts, errors and server-sent events.

Every failure becomes an error from `tokentape.errors`. Its text names the path, the status or the exceeded limit, but
never quotes a body, a header or the engine's URL.
"""

from __future__ import annotations

import asyncio
import errno
import io
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

import aiohttp
from aiohttp.connector import Connection

from tokentape.engines._base import Timeouts
from tokentape.engines._server_errors import retry_after, safe_name, status_error
from tokentape.errors import EngineContractError, EngineError, EngineTimeout, EngineUnavailable, InvalidRequest

MAX_BODY_BYTES = 256 << 20
"""Size limit of a reply that is not streamed."""

MAX_EVENT_BYTES = 16 << 20
"""Size limit of an event. An event may contain all prompt ids: two million of them at 7 bytes each."""

_MAX_ERROR_BYTES = 64 << 10

_ERROR_BODY_SECONDS = 2.0
"""Time limit for the body of an error. If it does not arrive, the status is enough."""

_SESSION_TOKEN = "x-session-token"

_KEPT_TOKENS = 65_536
"""Maximum number of sessions with a stored router token. For older sessions the router chooses a server again."""

_TOKEN_CHARACTERS = 512
"""Longer tokens are not stored."""

_HIGH_WATER = 1 << 18
"""Number of unread bytes of a body after which the client stops receiving."""

# vLLM and SGLang use uvicorn, which closes idle connections after 5 s. Close them earlier, so that no request is sent
# on a connection that the server is closing.
_KEEPALIVE_SECONDS = 3.0

Stage: TypeAlias = Literal["connect", "first_token", "between_tokens", "total"]

_T = TypeVar("_T")


class WrongAddress(EngineUnavailable):
    """The engine can't be reached at its URL, and retrying can't help."""


class HttpClient:
    """The connections to one engine. Use it on one event loop.

    It does not follow redirects or decompress replies, and ignores proxies and credentials in the environment.

    Args:
        base_url: `http://host:port`, followed by a path if the engine is served under one. A final `/v1`, as in the
            base URLs of OpenAI clients, is removed.
        api_key: sent as a bearer token.
        timeouts: see `Timeouts`.

    Raises:
        InvalidRequest: the URL or API key is invalid.

    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self._base = _checked_base(base_url)
        self._headers = {"accept-encoding": "identity", "user-agent": "tokentape"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {header_value(api_key, 'api_key')}"
        self._tokens: OrderedDict[str, str] = OrderedDict()
        """For each session, the last token from llm-d's router, which names the server with the session's cache."""
        self._connector: _Connector | None = None
        self._session: aiohttp.ClientSession | None = None
        self._closed = self._has_answered = False

    @property
    def generation(self) -> int:
        """How often a connection was opened while no other was open, as after a server restart."""
        return self._connector.generation if self._connector is not None else 0

    async def get(self, path: str, *, stage: Stage = "first_token") -> bytes:
        """Return the body of the reply to a GET, within the timeout of `stage`. Raises the errors of `post`."""
        return await self._whole(path, None, {}, _Limit.after(stage, self.timeouts))

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the body of the reply to a JSON `body`, within `Timeouts.total`.

        Raises:
            InvalidRequest: the engine refuses the request's content (400, 422).
            TooLarge: the engine refuses a body of this size (413).
            EngineUnavailable: the engine can't be reached, or accepts no requests now (429, 502, 503).
            EngineTimeout: the engine did not reply in time.
            EngineContractError: the reply is larger than `MAX_BODY_BYTES`, or compressed.
            EngineError: any other failure.

        """
        return await self._whole(path, body, headers, _Limit.after("total", self.timeouts))

    async def arrivals(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[list[bytes], None]:
        """Yield the server-sent events of the reply to a JSON `body`, in lists of events that arrived together.

        Closing the generator closes the connection. Raises the errors of `post`, `EngineContractError`
        for an event that can't be read, and `EngineError` if the connection breaks or the stream ends within an event.
        """
        total, between = _Limit.after("total", self.timeouts), _Limit.after("between_tokens", self.timeouts)
        limit = min(_Limit.after("first_token", self.timeouts), total)
        reader, now = SseReader(), asyncio.get_running_loop().time
        reply = await self._send(path, body, headers, limit)
        try:
            while chunk := await reply.read(limit):
                if events := reader.feed(chunk):
                    yield events
                    between.deadline = now() + between.seconds
                    limit = between if between.deadline < total.deadline else total
        finally:
            reply.close()
        if reader.pending:
            raise EngineError(f"the engine's stream at {path} ended within an event; send the request again")

    async def close(self) -> None:
        """Close all connections, including those of running calls. It can be called again."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _whole(self, path: str, body: bytes | None, headers: Mapping[str, str], limit: _Limit) -> bytes:
        reply = await self._send(path, body, headers, limit)
        received = await reply.read_all(limit, MAX_BODY_BYTES)
        if received is None:
            raise EngineContractError(f"the engine's reply at {path} exceeds the limit of {MAX_BODY_BYTES} bytes")
        return received

    async def _send(self, path: str, body: bytes | None, headers: Mapping[str, str], limit: _Limit) -> _HttpReply:
        """Send a request and return the reply before its body is read. Raise an error for any status other than 200."""
        if self._closed:
            raise EngineUnavailable("this engine was closed; open it again")
        content = headers if body is None else {**headers, "content-type": "application/json"}
        session = headers.get("x-session-id")
        if session is not None and session in self._tokens:
            content = {**content, _SESSION_TOKEN: self._tokens[session]}
        # aiohttp warns about bodies of more than 1 MiB passed as bytes, but not about files.
        data = body if body is None or len(body) <= 1 << 20 else io.BytesIO(body)
        try:
            async with asyncio.timeout_at(limit.deadline):
                method = "GET" if body is None else "POST"
                response = await self._client_session().request(
                    method, self._base + path, data=data, headers=content, allow_redirects=False
                )
        except aiohttp.ConnectionTimeoutError:
            raise EngineUnavailable(
                f"no connection to the engine within {self.timeouts.connect:g} s (connect); is it running?"
            ) from None
        except TimeoutError:
            raise limit.error(path) from None
        except aiohttp.ClientConnectorError as error:
            raise _unconnected(error) from None
        except aiohttp.ClientError as error:
            scheme = urlsplit(self._base).scheme
            todo = "send the request again" if self._has_answered else f"does it speak {scheme}?"
            raise EngineUnavailable(
                f"the connection to the engine broke before it answered at {path} ({type(error).__name__}); {todo}"
            ) from None
        self._has_answered = True
        reply = _HttpReply(response, path)
        token = response.headers.get(_SESSION_TOKEN, "")
        if session is not None and 0 < len(token) <= _TOKEN_CHARACTERS:
            self._tokens[session] = token
            self._tokens.move_to_end(session)
            if len(self._tokens) > _KEPT_TOKENS:
                self._tokens.popitem(last=False)
        encoding = response.headers.get("Content-Encoding", "identity")
        if reply.status == 200 and encoding.strip().lower() == "identity":
            return reply
        if reply.status == 200:
            reply.close()
            raise EngineContractError(
                f"the engine's reply at {path} has a content-encoding ({safe_name(encoding) or 'unknown'}); expected "
                "none: switch compression off in the engine or in the proxy before it"
            )
        if reply.status < 200:
            reply.close()
            raise EngineUnavailable(f"the engine answered {reply.status} at {path}; expected status 200")
        refusal = status_error(reply.status, path, await reply.error_body())
        if reply.status in (429, 503):
            refusal.retry_after = retry_after(response.headers.get("Retry-After", ""))
        raise refusal

    def _client_session(self) -> aiohttp.ClientSession:
        """Return the aiohttp session. It belongs to an event loop, so the first request creates it."""
        if self._session is None:
            self._connector = _Connector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=self._connector,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, connect=self.timeouts.connect),
                read_bufsize=_HIGH_WATER,
            )
        return self._session


class _Connector(aiohttp.TCPConnector):
    """Reuses a connection only if the server has not sent additional data on it, which would corrupt the next reply."""

    generation = 0
    """See `HttpClient.generation`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._alive: set[asyncio.Transport] = set()

    async def connect(self, *args: Any, **options: Any) -> Connection:
        """Return an idle connection, or else a new one."""
        connection = await super().connect(*args, **options)
        while connection.protocol is not None and connection.protocol.should_close:
            connection.close()
            connection = await super().connect(*args, **options)
        transport = connection.transport
        if transport is not None and transport not in self._alive:
            self._alive = {other for other in self._alive if not other.is_closing()}
            self.generation += not self._alive
            self._alive.add(transport)
        return connection


@dataclass(slots=True, order=True)
class _Limit:
    """A deadline in event loop time, and the timeout that set it. Each token extends it."""

    deadline: float
    stage: Stage
    seconds: float

    @classmethod
    def after(cls, stage: Stage, timeouts: Timeouts) -> _Limit:
        seconds: float = getattr(timeouts, stage)
        return cls(asyncio.get_running_loop().time() + seconds, stage, seconds)

    def error(self, path: str) -> EngineTimeout:
        fault = "did not finish" if self.stage == "total" else "was silent"
        return EngineTimeout(
            f"the engine {fault} at {path} within {self.seconds:g} s (timeout {self.stage}); is it paused or "
            "overloaded?"
        )


class _HttpReply:
    """A reply with the body not read yet."""

    def __init__(self, response: aiohttp.ClientResponse, path: str) -> None:
        self.status = response.status
        self._response = response
        self._path = path
        framed = response.headers.keys() & {"Content-Length", "Transfer-Encoding"}
        connection = None if framed else response.connection
        self._ended_by = connection.protocol if connection is not None else None
        """The connection if closing it marks the end of the body, else None."""

    async def read(self, limit: _Limit) -> bytes:
        """Wait for the next bytes of the body and return them. Return no bytes at the end."""
        # The timeout only interrupts waits, and nothing waits while an engine sends without pause.
        loop = asyncio.get_running_loop()
        if loop.time() >= limit.deadline:
            raise limit.error(self._path)
        content = self._response.content
        expiry = loop.call_at(limit.deadline, content.set_exception, TimeoutError())
        try:
            chunk = await content.readany()
            if not chunk and self._ended_by is not None and isinstance(self._ended_by.exception(), OSError):
                raise aiohttp.ClientPayloadError
        except TimeoutError:
            raise limit.error(self._path) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"the connection broke during the engine's reply at {self._path} ({type(error).__name__}); at "
                "most an aborted turn was recorded, send the request again"
            ) from None
        finally:
            expiry.cancel()
        return chunk

    async def read_all(self, limit: _Limit, max_bytes: int) -> bytes | None:
        """Return the body, or None if it is larger than `max_bytes`, and close the reply."""
        received = bytearray()
        try:
            while chunk := await self.read(limit):
                received += chunk
                if len(received) > max_bytes:
                    return None
        finally:
            self.close()
        return bytes(received)

    async def error_body(self) -> bytes:
        """Return the body of an error, or no bytes if it stalls, breaks off or is large."""
        end = asyncio.get_running_loop().time() + _ERROR_BODY_SECONDS
        try:
            return await self.read_all(_Limit(end, "total", _ERROR_BODY_SECONDS), _MAX_ERROR_BYTES) or b""
        except EngineError:
            return b""

    def close(self) -> None:
        """Close the connection unless the whole body was read."""
        self._response.close()


class SseReader:
    """Reads server-sent events from chunks of bytes that may be cut anywhere.

    It follows the event-stream format of the WHATWG HTML standard: lines end with LF, CR or CRLF; `data` lines of one
    event are joined by LF; comments and the `event`, `id` and `retry` fields are skipped. It is stricter in one point:
    a line with any other field is an error, because it shows that the bytes are not an event stream.

        >>> reader = SseReader()
        >>> reader.feed(b'data: {"a"')
        []
        >>> reader.feed(b': 1}\\n\\ndata: [DONE]\\n\\n')
        [b'{"a": 1}', b'[DONE]']
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False

    @property
    def pending(self) -> bool:
        """Whether an event is incomplete. True at the end of a stream means that the stream was cut off."""
        return bool(self._line or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Read the next bytes, and return the data of the events that they complete.

        Raises `EngineContractError` for an event that is too large or not UTF-8, and for a line with an unknown field.
        """
        if not chunk:
            return []
        usual = chunk.startswith(b"data: {") and chunk.endswith(b"}\n\n") and b"\r" not in chunk
        if usual and chunk.find(b"\n") == len(chunk) - 2 and len(chunk) <= self._max and not (self._line or self._data):
            # The chunk is one event of one line. If it is not UTF-8, decoding its JSON fails later.
            self._after_cr = False
            return [chunk[6:-2]]
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        events: list[bytes] = []
        for line in chunk.splitlines(keepends=True):
            text = line.rstrip(b"\r\n")
            self._size += len(text)
            if self._size > self._max:
                raise EngineContractError(
                    f"the engine sent a server-sent event that exceeds the limit of {self._max} bytes"
                )
            self._line += text
            if len(text) < len(line):
                self._end_line(events)
        return events

    def _end_line(self, events: list[bytes]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data.clear()
            self._size = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            try:
                value.decode()
            except UnicodeDecodeError:
                raise EngineContractError("the engine sent a server-sent event that is not UTF-8") from None
            self._data.append(value.removeprefix(b" "))
        elif name not in (b"", b"event", b"id", b"retry"):
            raise EngineContractError(
                "the engine's reply is not a stream of server-sent events: a line has an unknown field; check that "
                "the URL is the engine's own"
            )


async def attempt(reply: Awaitable[_T]) -> _T | None:
    """Return a server's reply, or None if it fails, for example because the server has no such endpoint.

    Raises `EngineUnavailable`, `EngineTimeout` and `InvalidRequest`.
    """
    try:
        return await reply
    except (EngineUnavailable, EngineTimeout):
        raise
    except EngineError:
        return None


def _unconnected(error: aiohttp.ClientConnectorError) -> EngineUnavailable:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        if error.errno == socket.EAI_AGAIN:
            return EngineUnavailable("no DNS server answers for the engine's host name; is the network up?")
        return WrongAddress("the engine's host name is unknown; correct the URL")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return WrongAddress("the engine's TLS certificate is not trusted here; name a CA file with SSL_CERT_FILE")
    if isinstance(error, aiohttp.ClientSSLError):
        return WrongAddress("the engine does not use https; pass its URL with http://")
    if error.errno in (errno.ECONNREFUSED, None):
        return EngineUnavailable("the engine refuses connections; is it running?")
    return EngineUnavailable(f"the engine can't be reached ({error.strerror}); is its URL right?")


def header_value(value: str, param: str) -> str:
    """Return `value` if it can be sent in a header, else raise `InvalidRequest`."""
    if not 0 < len(value) <= 1024 or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"{param} must be 1 to 1024 printable ASCII characters", param)
    return value


def _checked_base(base_url: str) -> str:
    try:
        url = urlsplit(base_url)
        port = url.port
        # The resolver encodes the host name too, and fails for some names, such as `a..b`.
        (url.hostname or "").encode("idna")
    except ValueError:
        raise InvalidRequest("the engine's URL is malformed; expected http://host:port", "base_url") from None
    plain = base_url.isascii() and base_url.isprintable() and " " not in base_url and port != 0
    more = "@" in url.netloc or url.query or url.fragment
    if not plain or more or url.scheme not in ("http", "https") or not url.hostname:
        raise InvalidRequest(
            "the engine's URL must be http://host:port or https://host:port, without user, query or fragment",
            "base_url",
        )
    return base_url.rstrip("/").removesuffix("/v1")
