"""What the gateway tells of its work while it does it: each seam of a call counted, timed and traced."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import TracebackType
from typing import Literal, TypeAlias, get_args

from prometheus_client import Histogram

from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import TokentapeError
from tokentape.gateway.live_drift import LiveDrift
from tokentape.gateway.metrics import Metrics
from tokentape.gateway.tracing import NoSpans, Spans
from tokentape.session.verdict import verdict
from tokentape.types import Turn

Stage: TypeAlias = Literal["prepare", "engine", "commit"]
"""A part of a call that is timed by itself."""


class Telemetry:
    """Metrics, and spans if there are `spans`. One for each gateway.

    Of a `drift_share` of the completions the drift is measured, with this `tokenizer`.
    """

    def __init__(
        self, spans: Spans | None = None, *, drift_share: float = 0.0, tokenizer: Tokenizer | None = None
    ) -> None:
        self.metrics = Metrics()
        self._drift = LiveDrift(tokenizer, self.metrics, drift_share) if tokenizer is not None else None
        self.spans: Spans = spans or NoSpans()
        self._traced = spans is not None
        # Looking a label up costs more than counting.
        self._turns = cache(self.metrics.turns.labels)
        self._verdict = cache(self.metrics.verdicts.labels)
        self._seconds = {name: self.metrics.stages.labels(name) for name in get_args(Stage)}

    def stage(self, name: Stage) -> AbstractContextManager[None]:
        """Time what is done within."""
        timed = _Timed(self._seconds[name])
        return _both(self.spans.stage(name), timed) if self._traced else timed

    def first_token(self, seconds: float) -> None:
        """Note how long a call has waited for its first token."""
        self.metrics.first_token.observe(seconds)

    async def call(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work of one call; count it as under way, and as failed if it raises."""
        with self.metrics.calls_under_way.track_inprogress():
            try:
                await work()
            except Exception as error:
                code = error.code if isinstance(error, TokentapeError) else TokentapeError.code
                self.metrics.failures.labels(code).inc()
                raise

    def recorded(self, turns: Sequence[Turn], prompt_tokens: int) -> None:
        """Count the turns of a call, now durable, each sampled from a context of `prompt_tokens`."""
        metrics = self.metrics
        for turn in turns:
            metrics.prompt_tokens.inc(prompt_tokens)
            metrics.sampled_tokens.inc(len(turn.completion_ids))
            if turn.abort_cause is not None:
                self._turns("aborted", turn.abort_cause).inc()
                continue
            self._turns("committed", "").inc()
            if self._drift is not None:
                self._drift.offer(turn.completion_ids)
            if "parse_problem" in turn.sampling:
                metrics.parse_problems.inc()
            if turn.fork is not None:
                metrics.forks.labels(turn.fork).inc()
            # By what this turn adds to its branch: the whole path would be looked through again on every turn.
            self._verdict(re.sub(": [^,]*", "", verdict([turn]))).inc()

    def aborted(self, outcome: str, why: str) -> None:
        """Count a call of the engine that ended with an abort, and what became of the completion."""
        self.metrics.engine_aborts.labels(outcome, why).inc()

    def close(self) -> None:
        """Measure what still waits to be measured."""
        if self._drift is not None:
            self._drift.close()

    def replayed(self) -> None:
        """Count a call that was answered with what is recorded."""
        self.metrics.replays.inc()


class _Timed:
    """Times what is done within. A class, since every call opens three."""

    __slots__ = ("_began", "_seconds")

    def __init__(self, seconds: Histogram) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds.observe(time.perf_counter() - self._began)


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield
