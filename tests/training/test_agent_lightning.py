"""Agents of Agent Lightning's rollouts, over a proxy that keeps a ledger; see also test_trainer_live.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from aiohttp import web

from tests.training import live
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest
from tokentape.training.agent_lightning import AgentRollout


class Rollout(AgentRollout):
    model_dir, max_context = MODEL, 500

    @staticmethod
    async def agent(base_url: str, api_key: str, task: Any) -> float | None:
        return await live.agent(base_url, api_key, {"number": task["NUMBER"]})


@pytest.fixture
def ledger() -> Iterator[live.Ledger]:
    live.LEDGER.append(live.Ledger())
    yield live.LEDGER[-1]
    live.LEDGER.clear()


def reported(monkeypatch: pytest.MonkeyPatch, number: int, *, shift: int = 0, status: int = 200) -> list[Any]:
    """Return the events of a rollout. A proxy may report another prompt, or answer with a status."""
    events: list[Any] = []
    ledger = live.LEDGER[-1]

    async def completions(request: web.Request) -> web.Response:
        asked = await request.json()
        call = ledger.sample(asked["prompt"], asked["max_tokens"], request.match_info["rollout"])
        ledger.bodies.append(asked | {"key": request.headers["authorization"]})
        ids = {"prompt_token_ids": [token_id + shift for token_id in call.prompt], "token_ids": call.ids}
        about = {"finish_reason": call.finish, "stop_reason": None, "logprobs": {"token_logprobs": call.logprobs}}
        return web.json_response({"choices": [ids | about]}, status=status)

    async def event(request: web.Request) -> web.Response:
        events.append(await request.json())
        return web.json_response({})

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/rollout/{rollout}/attempt/0/v1/completions", completions)])
        app.add_routes([web.post("/events", event)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        variables = {"AGL_OPENAI_BASE_URL": f"{url}/rollout/r1/attempt/0/v1", "AGL_EVENT_URL": f"{url}/events"}
        for name, value in {**variables, "AGL_KEY": "secret", "NUMBER": str(number)}.items():
            monkeypatch.setenv(name, value)
        try:
            await Rollout().run()
        finally:
            await runner.cleanup()

    asyncio.run(run())
    return events


def test_proxy_receives_completion_requests_and_the_reward(
    ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = live.KINDS.index("truncated inside")
    assert reported(monkeypatch, number) == [
        {"event_type": "reward", "data": {"value": live.REWARDS[number], "source": "agent"}}
    ]
    first, second, third = ledger.calls
    # Each prompt begins with the sampled ids, so the trainer sees a single trajectory.
    assert second.prompt[: len(first.prompt + first.ids)] == first.prompt + first.ids
    assert third.prompt[: len(second.prompt + second.ids)] == second.prompt + second.ids
    assert {(body["key"], body["temperature"]) for body in ledger.bodies} == {("Bearer secret", 1.0)}


def test_agent_without_reward_reports_none(ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(monkeypatch, 7) == []


def test_agent_error_ends_the_rollout(ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="the agent failed"):
        reported(monkeypatch, 5)


def test_a_completion_of_another_prompt_is_refused(ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(httpx2.HTTPStatusError, match="502"):
        reported(monkeypatch, 0, shift=1)


@pytest.mark.parametrize(("status", "answered"), [(429, 503), (500, 503), (400, 502)])
def test_only_retryable_errors_are_retried(
    ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch, status: int, answered: int
) -> None:
    with pytest.raises(httpx2.HTTPStatusError, match=str(answered)) as refused:
        reported(monkeypatch, 0, status=status)
    assert refused.value.response.status_code == answered


def test_an_address_without_a_rollout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_OPENAI_BASE_URL", "http://localhost/v1")
    with pytest.raises(InvalidRequest, match="expected a rollout and an attempt"):
        asyncio.run(Rollout().run())
