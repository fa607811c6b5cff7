"""Spans, as OpenTelemetry's SDK exports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.imports import loaded
from tokentape.chat._renderer import Renderer
from tokentape.errors import EngineTimeout, InvalidRequest
from tokentape.gateway import _telemetry as tracing
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._telemetry import OpenTelemetrySpans, Telemetry
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

MARK = "LEAKMARKER"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


def spans_of(engine: ScriptedEngine, renderer: Renderer, store: SqliteStore) -> Sequence[Any]:
    """What is exported of one call."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    turns = Turns(engine, renderer, store, telemetry=Telemetry(OpenTelemetrySpans(provider)))
    with running(create_app(turns, model_id="m")) as url:
        body = {"messages": [{"role": "user", "content": MARK}], "metadata": {MARK: MARK}}
        httpx2.post(f"{url}/sessions/s/v1/chat/completions", json=body, headers=PARENT)
    return exporter.get_finished_spans()


def test_a_call_is_a_tree_of_spans_below_the_callers(renderer: Renderer, store: SqliteStore) -> None:
    spans = {span.name: span for span in spans_of(ScriptedEngine(renderer, [MARK]), renderer, store)}
    request = spans.pop("POST /sessions/{session_id}/v1/chat/completions")
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.attributes["http.response.status_code"] == 200
    assert set(spans) == {"prepare", "text_completion script", "commit"}
    assert {span.parent.span_id for span in spans.values()} == {request.context.span_id}


def test_the_engines_span_follows_the_genai_conventions(renderer: Renderer, store: SqliteStore) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
    from opentelemetry.trace import SpanKind

    engine = ScriptedEngine(renderer, [MARK])
    (span,) = (span for span in spans_of(engine, renderer, store) if span.kind == SpanKind.CLIENT)
    ((prompt_ids, sampling),) = engine.requests
    completion_ids = renderer.tokenizer.encode_plain(MARK)
    attributes = dict(span.attributes)
    assert attributes["gen_ai.operation.name"] == gen_ai_attributes.GenAiOperationNameValues.TEXT_COMPLETION.value
    assert attributes["gen_ai.usage.input_tokens"] == len(prompt_ids)
    assert attributes["gen_ai.usage.output_tokens"] == len(completion_ids)
    assert attributes["gen_ai.request.temperature"] == sampling.temperature
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert set(attributes) <= {value for name, value in vars(gen_ai_attributes).items() if name.isupper()}


@pytest.mark.parametrize("error", [EngineTimeout(MARK), RuntimeError(MARK)])
def test_spans_hold_no_message_text(renderer: Renderer, store: SqliteStore, error: Exception) -> None:
    spans = spans_of(ScriptedEngine(renderer, [f"{MARK} {MARK}"], fail_after=1, error=error), renderer, store)
    (engine,) = (span for span in spans if span.name.startswith("text_completion"))
    assert engine.status.description == engine.attributes["error.type"] == type(error).__name__
    assert engine.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert engine.attributes["gen_ai.usage.output_tokens"] == 1
    assert [span.to_json() for span in spans if MARK in span.to_json()] == []


def test_missing_opentelemetry_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"tokentape\[otel\]"):
        OpenTelemetrySpans()


def test_a_gateway_without_tracing_does_not_import_it() -> None:
    assert "tokentape.gateway._app" in loaded()
    assert "opentelemetry" not in loaded()
