"""A session continues at another replica when its own fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx2

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.engines._pool import EnginePool
from tokentape.errors import EngineUnavailable
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore


async def _same(engine: ScriptedEngine) -> ScriptedEngine:
    return engine


def test_session_continues_exactly_at_another_replica(renderer: Renderer, store: SqliteStore) -> None:
    engines = [ScriptedEngine(renderer, ["hello there<|im_end|>"] * 4) for _ in range(2)]
    for engine in engines:
        engine.info = replace(engine.info, sampling=engine.info.sampling | {"session_id"})
        engine.split_next = True
    opening = {f"r{number}": lambda engine=engine: _same(engine) for number, engine in enumerate(engines)}
    pool = asyncio.run(EnginePool.open(opening, recheck_seconds=600))
    messages = [{"role": "user", "content": "hi"}]
    with running(create_app(Turns(pool, renderer, store), model_id="m")) as url:
        for turn in range(3):
            answer = httpx2.post(f"{url}/sessions/s/v1/chat/completions", json={"model": "m", "messages": messages})
            messages += [answer.raise_for_status().json()["choices"][0]["message"], {"role": "user", "content": "go"}]
            if turn == 0:
                home = next(engine for engine in engines if engine.requests)
                home.fail_after, home.error = 0, EngineUnavailable("gone")
        stored = store.load_session("s")
    (other,) = (engine for engine in engines if engine is not home)
    assert (len(home.requests), len(other.requests)) == (2, 2)
    assert [turn.parent for turn in stored.turns] == [None, 0, 1]
    session = stored.tree()
    assert [prompt for prompt, _ in other.requests] == [session.context_before(seq).tolist() for seq in (1, 2)]
    assert {params.session_id for _, params in home.requests + other.requests} == {"s"}
    assert [trajectory.verdict.split(",")[0] for trajectory in stored.trajectories()] == ["exact"]
