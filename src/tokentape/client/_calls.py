"""The calls of both clients: path, body, response decoding, and retries."""

from __future__ import annotations

import math
import random
import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
import numpy as np
import numpy.typing as npt

from tokentape._session.jsonl import trajectory_from_json
from tokentape.client._json_values import json_object
from tokentape.client._results import EngineState, SessionEntry, SessionState
from tokentape.errors import Conflict, GatewayUnavailable, InvalidRequest, NotFound, StoreUnavailable, TokentapeError
from tokentape.types import Trajectory

T = TypeVar("T")

JSON_LINES = "application/jsonl"
PARQUET = "application/vnd.apache.parquet"

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 8.0
_TRY_AGAIN = frozenset({429, 502, 503, 504})
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_NEVER_SENT = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)


@dataclass(frozen=True)
class Call(Generic[T]):
    """An HTTP request to the gateway. `read` decodes the response."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes | None = None
    content_type: str = "application/json"
    accept: str = "*/*"
    wait: float = 0.0
    """Seconds to add to the timeout, for slow responses."""
    repeatable: bool = True
    """Whether the request is idempotent."""
    repeated_body: bytes | None = None
    """The body of a retry after a lost response, if it differs."""
    settle: Callable[[TokentapeError, bool], T] | None = None
    """Returns the result for an error, or raises. The bool says whether an earlier response was lost."""


class Retries(Generic[T]):
    """The requests of one call, the delays between them, and the call's result.

    A request is repeated up to `max_retries` times, within `timeout` + `call.wait` seconds.
    """

    def __init__(self, call: Call[T], max_retries: int, timeout: float) -> None:
        self._call = call
        self._left = max_retries
        self._delay = _FIRST_DELAY
        self._end = time.monotonic() + timeout + call.wait
        self._repeated = False
        """Whether an earlier request with a lost response may have succeeded."""

    def request(self) -> dict[str, Any]:
        """Return the keyword arguments of the next request."""
        call = self._call
        return {
            "method": call.method,
            "url": call.path,
            "content": call.repeated_body if self._repeated and call.repeated_body else call.body,
            "headers": {"accept": call.accept} | ({} if call.body is None else {"content-type": call.content_type}),
            "timeout": max(self._end - time.monotonic(), 0.01),
        }

    def delay(self, failure: httpx2.RequestError | httpx2.Response) -> float | None:
        """Return the seconds to wait before the next request, or None to give up.

        If the response was lost, the request is retried only if the call is `repeatable`.
        """
        delay = self._delay * random.uniform(0.75, 1.0)
        if isinstance(failure, httpx2.Response):
            advice = failure.headers.get("x-should-retry")
            if failure.is_success or advice == "false" or (advice is None and failure.status_code not in _TRY_AGAIN):
                return None
            delay = max(delay, _retry_after(failure) or 0.0)
        lost = _answer_lost(failure)
        hopeless = isinstance(failure, _NEVER_SENT) or time.monotonic() + delay > self._end
        if self._left == 0 or hopeless or (lost and not self._call.repeatable):
            return None
        self._repeated |= lost
        self._left -= 1
        self._delay = min(2 * self._delay, _LONGEST_DELAY)
        return delay

    def result(self, response: httpx2.Response) -> T:
        """Read the response. Raises the error that the gateway returned, or `GatewayUnavailable`."""
        if response.is_success:
            return self._call.read(response.content)
        error = answered_error(response)
        if self._call.settle is None:
            raise error
        return self._call.settle(error, self._repeated)


def _answer_lost(failure: httpx2.RequestError | httpx2.Response) -> bool:
    """Return whether the request may have succeeded: it got no response, or a response that is not the gateway's."""
    if isinstance(failure, httpx2.Response):
        # A gateway that has lost its database connection does not know whether the write succeeded.
        return "x-should-retry" not in failure.headers or isinstance(answered_error(failure), StoreUnavailable)
    return not isinstance(failure, _NOT_SENT)


def _retry_after(response: httpx2.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d*)?", text) else None


def http_options(base_url: str, api_key: str | None, timeout: float, max_retries: int) -> dict[str, Any]:
    """Return the keyword arguments of an HTTP client. Raises `InvalidRequest` for an invalid argument of a client."""
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise InvalidRequest(f"timeout is {timeout!r}: expected a positive, finite number of seconds", "timeout")
    if not (isinstance(max_retries, int) and max_retries >= 0):
        raise InvalidRequest(f"max_retries is {max_retries!r}: expected a whole number of at least 0", "max_retries")
    if not base_url.lower().startswith(("http://", "https://")):
        raise InvalidRequest(f"a gateway's URL begins with http:// or https://, not {base_url!r}", "base_url")
    if "/sessions/" in base_url:
        raise InvalidRequest(f"{base_url} is a session's URL; expected the gateway's, http://host:port", "base_url")
    if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("an API key has printable ASCII characters only; is there a line break in it?", "api_key")
    if api_key is not None and not api_key.strip():
        raise InvalidRequest("the API key is empty; leave it out for a gateway without keys", "api_key")
    return {"base_url": base_url, "headers": {} if api_key is None else {"authorization": f"Bearer {api_key}"}}


def unreachable(base_url: str, error: httpx2.RequestError) -> GatewayUnavailable:
    """Return the error for a request that was not answered."""
    return GatewayUnavailable(f"no answer from the gateway at {base_url} ({type(error).__name__}); is it running?")


def answered_error(response: httpx2.Response) -> TokentapeError:
    """Return the error in a response, by its code or else by its status."""
    answer: Any = None
    with suppress(ValueError):
        answer = msgspec.json.decode(response.content)
    body = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(body, dict):
        return GatewayUnavailable(
            f"status {response.status_code} without an error of Tokentape's; is there a gateway at this URL?"
        )
    # A class without its own code inherits that of its base class.
    kinds = {kind.code: kind for kind in _with_subclasses(TokentapeError) if "code" in vars(kind)}
    kind = kinds.get(str(body.get("code")), TokentapeError)
    message = str(body.get("message"))
    error = kind(message, body.get("param")) if issubclass(kind, InvalidRequest) else kind(message)
    error.retry = response.headers.get("x-should-retry", str(error.retry).lower()) == "true"
    error.retry_after = _retry_after(response)
    return error


def _with_subclasses(kind: type[TokentapeError]) -> Iterator[type[TokentapeError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)


def create_session(session_id: str | None, **options: Mapping[str, Any] | None) -> Call[str]:
    """Create a session, with a random id by default, and return its id.

    `options` are its metadata, pins and defaults. If only an id is passed, the session may exist. Raises
    `InvalidRequest` for an empty id, and for options that JSON can't represent.
    """
    name = secrets.token_hex(16) if session_id is None else session_id
    session_path(name)
    set_options = {key: json_object(value, key) for key, value in options.items() if value is not None}
    body: dict[str, Any] = {"session_id": name, **set_options}
    # After a lost response, a session with this id and these options is the one that the request created.
    again = msgspec.json.encode({**body, "exist_ok": True})

    def settle(error: TokentapeError, repeated: bool) -> str:
        if isinstance(error, Conflict) and repeated:
            raise Conflict(f"session {name!r} already exists with other metadata; use another id or none")
        raise error

    first = again if session_id is not None and not set_options else msgspec.json.encode(body)
    return Call("POST", "/sessions", reader(str, "session_id"), first, repeated_body=again, settle=settle)


def list_sessions(after: int) -> Call[tuple[list[SessionEntry], int | None]]:
    """Return a page of sessions, and the position to pass as `after` for the next page."""

    def read(content: bytes) -> tuple[list[SessionEntry], int | None]:
        page = msgspec.json.decode(content)
        return msgspec.convert(page["data"], list[SessionEntry]), page["next_after"]

    return Call("GET", f"/sessions?after={after}", read)


def show_engine() -> Call[EngineState]:
    return Call("GET", "/engine", reader(EngineState))


def pause_engine(*, abort: bool, timeout: float) -> Call[EngineState]:
    """Hold back new calls, and wait for those in flight or abort them."""
    body = {"mode": "abort" if abort else "wait", "timeout": timeout}
    return Call("POST", "/engine/pause", reader(EngineState), msgspec.json.encode(body), wait=timeout)


def resume_engine(weight_version: str | None, adapter: str | None = None) -> Call[EngineState]:
    """Let calls start again."""
    body = msgspec.json.encode({"weight_version": weight_version} | ({"adapter": adapter} if adapter else {}))
    return Call("POST", "/engine/resume", reader(EngineState), body)


def session_path(session_id: str) -> str:
    """Return the path of a session. Raises `InvalidRequest` for an empty id, which would be that of all sessions."""
    if not isinstance(session_id, str) or not session_id:
        raise InvalidRequest(
            f"the session id is {session_id!r}: expected text, or no argument for a random id", "session_id"
        )
    return f"/sessions/{quote(session_id, safe='')}"


def show_session(session_id: str) -> Call[SessionState]:
    return Call("GET", session_path(session_id), reader(SessionState))


def give_reward(session_id: str, value: float, turn: int | None, leaf: int | None) -> Call[str | None]:
    """Set a reward, and return the gateway's warning, if any. It replaces earlier rewards, so a retry is safe."""
    number = math.nan
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
    if not math.isfinite(number):
        raise InvalidRequest(f"reward must be a finite number, got {value!r}", "value")
    # `index` makes NumPy's whole numbers Python's.
    body = msgspec.json.encode({"value": number, "turn": turn, "leaf": leaf}, enc_hook=index)
    path = f"{session_path(session_id)}/reward"
    return Call("POST", path, lambda content: msgspec.json.decode(content).get("warning"), body)


def pass_on(warning: str | None) -> None:
    """Show a gateway's warning at the line that called the client's method."""
    if warning:
        warnings.warn(warning, stacklevel=3)


def annotate_tokens(
    session_id: str, name: str, values: npt.ArrayLike, turn: int | None, leaf: int | None
) -> Call[list[int]]:
    """Attach a number to each token. Return the turns that now have values. They replace values of the same name."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "cmMSU":
            raise TypeError(f"values of type {array.dtype}")
        with np.errstate(over="ignore"):  # the gateway refuses an infinite number
            numbers = np.asarray(array, "<f4")
    except (TypeError, ValueError, RuntimeError) as error:  # the last for torch tensors with gradients
        raise InvalidRequest(f"expected one real number per token, found other values: {error}", "values") from None
    if numbers.ndim != 1:
        raise InvalidRequest(f"values must be one number per token, not {numbers.ndim}-dimensional", "values")
    place = {"turn": turn, "leaf": leaf}
    query = "&".join(f"{key}={int(number)}" for key, number in place.items() if number is not None)
    path = f"{session_path(session_id)}/columns?name={quote(str(name), safe='')}&{query}"
    return Call("POST", path, reader(list[int], "turns"), numbers.tobytes(), "application/octet-stream")


def read_trajectories(
    session_id: str, verdict: Collection[str] | None, wait_checks: int, *, unread: bool
) -> Call[list[Trajectory]]:
    query = f"?wait_checks={int(wait_checks)}" + ("&unread=true" if unread else "")
    if verdict is not None:
        names = verdict if isinstance(verdict, str) else ",".join(verdict)
        query += f"&verdict={quote(names, safe='')}"

    def read(content: bytes) -> list[Trajectory]:
        return [trajectory_from_json(row) for row in msgspec.json.decode(content)["data"]]

    return Call("GET", f"{session_path(session_id)}/trajectories{query}", read, wait=wait_checks)


def read_media(session_id: str, sha256: str) -> Call[bytes]:
    return Call("GET", f"{session_path(session_id)}/media/{quote(sha256, safe='')}", bytes)


def delete_session(session_id: str) -> Call[None]:
    def settle(error: TokentapeError, repeated: bool) -> None:
        if not (repeated and isinstance(error, NotFound)):
            raise error

    return Call("DELETE", session_path(session_id), nothing, settle=settle)


# msgspec 0.22 caches what it has read about a type, and crashes if two threads read a type at the same time.
_reading_types = threading.Lock()


def reader(kind: type[T], field: str | None = None) -> Callable[[bytes], T]:
    """Return the function that decodes a response, or one of its fields, as `kind`."""
    with _reading_types:
        msgspec.json.Decoder(kind)
    if field is None:
        return lambda content: msgspec.json.decode(content, type=kind)
    return lambda content: msgspec.convert(msgspec.json.decode(content)[field], kind)


def nothing(content: bytes) -> None:
    """Ignore the response."""
