"""The format of a log line, and what it omits."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from io import StringIO

import pytest

from tokentape.gateway._logs import logging_to

MARK = "LEAKMARKER"


def test_json_has_one_object_per_line() -> None:
    stream = StringIO()
    with logging_to(stream, form="json"):
        logging.getLogger("tokentape.x").info("two\nlines", extra={"fields": {"session_id": "s", "turns": [1]}})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "tokentape.x",
        "message": "two\nlines",
        "session_id": "s",
        "turns": [1],
    }


def test_text_format_is_readable() -> None:
    stream = StringIO()
    with logging_to(stream, form="text"):
        logging.getLogger("tokentape.x").warning("words", extra={"fields": {"session_id": "s", "turns": [1, 2]}})
    assert stream.getvalue().endswith(" warning tokentape.x: words session_id=s turns=1,2\n")


def test_file_and_terminal_get_the_same_text() -> None:
    stream = StringIO()
    with logging_to(stream):
        logging.getLogger("tokentape").info("x")
    assert stream.getvalue().endswith(" info    tokentape: x\n")


@pytest.mark.parametrize("form", ["json", "text"])
def test_an_exception_has_its_type_and_place_but_not_its_text(form: str) -> None:
    stream = StringIO()
    with logging_to(stream, form="json" if form == "json" else "text"):
        try:
            raise ValueError(MARK)
        except ValueError:
            logging.getLogger("uvicorn.error").exception("it failed")
    assert MARK not in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()


def test_cancelled_request_takes_one_line() -> None:
    stream = StringIO()
    with logging_to(stream):
        try:
            raise asyncio.CancelledError
        except asyncio.CancelledError:
            logging.getLogger("uvicorn.error").exception("it was cancelled")
    assert stream.getvalue().count("\n") == 1


def test_other_libraries_log_only_first_lines_of_warnings() -> None:
    stream = StringIO()
    with logging_to(stream, level="debug", form="json"):
        logging.getLogger("asyncio").error("it failed\nfuture: %s", MARK)
        logging.getLogger("httpcore2").info(MARK)
    assert MARK not in stream.getvalue()
    assert json.loads(stream.getvalue())["message"] == "it failed"


def test_unformattable_log_line_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(sys.stderr):
        logging.getLogger("tokentape").warning("%d", MARK)
    assert MARK not in capsys.readouterr().err


def test_logging_is_restored_afterwards() -> None:
    root = logging.getLogger()
    before = root.handlers, root.level, logging.getLogger("tokentape").level, logging.raiseExceptions
    with logging_to(StringIO(), level="debug"):
        pass
    assert (root.handlers, root.level, logging.getLogger("tokentape").level, logging.raiseExceptions) == before
