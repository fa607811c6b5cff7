"""Agents of three kinds inside the rollout entry of each adapter: tokens sampled over their wire API are trained."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.training import live, test_skyrl, test_slime, test_verifiers, test_verl

ledger, servers, engines = test_verifiers.ledger, test_verl.servers, test_skyrl.engines
router = test_slime.router

PLAIN = """import json, sys, urllib.request
url, messages = sys.argv[1], []
for text in ("One.", "Two."):
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 60}).encode()
    asked = urllib.request.Request(url + "/chat/completions", body, {"content-type": "application/json"})
    reply = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    messages.append({"role": "assistant", "content": reply["content"]})
"""


async def with_openai(base_url: str, api_key: str, task: Any) -> float:
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for text in ("One.", "Two."):
            messages.append({"role": "user", "content": text})
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=60)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return 1.0


async def with_anthropic(base_url: str, api_key: str, task: Any) -> float:
    messages: list[Any] = []
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        for text in ("One.", "Two."):
            messages.append({"role": "user", "content": text})
            reply = await client.messages.create(model="policy", messages=messages, max_tokens=60)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
    return 1.0


async def in_a_child_process(base_url: str, api_key: str, task: Any) -> float:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", PLAIN, base_url)
    assert await child.wait() == 0
    return 1.0


AGENTS = [with_openai, with_anthropic, in_a_child_process]


def checked(calls: list[live.Call], rows: list[Any]) -> None:
    assert [call.finish for call in calls] == ["stop", "stop"]
    assert live.findings_of(live.golden_of(calls, {calls[0].session: 1.0}), rows) == set()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("agent", AGENTS)
def test_in_verl(servers: test_verl.Servers, monkeypatch: pytest.MonkeyPatch, agent: Callable[..., Any]) -> None:
    monkeypatch.setattr(live, "agent", agent)
    (output,) = test_verl.ran(test_verl.loop_of(servers), 0)
    checked(servers.ledger.calls, [test_verl.row_of(output)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("agent", AGENTS)
def test_in_slime(router: test_slime.Router, monkeypatch: pytest.MonkeyPatch, agent: Callable[..., Any]) -> None:
    monkeypatch.setattr(live, "agent", agent)
    ((sample,),) = test_slime.ran([0])
    checked(router.ledger.calls, [test_slime.row_of(sample)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("agent", AGENTS)
def test_in_skyrl(engines: live.SkyRlClient, monkeypatch: pytest.MonkeyPatch, agent: Callable[..., Any]) -> None:
    monkeypatch.setattr(live, "agent", agent)
    rows, _ = live.skyrl_rows(test_skyrl.generated(engines, {"a": [0]}), engines.ledger)
    checked(engines.ledger.calls, rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("agent", AGENTS)
def test_in_verifiers(ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch, agent: Callable[..., Any]) -> None:
    monkeypatch.setattr(live, "agent", agent)
    (trace,) = test_verifiers.traces_of(ledger, 0)
    checked(ledger.calls, list(test_verifiers.rows_of(trace)))
