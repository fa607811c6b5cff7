"""Metrics, spans and live drift, without session ids, caller names and text from callers.

The workers of one gateway share their metrics through files in the directory PROMETHEUS_MULTIPROC_DIR, a variable that
prometheus_client reads when it is imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import random
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from tokentape._session.verdict import verdict
from tokentape.audit._tokendiff.retokenizing import Retokenizer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.types import TokenIds, Turn

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from tokentape.engines import EngineInfo
    from tokentape.gateway._choices import Choice
    from tokentape.gateway._prompts import Prompt

_log = logging.getLogger("tokentape.gateway")

Stage: TypeAlias = Literal["prepare", "engine", "commit"]
"""A part of a call that is timed separately."""

_CONVENTIONAL = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
"""Sampling parameters with an attribute in OpenTelemetry's GenAI conventions, except stop strings: caller text."""

Attribute: TypeAlias = str | int | float | bool

WAITING = 256
"""Maximum number of completions in the queue of `LiveDrift`."""

COUNTED_TOGETHER = "PROMETHEUS_MULTIPROC_DIR"

_Merged: TypeAlias = Literal["livesum", "livemin", "livemax"]
"""How prometheus_client merges a gauge across live workers."""

_NOTE_SECONDS = 1.0

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)


class Telemetry:
    """A gateway's metrics, its spans if `spans` is set, and live drift if `tokenizer` is set.

    `drift_share` is the fraction of completions on which to measure drift.
    """

    def __init__(
        self, spans: OpenTelemetrySpans | None = None, *, drift_share: float = 0.0, tokenizer: Tokenizer | None = None
    ) -> None:
        self.metrics = Metrics()
        self.spans = spans
        self._drift = LiveDrift(tokenizer, self.metrics, drift_share) if tokenizer is not None else None
        # Cached, because looking up a label costs more than counting.
        self._turns = cache(self.metrics.turns.labels)
        self._verdict = cache(self.metrics.verdicts.labels)
        self._seconds = {name: self.metrics.stages.labels(name) for name in get_args(Stage)}

    def stage(self, name: Stage, span: AbstractContextManager[object] | None = None) -> AbstractContextManager[object]:
        """Time a stage, and open its span: `span`, or one with the stage's name."""
        timer = self._seconds[name].time()
        if self.spans is None:
            return timer
        both = ExitStack()
        both.enter_context(span or self.spans.stage(name))
        both.enter_context(timer)
        return both

    def failed(self, error: Exception) -> None:
        """Count a failed call."""
        self.metrics.failures.labels(error.code if isinstance(error, TokentapeError) else TokentapeError.code).inc()

    def recorded(self, turns: Sequence[Turn], prompt_tokens: int) -> None:
        """Count a call's turns after their commit. Each was sampled from `prompt_tokens` context tokens."""
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
            # Count only this turn's effect on the verdict: computing the path's verdict for each turn costs too much.
            self._verdict(re.sub(": [^,]*", "", verdict([turn]))).inc()

    def close(self) -> None:
        if self._drift is not None:
            self._drift.close()


class Metrics:
    """A gateway's metrics, in their own registry, so that two gateways in a process stay separate."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._together = COUNTED_TOGETHER in os.environ
        self._followed: list[tuple[Gauge, Callable[[], float]]] = []
        self.turns = self._counter(
            "turns",
            "Recorded turns: committed, or aborted because of client_left, shutdown or an error.",
            "outcome",
            "cause",
        )
        self.failures = self._counter("call_failures", "Calls that failed. Their tokens count as aborted.", "code")
        self.engine_aborts = self._counter(
            "engine_aborts",
            "Aborts by the engine: resumed, kept, resampled, or again (nothing was sampled); and the reason.",
            "outcome",
            "why",
        )
        self.forks = self._counter("forks", "Committed turns that started a new branch, by cause.", "cause")
        self.verdicts = self._counter(
            "verdicts",
            "Committed turns by their effect on the verdict: exact, closed, forked; with the reservations model "
            "unverified, other logprobs (not those sampled with) and logprobs not known.",
            "verdict",
        )
        self.parse_problems = self._counter("parse_problems", "Committed turns with an unparsed completion.")
        self.unread = self._counter("unread_turns", "Committed turns whose client left before it had the whole reply.")
        self.replays = self._counter("replays", "Calls answered from the record.")
        self.prompt_tokens = self._counter("prompt_tokens", "Context tokens sent to the engine, once per turn.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Context tokens that the engine reported as cached, once per turn."
        )
        self.sampled_tokens = self._counter("sampled_tokens", "Tokens sampled by the engine and recorded.")
        self.drift_completions = self._counter(
            "drift_completions", "Completions decoded and re-tokenized: same, or drifted.", "outcome"
        )
        self.drift_tokens = self._counter(
            "drift_tokens", "Tokens of measured completions: same, changed, or unknown (partial characters).", "outcome"
        )
        self.drift_stretches = self._counter("drift_stretches", "Stretches of changed tokens, by artifact.", "artifact")
        self.drift_dropped = self._counter("drift_dropped", "Completions not measured because the queue was full.")
        self.bridge_checks = self._counter(
            "bridge_checks",
            "Bridges compared with the template's own rendering: same, differs, unknown (the template can't render "
            "the conversation), or skipped (full queue, or off).",
            "outcome",
        )
        self.bridge_revocations = self._counter(
            "bridge_revocations", "Bridges that differed, by the strategy used from then on.", "strategy"
        )
        self.stages = self._histogram("stage_seconds", "Seconds per stage: prepare, engine, commit.", "stage")
        self.first_token = self._histogram("first_token_seconds", "Seconds from the engine call to its first tokens.")
        self.requests = self._counter("http_requests", "Answered requests.", "method", "route", "status")
        self.request_seconds = self._histogram("http_request_seconds", "Seconds until a request was answered.", "route")
        # Cached, because looking up a label costs more than counting.
        self._answered = lru_cache(maxsize=256)(self._labels_of_answers)
        self.requests_in_flight = self._gauge("http_requests_under_way", "Requests in flight.")
        self.calls_in_flight = self._gauge("calls_under_way", "Calls in flight; a retry joins its call.")
        self.open_sessions = self._gauge("open_sessions", "Sessions in memory.")
        healthy = "1 if turns can be recorded, 0 if not until a restart."
        self.store_healthy = self._gauge("store_healthy", healthy, merged="livemin")
        verified = "1 if the engine is verified to serve the model in the folder."
        self.model_verified = self._gauge("engine_model_verified", verified, merged="livemin")
        names = ("version", "engine", "engine_version", "model")
        self.build = self._gauge("build_info", "Always 1.", *names, merged="livemax")

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        requests, request_seconds = self._answered(method, route, status)
        requests.inc()
        request_seconds.observe(seconds)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the text format that the `Accept` header requests, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.whole()), content_type

    def whole(self) -> CollectorRegistry:
        if not self._together:
            return self.registry
        self._note()
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry

    def follow(self, gauge: Gauge, value: Callable[[], float]) -> None:
        """Set `gauge` to the result of `value()` whenever metrics are read."""
        if self._together:
            self._followed.append((gauge, value))
        else:
            gauge.set_function(value)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Update the followed gauges regularly during the `with` block, if other processes can read them."""

        async def note() -> None:
            while self._together:
                self._note()
                await asyncio.sleep(_NOTE_SECONDS)

        noting = asyncio.create_task(note())
        try:
            yield
        finally:
            noting.cancel()

    def _note(self) -> None:
        for gauge, value in self._followed:
            gauge.set(value())

    def _labels_of_answers(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        return self.requests.labels(method, route, str(status)), self.request_seconds.labels(route)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"tokentape_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str, merged: _Merged = "livesum") -> Gauge:
        return Gauge(f"tokentape_{name}", what, labels, registry=self.registry, multiprocess_mode=merged)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(f"tokentape_{name}", what, labels, registry=self.registry, buckets=_SECONDS)


class OpenTelemetrySpans:
    """Opens spans with OpenTelemetry's API, from `provider` or else from the process's provider.

    To export spans, run the gateway under `opentelemetry-instrument` or set a provider first. Without a provider they
    are dropped.

    Raises `InvalidRequest` if `opentelemetry-api` is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        if find_spec("opentelemetry") is None:
            raise InvalidRequest("tracing needs OpenTelemetry; run: pip install 'tokentape[otel]'", "tracing")
        from opentelemetry import trace

        self._tracer = trace.get_tracer("tokentape", version("tokentape"), provider)

    @contextmanager
    def request(self, headers: Mapping[str, str], attributes: Mapping[str, Attribute]) -> Iterator[None]:
        """Open a server span as a child of the span in the headers (`traceparent`).

        `attributes`, which may be filled until the end, become span attributes. The span is named after `http.route`.
        """
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        with self._tracer.start_as_current_span(
            "request", extract(headers), SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            finally:
                span.update_name(f"{attributes.get('http.request.method', '')} {attributes.get('http.route', '')}")
                span.set_attributes(attributes)

    @contextmanager
    def stage(self, name: str, *, client: bool = False) -> Iterator[Span]:
        """Open a span. On failure, record the exception's type, but not its text, which may quote a prompt."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        with self._tracer.start_as_current_span(
            name, kind=kind, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except Exception as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                span.set_attribute("error.type", type(error).__name__)
                raise

    @contextmanager
    def inference(self, engine: EngineInfo, prompt: Prompt, choices: Sequence[Choice]) -> Iterator[None]:
        """Open the span for an engine call, with attributes from OpenTelemetry's GenAI conventions (1.37).

        The conversation id and all texts are omitted.
        """
        sampling = prompt.sampling
        request: dict[str, Any] = {
            "operation.name": "text_completion",
            "provider.name": engine.name,
            "request.model": engine.model,
            "request.choice.count": len(choices),
            **{f"request.{name}": getattr(sampling, name) for name in _CONVENTIONAL},
        }
        with self.stage(f"text_completion {engine.model}", client=True) as span:
            try:
                yield
            finally:
                request["usage.input_tokens"] = len(prompt.ids)
                request["usage.output_tokens"] = sum(len(choice.ids) for choice in choices)
                request["response.finish_reasons"] = [choice.finish_reason or "error" for choice in choices]
                span.set_attributes({f"gen_ai.{name}": value for name, value in request.items() if value is not None})


class LiveDrift:
    """Measures drift while serving: decodes and re-tokenizes a fraction `share` of completions, and counts changes.

    It runs in a background thread, and no call waits for it. If its queue is full, completions are counted as dropped.
    Text is encoded with the renderer's tokenizer, which separates control tokens from text that spells them, so that
    no second tokenizer is kept in memory.
    """

    def __init__(self, tokenizer: Tokenizer, metrics: Metrics, share: float) -> None:
        self._metrics = metrics
        self._share = share
        self._thread = BackgroundThread("tokentape-drift", self._try, WAITING)
        # Created in the thread, because it is slow.
        self._retokenizer = cache(lambda: Retokenizer(tokenizer, apart=True))
        # The random numbers need not be secure.
        self._random = random.Random()

    def offer(self, completion_ids: TokenIds) -> None:
        """Decide at random whether to measure this completion, and queue it if so, without waiting."""
        drawn = self._random.random() < self._share and len(completion_ids)
        if drawn and not self._thread.offer(completion_ids):
            self._metrics.drift_dropped.inc()

    def close(self) -> None:
        self._thread.close()

    def _try(self, ids: TokenIds) -> None:
        try:
            self._measure(self._retokenizer(), ids)
        except Exception as error:
            # The exception's text may quote the completion.
            _log.warning("drift of a completion could not be measured: %s", type(error).__name__)

    def _measure(self, retokenizer: Retokenizer, ids: TokenIds) -> None:
        metrics = self._metrics
        (trip,) = retokenizer.round_trips([ids])
        unknown = trip.head + trip.tail
        if unknown:
            metrics.drift_tokens.labels("unknown").inc(unknown)
        changed = 0
        if trip.drifted:
            comparison = retokenizer.compare(trip)
            changed = int(comparison.changed().sum())
            for difference in comparison.differences:
                metrics.drift_stretches.labels(difference.change).inc()
        metrics.drift_completions.labels("drifted" if trip.drifted else "same").inc()
        metrics.drift_tokens.labels("changed").inc(changed)
        metrics.drift_tokens.labels("same").inc(len(trip.ids) - changed)


_Item = TypeVar("_Item")


class BackgroundThread(Generic[_Item]):
    """Calls `work` with each item in a thread, which starts at the first item. At most `most` items are queued."""

    def __init__(self, name: str, work: Callable[[_Item], None], most: int) -> None:
        self._name = name
        self._work = work
        self._waiting: queue.Queue[_Item | None] = queue.Queue(most)
        self._thread: threading.Thread | None = None
        self.closed = self._over = False

    @property
    def full(self) -> bool:
        return self._waiting.full()

    def offer(self, item: _Item) -> bool:
        """Queue an item. Return False, not queued, if the queue is full or the thread is closed or can't start."""
        if self.closed:
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no memory, or a limit; the next item may start it
                return False
            self._thread = thread
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            return False
        return True

    def close(self, seconds: float = threading.TIMEOUT_MAX) -> None:
        """Stop after the queued items. Skip items that have not begun within `seconds`."""
        self.closed = True
        if self._thread is not None:
            hurry = threading.Timer(seconds, lambda: setattr(self, "_over", True))
            hurry.daemon = True
            hurry.start()
            self._waiting.put(None)
            self._thread.join()
            hurry.cancel()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if not self._over:
                self._work(item)
