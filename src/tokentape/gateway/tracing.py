"""Spans of a call, for OpenTelemetry where it is installed and wanted. They hold names and numbers, never text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tokentape.errors import InvalidRequest

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

Attribute: TypeAlias = str | int | float | bool
"""What a span may say of its work."""


class Spans(Protocol):
    """Opens spans."""

    def request(self, headers: Mapping[str, str]) -> AbstractContextManager[dict[str, Attribute]]:
        """A span for an HTTP request, below the one that its headers name, if they do (`traceparent`).

        What is put into the dict becomes its attributes; `http.route` its name.
        """
        ...

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A span for a part of it."""
        ...


class NoSpans:
    """Opens none."""

    @contextmanager
    def request(self, headers: Mapping[str, str]) -> Iterator[dict[str, Attribute]]:
        """Nothing."""
        yield {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Nothing."""
        yield


class OpenTelemetrySpans:
    """Opens spans with OpenTelemetry's API: `provider`'s, else those of the provider that the process has set.

    Who exports them, and where to, is the SDK's affair: run the gateway under `opentelemetry-instrument`, or set a
    provider before. Without one, the spans go nowhere.

    Raises `InvalidRequest` if `opentelemetry-api` is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        if find_spec("opentelemetry") is None:
            raise InvalidRequest("tracing needs OpenTelemetry; run: pip install 'tokentape[otel]'", "tracing")
        from opentelemetry import trace

        self._tracer = trace.get_tracer("tokentape", version("tokentape"), provider)

    @contextmanager
    def request(self, headers: Mapping[str, str]) -> Iterator[dict[str, Attribute]]:
        """A server span; see `Spans`."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        attributes: dict[str, Attribute] = {}
        with self._tracer.start_as_current_span(
            "request",
            extract(headers),
            SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield attributes
            finally:
                span.update_name(f"{attributes.get('http.request.method', '')} {attributes.get('http.route', '')}")
                span.set_attributes(attributes)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """An inner span; see `Spans`."""
        from opentelemetry.trace import Status, StatusCode

        # An exception's own text may quote a prompt: a span gets its type only.
        with self._tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as span:
            try:
                yield
            except Exception as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise
