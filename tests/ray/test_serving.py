"""The gateway on Ray Serve: two replicas over a PostgreSQL record, called by real clients through Serve's proxy."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.postgres import Server
from tests.waiting import PATIENCE
from tokentape.config import ServeConfig
from tokentape.demo.agent import solve
from tokentape.demo.tasks import sample_tasks
from tokentape.gateway._limits import Limits
from tokentape.ray import gateway_app
from tokentape.store import Store, StoredSession, open_record, verify

pytestmark = pytest.mark.ray

QUESTION = {"role": "user", "content": "What is 3 plus 4?"}


@dataclass(frozen=True)
class Served:
    """A deployment and its record."""

    url: str
    place: str
    store: Store

    def ask(self, session_id: str, messages: list[Any], **more: Any) -> httpx2.Response:
        url = f"{self.url}/sessions/{session_id}/v1/chat/completions"
        return httpx2.post(url, json={"messages": messages, **more}, timeout=PATIENCE)

    def load(self, session_id: str) -> StoredSession:
        return self.store.load_session(session_id)


@pytest.fixture(scope="module")
def served(cluster: None, postgres: Server, model_dir: Path) -> Iterator[Served]:
    from ray import serve

    place = postgres.new_place()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    config = ServeConfig(model=model_dir, store=place, limits=Limits(retry_grace=0.5))
    serve.run(gateway_app(config, num_replicas=2, ray_actor_options={"num_cpus": 0.5}, health_check_period_s=1))
    with open_record(place, read_only=True) as store:
        yield Served(f"http://127.0.0.1:{port}", place, store)
    serve.shutdown()
    postgres.drop(place)


def until(true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def recorded(served: Served) -> set[str]:
    return {session.info.session_id for session in served.store.sessions(limit=1000)}


def replicas() -> dict[str, Any]:
    """Return the actors of live replicas, by name."""
    import ray

    names = [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "#Tokentape#" in actor["name"]
    ]
    return {name: ray.get_actor(name, namespace="serve") for name in names}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agents_sessions_are_exact(served: Served, stream: bool) -> None:
    from openai import AsyncOpenAI

    tasks = sample_tasks(seed=3, n=6)

    async def run_agent(number: int) -> int:
        base_url = f"{served.url}/sessions/agent-{stream}-{number}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=3) as client:
            return (await solve(client, tasks[number], temperature=0.7, seed=number, stream=stream)).model_calls

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(run_agent, range(len(tasks))))

    calls = asyncio.run(all_of_them())
    assert max(calls) > 1
    for number, many in enumerate(calls):
        stored = served.load(f"agent-{stream}-{number}")
        (trajectory,) = stored.trajectories()
        assert (trajectory.verdict, len(stored.turns)) == ("exact", many)
    assert verify(served.place).ok


def test_tokens_arrive_while_others_are_sampled(served: Served) -> None:
    body = {"messages": [QUESTION], "max_tokens": 800, "stream": True, "temperature": 2.0, "seed": 1}
    with httpx2.stream(
        "POST", f"{served.url}/sessions/streamed/v1/chat/completions", json=body, timeout=PATIENCE
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        first = next(lines)
        # A proxy that buffers the reply would have all of it, so it would be recorded.
        assert "streamed" not in recorded(served)
        rest = [line for line in lines if line]
    assert first.startswith("data: {")
    assert len(rest) > 100
    assert rest[-1] == "data: [DONE]"
    assert "streamed" in recorded(served)


def test_disconnected_client_ends_its_call(served: Served) -> None:
    body = {"messages": [QUESTION], "max_tokens": 1000, "stream": True, "temperature": 2.0, "seed": 2}
    url = f"{served.url}/sessions/left/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, timeout=PATIENCE) as reply:
        next(reply.iter_lines())
    until(lambda: "left" in recorded(served))
    (turn,) = served.load("left").turns
    assert turn.abort_cause is not None
    assert len(turn.completion_ids) < 1000
    assert served.load("left").trajectories() == []


def test_calls_of_a_session_go_to_the_same_replica(served: Served) -> None:
    names = [f"affine-{number}" for number in range(16)]
    for _ in range(3):
        for name in names:
            assert served.ask(name, [QUESTION], max_tokens=1).status_code == 200
    open_there = []
    for name in names:
        metrics = httpx2.get(f"{served.url}/metrics", headers={"X-Session-Id": name}, timeout=PATIENCE).text
        match = re.search(r"^tokentape_open_sessions ([\d.]+)$", metrics, re.MULTILINE)
        assert match is not None
        open_there.append(int(float(match[1])))
    # A part at one replica and the rest at the other: no session is open at both.
    assert len(set(open_there)) == 2
    assert sum(set(open_there)) == len(recorded(served))


@dataclass
class Load:
    """Run agents until they are stopped, and collect their replies."""

    served: Served
    stop: threading.Event = field(default_factory=threading.Event)
    acknowledged: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    failures: int = 0

    def agent(self, number: int) -> None:
        from openai import OpenAI, OpenAIError

        name = f"killed-{number}"
        client = OpenAI(
            base_url=f"{self.served.url}/sessions/{name}/v1", api_key="none", max_retries=8, timeout=PATIENCE
        )
        messages: list[Any] = []
        with client:
            while not self.stop.is_set() and len(messages) < 60:
                messages.append({"role": "user", "content": f"question {len(messages)}"})
                try:
                    completion = client.chat.completions.create(
                        model="m", messages=messages, max_tokens=12, extra_body={"return_token_ids": True}
                    )
                except OpenAIError:
                    self.failures += 1
                    messages.pop()
                    continue
                choice: Any = completion.choices[0]
                self.acknowledged[name, choice.tokentape["turn"]] = choice.token_ids
                messages.append({"role": "assistant", "content": choice.message.content or ""})


def test_a_replica_that_is_killed_loses_no_acknowledged_turn(served: Served) -> None:
    import ray

    load = Load(served)
    with ThreadPoolExecutor(6) as pool:
        agents = [pool.submit(load.agent, number) for number in range(6)]
        until(lambda: len(load.acknowledged) > 12)
        before = replicas()
        victim = sorted(before)[0]
        ray.kill(before[victim])
        at_kill = len(load.acknowledged)
        until(lambda: len(load.acknowledged) > at_kill + 24)
        # Serve starts another replica, and calls continue meanwhile and afterwards.
        until(lambda: len(replicas().keys() - {victim}) == 2, 180)
        load.stop.set()
        for agent in agents:
            agent.result()
    for (name, seq), token_ids in load.acknowledged.items():
        assert served.load(name).turns[seq].completion_ids.tolist() == token_ids, (name, seq)
    report = verify(served.place)
    assert report.ok, report


def test_shutdown_waits_for_running_calls(served: Served) -> None:
    from ray import serve

    until(lambda: httpx2.get(f"{served.url}/readyz", timeout=PATIENCE).status_code == 200)
    body = {"messages": [QUESTION], "max_tokens": 400, "stream": True, "temperature": 2.0, "seed": 5}
    lines: list[str] = []
    with httpx2.stream(
        "POST", f"{served.url}/sessions/drained/v1/chat/completions", json=body, timeout=PATIENCE
    ) as reply:
        each = reply.iter_lines()
        lines.append(next(each))
        deleting = threading.Thread(target=serve.delete, args=["default"])
        deleting.start()
        lines += each
    deleting.join()
    assert [line for line in lines if line][-1] == "data: [DONE]"
    (turn,) = served.load("drained").turns
    assert turn.abort_cause is None
    assert replicas() == {}
    assert verify(served.place).ok
