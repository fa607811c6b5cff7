"""What is counted and timed, and who may read it."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.errors import EngineContractError, EngineTimeout
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import Keys
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

CHAT = "/sessions/s/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and the values of the labels, these in the order of their names."""
    return {
        (sample.name.removeprefix("tokentape_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def scrape(url: str) -> dict[tuple[str, ...], float]:
    return samples(httpx2.get(f"{url}/metrics").text)


def ask(url: str, *messages: dict[str, Any], **fields: Any) -> httpx2.Response:
    return httpx2.post(url + CHAT, json={"messages": messages or [USER], **fields})


def test_turns_tokens_forks_and_verdicts_are_counted(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["one<|im_end|>", "two", "three<|im_end|>", "four<|im_end|>"])
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        messages = [USER]
        for _ in range(3):
            reply = ask(url, *messages).json()["choices"][0]["message"]
            messages += [reply, USER]
        ask(url, {"role": "user", "content": "another beginning"})
        found = scrape(url)
    turns = 4
    assert found["turns_total", "", "committed"] == turns
    assert (found["verdicts_total", "exact"], found["verdicts_total", "closed"]) == (2, 1)
    assert found["verdicts_total", "forked"] == sum(n for key, n in found.items() if key[0] == "forks_total") == 1
    assert found["prompt_tokens_total",] == sum(len(prompt) for prompt, _ in engine.requests)
    assert found["sampled_tokens_total",] == sum(
        len(renderer.tokenizer.encode_plain(text))
        for text in ("one<|im_end|>", "two", "three<|im_end|>", "four<|im_end|>")
    )
    for stage in ("prepare", "engine", "commit"):
        assert found["stage_seconds_count", stage] == turns
        assert found["stage_seconds_sum", stage] > 0
    assert found["first_token_seconds_count",] == turns
    assert found["open_sessions",] == 1
    assert found["calls_under_way",] == 0
    assert found["store_healthy",] == 1
    assert found["http_requests_total", "POST", "/sessions/{session_id}/v1/chat/completions", "200"] == turns
    (build,) = (key for key in found if key[0] == "build_info")
    assert build[1:4] == ("scripted", "1", "m")


@pytest.mark.parametrize(
    ("error", "fail_after", "aborted", "failed"),
    [
        (EngineTimeout("late"), 1, {"engine_timeout": 1}, {"engine_timeout": 1}),
        (EngineTimeout("late"), 0, {}, {"engine_timeout": 1}),
        (EngineContractError("no ids"), 1, {}, {"engine_contract": 1}),
        (RuntimeError("bug"), 0, {}, {"internal_error": 1}),
    ],
)
def test_failures_are_counted_by_code(
    renderer: Renderer,
    store: SqliteStore,
    error: Exception,
    fail_after: int,
    aborted: dict[str, int],
    failed: dict[str, int],
) -> None:
    engine = ScriptedEngine(renderer, ["hi"], fail_after=fail_after, error=error)
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        ask(url)
        found = scrape(url)
    assert {key[1]: value for key, value in found.items() if key[0] == "turns_total" and key[2] == "aborted"} == aborted
    assert {key[1]: value for key, value in found.items() if key[0] == "call_failures_total"} == failed
    assert ("turns_total", "", "committed") not in found


def test_replays_are_counted_and_sampled_once(renderer: Renderer, store: SqliteStore) -> None:
    with running(create_app(Turns(ScriptedEngine(renderer, ["hi"]), renderer, store), model_id="m")) as url:
        for _ in range(3):
            httpx2.post(url + CHAT, json={"messages": [USER]}, headers={"Idempotency-Key": "k"})
        found = scrape(url)
    assert (found["replays_total",], found["turns_total", "", "committed"]) == (2, 1)


def test_broken_store_shows_in_the_metrics(renderer: Renderer, store: SqliteStore) -> None:
    with running(create_app(Turns(ScriptedEngine(renderer, []), renderer, store), model_id="m")) as url:
        store.close()
        assert scrape(url)["store_healthy",] == 0


def test_two_gateways_do_not_mix(renderer: Renderer, store: SqliteStore, gateway_url: str) -> None:
    with running(create_app(Turns(ScriptedEngine(renderer, ["hi"]), renderer, store), model_id="m")) as url:
        ask(url)
        assert scrape(url)["turns_total", "", "committed"] == 1
        assert ("turns_total", "", "committed") not in scrape(gateway_url)


def test_labels_hold_no_values_of_callers(renderer: Renderer, store: SqliteStore) -> None:
    with running(create_app(Turns(ScriptedEngine(renderer, ["hi"]), renderer, store), model_id="m")) as url:
        httpx2.post(f"{url}/sessions/MARK/v1/chat/completions", json={"messages": [USER]})
        httpx2.get(f"{url}/MARK")
        httpx2.get(f"{url}/sessions/MARK")
        assert "MARK" not in httpx2.get(f"{url}/metrics").text


def test_metrics_are_for_admin_keys(renderer: Renderer, store: SqliteStore) -> None:
    keys = Keys({"alice": "a" * 16}, {"ops": "o" * 16})
    turns = Turns(ScriptedEngine(renderer, []), renderer, store)
    with running(create_app(turns, model_id="m", keys=keys)) as url:
        status = [
            httpx2.get(f"{url}/metrics", headers=headers).status_code
            for headers in ({}, {"x-api-key": "a" * 16}, {"Authorization": f"Bearer {'o' * 16}"})
        ]
    assert status == [401, 403, 200]
