"""Live counters of drift: what they count, and that no call waits for them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_metrics import ask, samples
from tokentape.audit._tokendiff.retokenizing import Retokenizer
from tokentape.chat._renderer import Renderer
from tokentape.gateway import _telemetry as live_drift
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._telemetry import BackgroundThread, LiveDrift, Metrics, Telemetry
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import TokenIds


def counted(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return samples(metrics.exposition("")[0].decode())


def ids_of(renderer: Renderer, *pieces: str) -> TokenIds:
    encode = renderer.tokenizer.encode_plain
    return np.array([token_id for piece in pieces for token_id in encode(piece)], np.int32)


def test_background_thread_that_could_not_start_is_started_with_the_next_item(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    background = BackgroundThread("t", done.append, 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no memory")))
        assert not background.offer(1)
    assert background.offer(2)
    background.close()
    assert done == [2]


def test_drift_is_counted_by_artifact(renderer: Renderer) -> None:
    metrics = Metrics()
    drift = LiveDrift(renderer.tokenizer, metrics, share=1.0)
    drifted, same = ids_of(renderer, "They", " co", "st", "<|im_end|>"), ids_of(renderer, "They cost<|im_end|>")
    drift.offer(drifted)
    drift.offer(same)
    drift.close()
    found = counted(metrics)
    changed = len(ids_of(renderer, " co", "st"))
    assert (found["drift_completions_total", "drifted"], found["drift_completions_total", "same"]) == (1, 1)
    assert found["drift_stretches_total", "intra-word"] == 1
    assert found["drift_tokens_total", "changed"] == changed
    assert found["drift_tokens_total", "same"] == len(drifted) + len(same) - changed


def test_a_share_of_the_completions_is_drawn(renderer: Renderer) -> None:
    metrics = Metrics()
    drift = LiveDrift(renderer.tokenizer, metrics, share=0.0)
    drift.offer(ids_of(renderer, "They"))
    drift.close()
    assert ("drift_completions_total", "same") not in counted(metrics)


def test_completions_over_the_time_budget_are_dropped_and_counted(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def slow(self: LiveDrift, retokenizer: Retokenizer, ids: TokenIds) -> None:
        busy.set()
        go_on.wait()

    monkeypatch.setattr(LiveDrift, "_measure", slow)
    monkeypatch.setattr(live_drift, "WAITING", 2)
    metrics = Metrics()
    drift = LiveDrift(renderer.tokenizer, metrics, share=1.0)
    drift.offer(ids_of(renderer, "one"))
    busy.wait()
    for _ in range(5):
        drift.offer(ids_of(renderer, "one"))
    assert counted(metrics)["drift_dropped_total",] == 3
    go_on.set()
    drift.close()


def test_a_background_thread_refuses_items_after_its_end() -> None:
    done: list[int] = []
    thread = BackgroundThread("test", done.append, 2)
    assert thread.offer(1)
    thread.close()
    assert not thread.offer(2)
    assert done == [1]


def test_unmeasurable_completion_does_not_stop_the_sampler(
    renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    drift = LiveDrift(renderer.tokenizer, metrics, share=1.0)
    drift.offer(np.array([renderer.tokenizer.vocab_size], np.int32))
    drift.offer(ids_of(renderer, "They"))
    drift.close()
    assert counted(metrics)["drift_completions_total", "same"] == 1
    assert "InvalidRequest" in caplog.text


def test_replies_of_a_gateway_are_counted(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["one<|im_end|>", "two<|im_end|>"])
    telemetry = Telemetry(drift_share=1.0, tokenizer=renderer.tokenizer)
    with running(create_app(Turns(engine, renderer, store, telemetry=telemetry), model_id="m")) as url:
        ask(url)
        ask(url, {"role": "user", "content": "another beginning"})
    assert counted(telemetry.metrics)["drift_completions_total", "same"] == 2
