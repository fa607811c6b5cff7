"""HTTP for all endpoints: body size limits, JSON, error bodies, event streams, client disconnects."""

from __future__ import annotations

import asyncio
import codecs
import logging
import math
import re
import traceback
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokentape.errors import InvalidRequest, TokentapeError, TooLarge, WrongContentType

MAX_DEPTH = 64
"""Maximum nesting of free-form JSON from callers, far below Python's recursion limit."""

MAX_ENTRIES = 50_000
"""Limit on messages, input items, tools and parts in a body, because each costs time, however short."""

_T = TypeVar("_T")

_log = logging.getLogger("tokentape.gateway")
_decoder = msgspec.json.Decoder()

_PIECE_BYTES = 1 << 16

_SEARCHED = 1 << 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_NUMBER = re.compile(rb"-?\b(?:NaN|Infinity)\b")
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
"""An escape in a string. The group is half of a surrogate pair without the other half."""


class ClientLeft(Exception):
    """The client closed the connection before its request was answered."""


def parse_json(body: bytes) -> Any:
    """Parse a body as strict JSON.

    Raises `InvalidRequest` for an empty body, NaN, infinities, lone surrogates and numbers too large for a double.
    """
    if not body:
        raise InvalidRequest("the body is empty; expected JSON")
    try:
        return _decoder.decode(body)
    except RecursionError:
        raise InvalidRequest("the body's JSON is nested too deeply; flatten it") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {_why_refused(body, error)}") from None


def _why_refused(body: bytes, error: Exception) -> str:
    """Return why `body` can't be decoded, and what to send instead if that is known."""
    if body.startswith(codecs.BOM_UTF8):
        return "it begins with a byte order mark: send it without"
    if not isinstance(error, msgspec.MsgspecError):
        return "it is not UTF-8"  # the text of a UnicodeDecodeError quotes the body
    # Strings may contain these words too, so leave strings out.
    if found := _NO_NUMBER.search(_STRING.sub(b"", body[:_SEARCHED])):
        return f"JSON has no {found[0].decode()}: send a number or null"
    # For half of a pair near the end of the body, msgspec says that the body was truncated.
    if any(escape[1] for escape in _ESCAPE.finditer(body[:_SEARCHED])):
        return "a string contains half of a surrogate pair: cut texts between whole characters"
    if isinstance(error, msgspec.ValidationError):
        return "a number is too large for a double: send a smaller one"
    return str(error).removeprefix("JSON is malformed: ")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the request body.

    Raises `TooLarge` once more than `max_bytes` are announced or received, and `WrongContentType` if it is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise WrongContentType(
            f"the body has Content-Encoding: {encoding[:64]}; the gateway takes uncompressed bodies only, so send it "
            "without this header, and turn compression of requests off in any proxy"
        )
    too_large = TooLarge(f"the body is too large; this gateway accepts at most {max_bytes} bytes")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    pieces, size = list[bytes](), 0
    async for piece in request.stream():
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise too_large
    return b"".join(pieces)


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a JSON request. Raises `WrongContentType` and `TooLarge`.

    Browsers let a cross-site page send other content types without a preflight, but not `application/json`. So the
    header may be missing only if there is no `Origin`, which browsers send.
    """
    content_type = request.headers.get("content-type")
    kind = (content_type or "").partition(";")[0].strip().lower()
    body = await read_body(request, max_bytes)
    from_page = content_type is None and "origin" in request.headers and body
    if from_page or (content_type is not None and kind != "application/json" and not kind.endswith("+json")):
        raise WrongContentType("the body must be JSON; send it with the header Content-Type: application/json")
    return body


def read_as(value: Any, kind: type[_T], where: str = "") -> _T:
    """Convert parsed JSON to the msgspec Struct `kind`. `where` is its path in the body.

    Raises `InvalidRequest` with the path of the wrong field.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason, field = explain(error)
        if reason.startswith("invalid enum value"):
            # msgspec quotes the value, which is the caller's text.
            reason = f"this value is not allowed{_allowed(kind, field)}"
        elif "` of length " in reason or re.search("[<>]=? [-0-9.e+]+$", reason):
            reason += _value_text(value, field)
        path = f"{where}.{field}".strip(".")
        raise InvalidRequest(f"{path or 'the body'}: {reason}", param_of(path) or None) from None


def param_of(path: str) -> str:
    """Return the parameter that contains the field at a path, such as `messages` for `messages[2].content`."""
    return re.split(r"[.\[]", path)[0]


def _value_text(value: Any, where: str) -> str:
    """Return the end of an error about a number or a length that is out of range."""
    if "..." in where:
        # The path does not have the keys of dicts.
        return ""
    for name in re.findall(r"[^.\[\]]+", where):
        value = value[int(name) if isinstance(value, list) else name]
    return f", got {str(value)[:32]}" if isinstance(value, int | float) else f", got {len(value)}"


def _allowed(kind: type, where: str) -> str:
    """Return the end of an error with the values that a field allows; empty if its type is not a single `Literal`."""
    info: Any = msgspec.inspect.type_info(kind)
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[[^\]]*\]", ".*", where)):
        if name == "*":
            info = getattr(info, "item_type", None)
        else:
            info = next((field.type for field in getattr(info, "fields", ()) if field.encode_name == name), None)
        if isinstance(info, msgspec.inspect.UnionType):
            members = [member for member in info.types if not isinstance(member, msgspec.inspect.NoneType)]
            info = members[0] if len(members) == 1 else None
    is_literal = isinstance(info, msgspec.inspect.LiteralType)
    values = list(map(str, info.values)) if is_literal else []
    return f"; expected {'one of ' * (len(values) > 1)}{', '.join(values)}" if values else ""


def explain(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return an error's reason, and the path of the invalid value, such as `messages[2].content`."""
    reason, _, path = str(error).partition(" - at `$")
    return reason[:1].lower() + reason[1:], path.rstrip("`").removeprefix(".")


def check_depth(value: Any, where: str) -> None:
    """Raise `InvalidRequest` if `value`, which is at the path `where`, is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    reason = f"{where} is nested too deeply; expected at most {MAX_DEPTH} levels, so flatten it"
    raise InvalidRequest(reason, param_of(where))


def check_count(body: Any, lists: Iterable[str], parts: Collection[str], before: int = 0) -> int:
    """Count the messages in a body and their parts, plus `before`, the count of messages omitted from `body`.

    `parts` are the keys under which entries have further lists; other lists, as in call arguments and schemas, are not
    counted. Raises `TooLarge` if a field in `lists` has more than `MAX_ENTRIES`.
    """
    counts = dict.fromkeys(lists, 0) | {"messages": before}
    for name in counts:
        unread = [body.get(name) if isinstance(body, dict) else None]
        while unread:
            value = unread.pop()
            if isinstance(value, list):
                counts[name] += len(value)
                unread += value
            elif isinstance(value, dict):
                unread += [value[key] for key in parts if key in value]
            if counts[name] > MAX_ENTRIES:
                raise TooLarge(f"{name} has more than {MAX_ENTRIES} entries and parts; merge short ones")
    return counts["messages"]


encode_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
"""Encodes a value as JSON. NaN and infinities become null."""


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, "application/json")


def error_body(error: TokentapeError) -> dict[str, Any]:
    """Return an error body in OpenAI's format, which requests outside any wire API also get."""
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "param": error.param if isinstance(error, InvalidRequest) else None,
            "code": error.code,
        }
    }


def error_headers(error: TokentapeError) -> dict[str, str]:
    """Return the headers of an error response. OpenAI's and Anthropic's clients obey `x-should-retry`."""
    headers = {"x-should-retry": "true" if error.retry else "false"}
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: TokentapeError, body: Callable[[TokentapeError], Any] = error_body) -> Response:
    return json_response(body(error), error.status, error_headers(error))


def unexpected(error: Exception) -> TokentapeError:
    """Log an unexpected exception. Return the error for the client.

    Both omit the exception's text, which may quote a prompt.
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("unexpected %s\n%s", type(error).__name__, where)
    return TokentapeError("an unexpected error; see the gateway's log for its traceback")


class CancelledIfClientLeaves:
    """Cancels its `with` block and raises `ClientLeft` if the client disconnects. Read the request body first."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    def __enter__(self) -> None:
        self._working = asyncio.current_task()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        assert self._working is not None
        self._working.cancel()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._watching.cancel()
        assert self._working is not None
        # As in asyncio.timeout, the task may also have been cancelled for a different reason.
        if self._left and self._working.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise ClientLeft from None


class EventStream(Response):
    """A response of server-sent events. If the client disconnects, the event generator is closed.

    If the generator raises, `error_event` writes the last event, because the status has already been sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], headers: Mapping[str, str], error_event: Callable[[TokentapeError], bytes]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.complete = False
        """Whether every event was sent."""
        self._events = events
        self._error_event = error_event
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeft):
            async with aclosing(self._events):
                with CancelledIfClientLeaves(receive):
                    await self._send(send)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            self.complete = True
        except Exception as error:
            shown = error if isinstance(error, TokentapeError) else unexpected(error)
            await send({"type": "http.response.body", "body": self._error_event(shown), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_whole(response: Response, scope: Scope, receive: Receive, send: Send) -> bool:
    """Send a response that is not streamed. Return whether the client took it, except for what fits into buffers.

    A large body is sent in pieces, because the server buffers a single piece of any size for a client that reads none.
    """
    body = bytes(response.body)
    if len(body) <= _PIECE_BYTES:
        await response(scope, receive, send)
        return True
    with suppress(ClientLeft), CancelledIfClientLeaves(receive):
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        for start in range(0, len(body), _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True
    return False


def encode_event(value: Any, name: str | None = None) -> bytes:
    """Return a server-sent event with `value` as JSON, and an event name if the wire API uses names."""
    data = b"data: " + encode_json(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data
