"""Waiting in tests: for an event, never for a fixed time."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

PATIENCE = 240.0
"""Seconds after which a wait is taken for a hang. Machines are shared and slow at times: no test relies on it."""


def until(true: Callable[[], object]) -> None:
    """Return once `true()` holds, without a time limit."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.05)


def trickle(connection: socket.socket, sent: bytes) -> None:
    """Send byte by byte, slowly. Raises `ConnectionError` once the other side has closed the connection."""
    for byte in sent:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> threading.Semaphore:
    """A semaphore that each call of the method releases, before it does anything: acquire it to wait for callers."""
    called = threading.Semaphore(0)
    do = getattr(owner, method)

    @functools.wraps(do)
    def counted(*args: Any, **kwargs: Any) -> Any:
        called.release()
        return do(*args, **kwargs)

    monkeypatch.setattr(owner, method, counted)
    return called
