"""The HTTP client of remote engines: connections, timeouts and errors.

Everything that can go wrong between here and an engine becomes one of the errors of `tokentape.errors`. Their texts
name the path, the status and the limit that was met; never a body, a header or the engine's address.
"""

from __future__ import annotations

import asyncio
import io
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp.connector import Connection

from tokentape.engines._base import Timeouts
from tokentape.engines._event_stream import SseReader
from tokentape.engines._status_errors import retry_after, safe_name, status_error
from tokentape.errors import (
    EngineContractError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
)

MAX_BODY_BYTES = 256 << 20
"""Largest reply accepted that is not streamed."""

_MAX_ERROR_BYTES = 64 << 10

_ERROR_BODY_SECONDS = 2.0
"""How long the body of an error may take: the status says enough without it."""


_SESSION_TOKEN = "x-session-token"

_KEPT_TOKENS = 65_536
"""Sessions; of one that was forgotten the router chooses a server anew."""

_TOKEN_CHARACTERS = 512
"""A longer one is not kept."""

_HIGH_WATER = 1 << 18
"""Bytes of a body that may wait to be read before the server is made to wait."""

# uvicorn, which vLLM and SGLang serve with, closes idle connections after 5 s. We drop them first, so that no
# request is sent into a connection that is being closed.
_KEEPALIVE_SECONDS = 3.0

Stage: TypeAlias = Literal["connect", "first_token", "between_tokens", "total"]

_T = TypeVar("_T")


class HttpClient:
    """Connections to one engine. For one event loop.

    Redirects are not followed, replies not decompressed, and neither proxies nor credentials are taken from the
    environment: an engine is addressed directly.

    Args:
        base_url: `http://host:port`, with a path where the engine is mounted below one. An ending `/v1`, which
            OpenAI clients want, is dropped.
        api_key: sent as a bearer token.
        timeouts: see `Timeouts`.

    Raises:
        InvalidRequest: the address or key can't be used.

    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self._base = _checked_base(base_url)
        self._headers = {"accept-encoding": "identity", "user-agent": "tokentape"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {header_value(api_key, 'api_key')}"
        self._tokens: OrderedDict[str, str] = OrderedDict()
        """By session what llm-d's router said last of where its cache is; it wants that back with the next call."""
        self._connector: _Connector | None = None
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def generation(self) -> int:
        """Grows whenever a connection is opened while no other is alive, as after a restart of the server."""
        return self._connector.generation if self._connector is not None else 0

    async def get(self, path: str, *, stage: Stage = "first_token") -> bytes:
        """Return the body of a GET, within the timeout of `stage`. Raises as `post`."""
        return await self._whole("GET", path, None, {}, _Limit.after(stage, self.timeouts))

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the body of the reply to a JSON `body`, within `Timeouts.total`.

        Raises:
            InvalidRequest: the engine refused the request's content (400, 422).
            TooLarge: the engine takes no body of this size (413).
            EngineUnavailable: not reachable, or it takes no requests now (429, 502, 503).
            EngineTimeout: no answer in time.
            EngineContractError: the reply is larger than `MAX_BODY_BYTES`, or compressed.
            EngineError: anything else.

        """
        return await self._whole("POST", path, body, headers, _Limit.after("total", self.timeouts))

    async def arrivals(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[list[bytes], None]:
        """Yield the data of the server-sent events of the reply to a JSON `body`, those that arrived together at once.

        Close it (`contextlib.aclosing`) to give up: the connection is closed with it. Raises as `post` and
        `SseReader.feed`, and `EngineError` if the stream breaks off or ends within an event.
        """
        total, between = _Limit.after("total", self.timeouts), _Limit.after("between_tokens", self.timeouts)
        limit = min(_Limit.after("first_token", self.timeouts), total)
        reader, now = SseReader(), asyncio.get_running_loop().time
        reply = await self._send("POST", path, body, headers, limit)
        try:
            while chunk := await reply.read(limit):
                if events := reader.feed(chunk):
                    yield events
                    between.at = now() + between.seconds
                    limit = between if between.at < total.at else total
        finally:
            reply.close()
        if reader.pending:
            raise EngineError(f"the engine's stream at {path} ended within an event; send the request again")

    async def close(self) -> None:
        """Close all connections, running calls included. May be called again."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _whole(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], limit: _Limit
    ) -> bytes:
        reply = await self._send(method, path, body, headers, limit)
        received = await reply.read_all(limit, MAX_BODY_BYTES)
        if received is None:
            raise EngineContractError(f"the engine's reply at {path} is larger than {MAX_BODY_BYTES} bytes")
        return received

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], limit: _Limit
    ) -> _HttpReply:
        """Return the reply with its body still to be read. Anything but a 200 is raised."""
        if self._closed:
            raise EngineUnavailable("this engine was closed; open it again")
        content = headers if body is None else {**headers, "content-type": "application/json"}
        session = headers.get("x-session-id")
        if session is not None and session in self._tokens:
            content = {**content, _SESSION_TOKEN: self._tokens[session]}
        # aiohttp warns of more than 1 MiB as bytes, but not of a file.
        data = body if body is None or len(body) <= 1 << 20 else io.BytesIO(body)
        try:
            async with asyncio.timeout_at(limit.at):
                response = await self._opened().request(
                    method, self._base + path, data=data, headers=content, allow_redirects=False
                )
        except aiohttp.ConnectionTimeoutError:
            raise EngineUnavailable(
                f"no connection to the engine within {self.timeouts.connect:g} s (connect); is it running?"
            ) from None
        except TimeoutError:
            raise limit.error(path) from None
        except aiohttp.ClientConnectorError:
            raise EngineUnavailable("the engine refuses connections or its address is wrong; is it running?") from None
        except aiohttp.ClientError as error:
            raise EngineUnavailable(
                f"the connection to the engine broke before it answered at {path} ({type(error).__name__})"
            ) from None
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
                "none: switch compression off in the engine or the proxy between"
            )
        if reply.status < 200:
            reply.close()
            raise EngineUnavailable(f"the engine answered {reply.status} at {path}, which is no reply")
        refusal = status_error(reply.status, path, await reply.error_body())
        if reply.status in (429, 503):
            refusal.retry_after = retry_after(response.headers.get("Retry-After", ""))
        raise refusal

    def _opened(self) -> aiohttp.ClientSession:
        """Return the session. It belongs to an event loop, so it is made with the first request."""
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
    """Keeps no connection on which the server sent more than it was asked for: it is no part of the next reply.

    Counts how often a connection is opened while no other is alive: a server that restarts ends all of them.
    """

    generation = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._alive: set[asyncio.Transport] = set()

    async def connect(self, *args: Any, **options: Any) -> Connection:
        """Return a connection that is free, a new one if there is none."""
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
    """A point in the event loop's time, which is moved on with each token, and which timeout it comes from."""

    at: float
    stage: Stage
    seconds: float

    @classmethod
    def after(cls, stage: Stage, timeouts: Timeouts) -> _Limit:
        seconds: float = getattr(timeouts, stage)
        return cls(asyncio.get_running_loop().time() + seconds, stage, seconds)

    def error(self, path: str) -> EngineTimeout:
        found = "did not finish" if self.stage == "total" else "was silent"
        return EngineTimeout(
            f"the engine {found} at {path} within {self.seconds:g} s (timeout {self.stage}); is it paused or "
            "overloaded?"
        )


class _HttpReply:
    """A reply with its head read."""

    def __init__(self, response: aiohttp.ClientResponse, path: str) -> None:
        self.status = response.status
        self._response = response
        self._path = path
        framed = response.headers.keys() & {"Content-Length", "Transfer-Encoding"}
        connection = None if framed else response.connection
        self._ended_by = connection.protocol if connection is not None else None
        """The connection, where its end is the end of the body."""

    async def read(self, limit: _Limit) -> bytes:
        """Return what has arrived of the body, waiting for it; nothing at the end."""
        # `timeout_at` ends a wait only, and an engine that sends all the time leaves nothing to wait for.
        if asyncio.get_running_loop().time() >= limit.at:
            raise limit.error(self._path)
        try:
            async with asyncio.timeout_at(limit.at):
                chunk = await self._response.content.readany()
            if not chunk and self._ended_by is not None and isinstance(self._ended_by.exception(), OSError):
                raise aiohttp.ClientPayloadError
        except TimeoutError:
            raise limit.error(self._path) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"the connection broke within the engine's reply at {self._path} ({type(error).__name__}); nothing of "
                "it was kept, send the request again"
            ) from None
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
        """Return the body of an error; nothing if it stalls, breaks off or is large."""
        end = asyncio.get_running_loop().time() + _ERROR_BODY_SECONDS
        try:
            return await self.read_all(_Limit(end, "total", _ERROR_BODY_SECONDS), _MAX_ERROR_BYTES) or b""
        except EngineError:
            return b""

    def close(self) -> None:
        """Close the connection, unless the whole body was read."""
        self._response.close()


async def attempt(answer: Awaitable[_T]) -> _T | None:
    """Return what a server answers; None if it has no such endpoint or answers something else.

    Raises `EngineUnavailable` and `EngineTimeout`.
    """
    try:
        return await answer
    except (EngineUnavailable, EngineTimeout):
        raise
    except EngineError:
        return None


def header_value(value: str, param: str) -> str:
    """Return `value` if it can be sent in a header, else raise `InvalidRequest`."""
    if not 0 < len(value) <= 1024 or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"{param} must be 1 to 1024 printable ASCII characters", param)
    return value


def _checked_base(base_url: str) -> str:
    try:
        url = urlsplit(base_url)
        port = url.port
        # The resolver's first step, which not every host survives: `a..b` does not.
        (url.hostname or "").encode("idna")
    except ValueError:
        raise InvalidRequest("the engine's address is not a URL; expected http://host:port", "base_url") from None
    whole = base_url.isascii() and base_url.isprintable() and " " not in base_url and port != 0
    if not whole or url.scheme not in ("http", "https") or not url.hostname or _more_than_an_address(url):
        raise InvalidRequest(
            "the engine's address must be http://host:port or https://host:port, without user, query or fragment",
            "base_url",
        )
    return base_url.rstrip("/").removesuffix("/v1")


def _more_than_an_address(url: SplitResult) -> bool:
    return "@" in url.netloc or bool(url.query) or bool(url.fragment)
