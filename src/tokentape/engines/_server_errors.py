"""The errors of engine servers: by HTTP status, and in the events of a stream.

Errors never quote the messages of a server, which may quote prompts.
"""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime

import msgspec

from tokentape.errors import EngineError, EngineTimeout, EngineUnavailable, InvalidRequest, TooLarge

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that are not JSON in the requested type."""

_MAX_RETRY_AFTER = 24 * 3600.0

# Error names that are safe to repeat: identifiers, not sentences, which may quote the prompt.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,63}")


class _ErrorDetail(msgspec.Struct):
    type: object = None
    param: object = None
    message: object = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail = msgspec.field(default_factory=_ErrorDetail)


def status_error(status: int, path: str, body: bytes) -> EngineError | InvalidRequest | TooLarge:
    """Return the error for an HTTP status and an OpenAI-style error body.

    The error text names the type and the parameter from the body, but not the message, which may quote the prompt.
    `status` may also be the error code of an event in a stream that began with status 200.
    """
    try:
        detail = msgspec.json.decode(body, type=_ErrorBody).error
    except UNREADABLE:
        detail = _ErrorDetail()
    kind, param = safe_name(detail.type), safe_name(detail.param)
    names = ", ".join(name for name in (kind, param and f"parameter {param}") if name)
    answer = f"the engine answered {status}{f' ({names})' if names else ''} at {path}"
    if status in (400, 422):
        return InvalidRequest(f"{answer}: it refuses the request; see the engine's log for the reason", param or None)
    if status == 413:
        return TooLarge(f"{answer}: the request is larger than the engine accepts")
    if status in (401, 403):
        return hopeless(f"{answer}: check the API key, and whether the server still serves this path")
    if status in (429, 502, 503):
        unavailable = EngineUnavailable(f"{answer}: it accepts no requests now; try again later")
        # vLLM 0.33: "Generation is paused. Please retry after it resumes."
        unavailable.paused = status == 503 and " is paused" in str(detail.message)
        return unavailable
    if status in (408, 504):
        return EngineTimeout(f"{answer}: it timed out; try again")
    if 300 <= status < 400:
        return hopeless(f"{answer}: redirects are not followed; pass the URL that it redirects to")
    if status == 404:
        return hopeless(f"{answer}: it has no such path or model; check its URL (http://host:port) and the model")
    if 400 <= status < 500:
        return hopeless(f"{answer}: check that the engine serves this path and this model")
    return EngineError(f"{answer}; see the engine's log")


def retry_after(value: str) -> float | None:
    """Return the seconds to wait from a `Retry-After` header, a number or a date; None if it is neither."""
    if re.fullmatch("[0-9]{1,9}", value):
        seconds = float(value)
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER)


def hopeless(text: str) -> EngineError:
    """Return an error that clients must not retry, because the same request can't succeed."""
    error = EngineError(text)
    error.retry = False
    return error


def safe_name(value: object) -> str:
    """Return `value`, the name of an engine's error or parameter, if it is an identifier; else an empty string."""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else ""


class Failure(msgspec.Struct):
    """The error in a stream event after status 200. Some servers send a string instead."""

    code: int | str | None = None


def failure_error(error: Failure | str, path: str, event: bytes) -> EngineError | InvalidRequest | TooLarge:
    """Return the error that an event reports."""
    code = error.code if isinstance(error, Failure) else 400
    return status_error(code if isinstance(code, int) else 500, path, event)
