"""The same call again: joined while it runs, answered from the record when it is done, also after a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE, calls_of, until
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.errors import EngineUnavailable
from tokentape.gateway._app import create_app
from tokentape.gateway._events import Attempt, InFlightCall
from tokentape.gateway._limits import Limits
from tokentape.gateway._serve import running
from tokentape.gateway._session_cache import OpenSession
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import SessionInfo

QUESTION = {"role": "user", "content": "What is 3 plus 4?"}
CALL = '<think>\nhm\n</think>\n\nOne moment.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BODY = {"messages": [QUESTION], "tools": TOOLS, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
RETRY = {"x-stainless-retry-count": "1"}


class Served:
    """A gateway on a data directory, to be stopped and started again."""

    def __init__(self, renderer: Renderer, directory: Path) -> None:
        self.renderer, self.directory = renderer, directory
        self.engine = ScriptedEngine(renderer, [CALL] * 9, sampling=ScriptedEngine.EVERYTHING)
        self._opened = ExitStack()
        self.start()

    def start(self) -> None:
        self.store = self._opened.enter_context(SqliteStore.open(self.directory))
        turns = Turns(self.engine, self.renderer, self.store, limits=Limits(retry_grace=60.0))
        self.url = self._opened.enter_context(running(create_app(turns, model_id="m")))

    def stop(self) -> None:
        self._opened.close()

    def ask(self, path: str = "/sessions/s/v1", **more: Any) -> httpx2.Response:
        headers = more.pop("headers", {})
        return httpx2.post(
            f"{self.url}{path}/chat/completions", json={**BODY, **more}, headers=headers, timeout=PATIENCE
        )

    def turns(self, session_id: str = "s") -> int:
        return len(self.store.load_session(session_id).turns)


@pytest.fixture
def served(renderer: Renderer, tmp_path: Path) -> Iterator[Served]:
    gateway = Served(renderer, tmp_path)
    yield gateway
    gateway.stop()


@pytest.mark.parametrize("headers", [{"idempotency-key": "k"}, RETRY])
@pytest.mark.parametrize("restart", [False, True])
def test_finished_call_is_replayed_verbatim(served: Served, headers: dict[str, str], restart: bool) -> None:
    first = served.ask(headers={} if headers is RETRY else headers)
    if restart:
        served.stop()
        served.start()
    again = served.ask(headers=headers)
    assert again.json() == first.json()
    assert again.headers["x-tokentape-replayed"] == "true"
    assert "x-tokentape-replayed" not in first.headers
    assert (len(served.engine.requests), served.turns()) == (1, 1)


def test_a_recorded_reply_is_streamed_to_a_retry_that_streams(served: Served) -> None:
    first = served.ask(stream=True, headers={"idempotency-key": "k"})
    again = served.ask(stream=True, headers={"idempotency-key": "k"})
    assert again.text.endswith("data: [DONE]\n\n")
    assert _joined(again.text) == _joined(first.text)
    assert served.turns() == 1


def _joined(text: str) -> dict[str, Any]:
    """What a client makes of a stream."""
    joined: dict[str, Any] = {"content": "", "reasoning": "", "ids": [], "calls": {}}
    for line in text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        chunk = httpx2.Response(200, text=line.removeprefix("data: ")).json()
        joined["id"], joined["created"] = chunk["id"], chunk["created"]
        for choice in chunk["choices"]:
            joined["content"] += choice["delta"].get("content") or ""
            joined["reasoning"] += choice["delta"].get("reasoning_content") or ""
            joined["ids"] += choice.get("token_ids", [])
            for call in choice["delta"].get("tool_calls", []):
                known = joined["calls"].setdefault(call["index"], {"id": call.get("id"), "arguments": ""})
                known["arguments"] += call["function"].get("arguments") or ""
            joined["finish"] = choice["finish_reason"] or joined.get("finish")
    return joined


def test_alternatives_are_replayed_too(served: Served) -> None:
    first = served.ask(top_logprobs=2, headers={"idempotency-key": "k"})
    assert first.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert served.ask(top_logprobs=2, headers={"idempotency-key": "k"}).json() == first.json()


def test_all_choices_are_replayed(served: Served) -> None:
    first = served.ask(n=3, headers={"idempotency-key": "k"})
    assert len(first.json()["choices"]) == 3
    assert served.ask(n=3, headers={"idempotency-key": "k"}).json() == first.json()


def test_the_same_body_without_a_retry_header_is_another_call(served: Served) -> None:
    served.ask()
    served.ask()
    assert [turn.fork for turn in served.store.load_session("s").turns] == [None, "sibling"]


def test_retry_of_an_unknown_call_is_a_new_call(served: Served) -> None:
    served.ask()
    served.ask(seed=5, headers=RETRY)
    assert served.turns() == 2


def test_a_key_with_another_body_is_refused(served: Served) -> None:
    served.ask(headers={"idempotency-key": "k"})
    answer = served.ask(max_tokens=5, headers={"idempotency-key": "k"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "idempotency_mismatch")
    assert answer.headers["x-should-retry"] == "false"


def test_the_same_key_in_another_session_is_another_call(served: Served) -> None:
    served.ask(headers={"idempotency-key": "k"})
    served.ask("/sessions/t/v1", headers={"idempotency-key": "k"})
    assert (served.turns("s"), served.turns("t")) == (1, 1)


@pytest.mark.parametrize("headers", [{"idempotency-key": "k"}, {}])
def test_calls_that_name_no_session_are_retried_too(served: Served, headers: dict[str, str]) -> None:
    first = served.ask("/v1", headers=headers)
    again = served.ask("/v1", headers={**headers, **RETRY})
    assert again.json() == first.json()
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_concurrent_duplicates_share_one_generation(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate = served.engine.gate = threading.Event()
    joined = calls_of(monkeypatch, InFlightCall, "follow")

    async def send_three_times() -> list[httpx2.Response]:
        async def send(headers: dict[str, str]) -> httpx2.Response:
            return await asyncio.to_thread(lambda: served.ask(stream=stream, headers=headers))

        first = asyncio.create_task(send({}))
        assert await asyncio.to_thread(served.engine.called.wait, PATIENCE)
        others = [asyncio.create_task(send(RETRY)) for _ in range(2)]
        for _ in range(3):
            assert await asyncio.to_thread(joined.acquire, timeout=PATIENCE)
        gate.set()
        return [await first, *[await other for other in others]]

    answers = asyncio.run(send_three_times())
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.text for answer in answers}) == 1
    assert (len(served.engine.requests), served.turns()) == (1, 1)


def test_duplicate_of_a_failing_call_fails_and_a_later_retry_is_new(served: Served) -> None:
    served.engine.fail_after, served.engine.error = 0, EngineUnavailable("away")
    assert served.ask(headers={"idempotency-key": "k"}).status_code == 503
    served.engine.fail_after = served.engine.error = None
    assert served.ask(headers={"idempotency-key": "k"}).status_code == 200


def test_official_client_gets_the_same_generation_after_a_timeout(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = served.engine.gate = threading.Event()
    joined = calls_of(monkeypatch, InFlightCall, "follow")

    def open_gate_to_the_retry() -> None:
        assert joined.acquire(timeout=PATIENCE)
        assert joined.acquire(timeout=PATIENCE)
        gate.set()

    with (
        ThreadPoolExecutor(1) as pool,
        OpenAI(base_url=f"{served.url}/sessions/s/v1", api_key="none", max_retries=9, timeout=3.0) as client,
    ):
        opening = pool.submit(open_gate_to_the_retry)
        reply: Any = client.chat.completions.create(model="m", messages=[QUESTION], tools=TOOLS)  # type: ignore[call-overload]
        opening.result()
    assert reply.choices[0].message.tool_calls[0].function.name == "f"
    assert (len(served.engine.requests), served.turns()) == (1, 1)


def test_abandoned_call_is_aborted_after_the_grace_period(renderer: Renderer, tmp_path: Path) -> None:
    engine = ScriptedEngine(renderer, [CALL])
    engine.gate = threading.Event()
    with SqliteStore.open(tmp_path) as store:
        turns = Turns(engine, renderer, store, limits=Limits(retry_grace=0.3))
        with running(create_app(turns, model_id="m")) as url:

            async def leave() -> None:
                async with AsyncOpenAI(base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0) as client:
                    call = asyncio.create_task(client.chat.completions.create(model="m", messages=[QUESTION]))  # type: ignore[list-item]
                    assert await asyncio.to_thread(engine.called.wait, PATIENCE)
                    call.cancel()
                    await asyncio.wait([call])

            asyncio.run(leave())
            assert engine.aborted.wait(PATIENCE)
            until(lambda: store.sessions(limit=1))
        (orphan,) = store_turns(tmp_path)
    assert (orphan.finish_reason, orphan.abort_cause) == ("abort", "client_left")


def test_a_retry_does_not_join_a_call_that_is_being_aborted() -> None:
    async def main() -> None:
        attempt = Attempt("digest", retried=True)
        opened, flight = (
            OpenSession(Session(SessionInfo("s", 0.0)), stored=False),
            InFlightCall(attempt, 1, stream=True, grace=9),
        )
        recorded = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await recorded.wait()

        flight.start(work(), lambda: opened.calls.remove(flight))
        opened.calls.append(flight)
        await asyncio.sleep(0)
        assert opened.call_in_flight(attempt) is flight
        flight.abort()
        assert opened.call_in_flight(attempt) is None
        recorded.set()
        await flight.ended()

    asyncio.run(main())


def store_turns(directory: Path) -> Any:
    with SqliteStore.open(directory, read_only=True) as store:
        return store.load_session("s").turns
