"""What one gateway allows: sizes, counts and times, each a plain number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tokentape.errors import LimitReached
from tokentape.settings import option

CheckBridges: TypeAlias = Literal["all", "sample", "off"]
"""Which bridges are checked: each; the first of each kind on a branch and a sample; none."""


OnAbort: TypeAlias = Literal["resume", "keep", "resample"]
"""What becomes of a completion that the engine aborts: it goes on; it is the reply as it is; it is thrown away and the
caller told to ask again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a gateway. 0 means no limit, where a count is meant."""

    body_bytes: int = option(64 * 2**20, "Largest request body, in bytes. Default: 64 MiB.", "--max-body-bytes")
    open_sessions: int = option(
        0, "Sessions in memory per API key, idle ones not counted; 0 for no limit.", "--max-open-sessions"
    )
    turns_per_session: int = option(0, "Turns per session; 0 for no limit.", "--max-turns-per-session")
    idle_seconds: float = option(
        3600.0, "Time after which an unused session leaves the memory. The store still has it."
    )
    calls_per_key: int = option(0, "Calls in flight per API key; 0 for no limit.", "--max-calls-per-key")
    pause_patience: float = 600.0
    """Seconds that a call waits while sampling is paused."""
    resumes: int = option(
        32, "How often an aborted completion is continued before it is kept as it is.", "--max-resumes"
    )
    retry_grace: float = 2.0
    """Seconds that a call continues after its client has left, so that a retry can join it. 0: it is aborted."""


class Calls:
    """Counts the calls under way of each key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def one_more(self, owner: str) -> Iterator[None]:
        """Count a call for as long as the context lasts. Raises `LimitReached`."""
        if self._most and self._under_way[owner] >= self._most:
            raise LimitReached(f"{self._most} calls are under way with this key, which is the limit", retry_after=1.0)
        self._under_way[owner] += 1
        try:
            yield
        finally:
            self._under_way[owner] -= 1
