"""A gateway's log: one line per event on stderr, as text or JSON, without text from models or callers.

For an exception, the line has the type and the traceback, but not the exception's text, which may quote a prompt. From
other libraries only warnings are logged, cut to the first line, because asyncio prints exceptions in the lines after.
"""

from __future__ import annotations

import logging
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal, TextIO, TypeAlias

import msgspec

from tokentape.gateway._access import request_id

Level: TypeAlias = Literal["debug", "info", "warning", "error"]

Format: TypeAlias = Literal["text", "json"]

_OURS = "tokentape"

_REDUNDANT_MESSAGE = "Application startup failed. Exiting."
"""uvicorn's log line that is dropped, because the caller of `serve` prints the cause."""


@contextmanager
def logging_to(stream: TextIO | None = None, *, level: Level = "info", form: Format = "text") -> Iterator[None]:
    """Log only to `stream` (stderr if None) during the `with` block.

    `level` applies to Tokentape's own loggers. Other libraries log at level WARNING and above.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    handler.addFilter(lambda record: record.msg != _REDUNDANT_MESSAGE)
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    before = root.handlers, root.level, ours.level, logging.raiseExceptions
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    ours.setLevel(level.upper())
    # Otherwise logging prints the arguments of a line that it can't format, which may contain caller text.
    logging.raiseExceptions = False
    try:
        yield
    finally:
        root.handlers, level_of_root, level_of_ours, logging.raiseExceptions = before
        root.setLevel(level_of_root)
        ours.setLevel(level_of_ours)


class _JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, request_id, then the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        return msgspec.json.encode(_line(record)).decode()


class _TextFormatter(logging.Formatter):
    """Formats a record as one line of text, followed by the traceback's frames if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = _line(record)
        where = str(line.pop("traceback", ""))
        for name, value in line.items():
            if isinstance(value, list | tuple):
                line[name] = ",".join(map(str, value))
        head = f"{line.pop('time')} {line.pop('level'):<7} {line.pop('logger')}: {line.pop('message')}"
        fields = " ".join([head, *[f"{name}={value}" for name, value in line.items()]])
        return f"{fields}\n{where}" if where else fields


def _line(record: logging.LogRecord) -> dict[str, object]:
    message = record.getMessage()
    ours = record.name.partition(".")[0] == _OURS
    line: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": message if ours else message.partition("\n")[0],
    }
    if name := request_id.get():
        line["request_id"] = name
    fields = record.__dict__.get("fields", {})
    assert isinstance(fields, Mapping)
    line.update(fields)
    if record.exc_info and record.exc_info[0] is not None:
        line["exception"] = record.exc_info[0].__name__
        # uvicorn logs each request that a forced shutdown cancels. Where it was says nothing.
        if record.exc_info[0] is not CancelledError:
            line["traceback"] = "".join(traceback.format_tb(record.exc_info[2])).rstrip()
    return line
