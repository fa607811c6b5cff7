"""What the gateway tells of its work while it does it: each seam of a call counted, timed and traced."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Literal, TypeAlias, TypeVar

from tokentape.errors import TokentapeError
from tokentape.gateway.metrics import Metrics
from tokentape.gateway.tracing import NoSpans, Spans
from tokentape.session.verdict import verdict
from tokentape.types import Turn

Stage: TypeAlias = Literal["prepare", "engine", "commit"]
"""A part of a call that is timed by itself."""

_T = TypeVar("_T")


class Telemetry:
    """Metrics, and spans if there are `spans`. One for each gateway."""

    def __init__(self, spans: Spans | None = None) -> None:
        self.metrics = Metrics()
        self.spans: Spans = spans or NoSpans()

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Time what is done within."""
        began = time.perf_counter()
        try:
            with self.spans.stage(name):
                yield
        finally:
            self.metrics.stages.labels(name).observe(time.perf_counter() - began)

    async def sampling(self, deltas: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
        """`deltas`, as the stage `engine`, with the time until the first."""
        with self.stage("engine"):
            began: float | None = time.perf_counter()
            async with aclosing(deltas):
                async for delta in deltas:
                    if began is not None:
                        self.metrics.first_token.observe(time.perf_counter() - began)
                        began = None
                    yield delta

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
                metrics.turns.labels("aborted", turn.abort_cause).inc()
                continue
            metrics.turns.labels("committed", "").inc()
            if turn.fork is not None:
                metrics.forks.labels(turn.fork).inc()
            # By what this turn adds to its branch: the whole path would be looked through again on every turn.
            metrics.verdicts.labels(verdict([turn]).partition(":")[0]).inc()

    def replayed(self) -> None:
        """Count a call that was answered with what is recorded."""
        self.metrics.replays.inc()
