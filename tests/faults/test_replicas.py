"""Several gateways over one record, behind a balancer that sends each call to the next of them; some die.

The clients are the official ones, which send a call again when a connection breaks; the invariant is the one of
everything else: what was acknowledged is there, once, and nothing else is in a trajectory.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from tests.faults.balancer import Balancer, balancing
from tests.faults.invariant import invariant
from tests.faults.process import Agent, Served, needs_strace, serve_command, serving
from tests.faults.upstream import Upstream
from tests.postgres import Server
from tests.postgres import running as running_postgres
from tests.waiting import PATIENCE


@pytest.fixture
def database(postgres: Server) -> Iterator[str]:
    url = postgres.new_place()
    yield url
    postgres.drop(url)


class Crowd:
    """Agents that talk through one address, each call on its own connection, until they are stopped."""

    def __init__(self, url: str, count: int, *, retries: int = 20) -> None:
        self.agents = [Agent(f"agent-{number}") for number in range(count)]
        self._url, self._retries = url, retries
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._talk, args=(agent,), daemon=True) for agent in self.agents]
        for thread in self._threads:
            thread.start()

    def _talk(self, agent: Agent) -> None:
        with OpenAI(
            base_url=f"{self._url}/sessions/{agent.session}/v1",
            api_key="none",
            max_retries=self._retries,
            timeout=PATIENCE,
            default_headers={"Connection": "close"},
        ) as client:
            agent.talk_to(client)

    @property
    def received(self) -> int:
        return sum(len(agent.received) for agent in self.agents)

    def wait_for(self, more: int) -> None:
        """Return when this many more replies have arrived."""
        until, deadline = self.received + more, time.monotonic() + PATIENCE
        while self.received < until:
            assert time.monotonic() < deadline, [agent.error for agent in self.agents]
            assert not any(agent.error for agent in self.agents), [agent.error for agent in self.agents]
            time.sleep(0.01)

    def end(self) -> None:
        for agent in self.agents:
            agent.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert [agent.error for agent in self.agents] == [None] * len(self.agents)


def check(record: str | Path, crowd: Crowd) -> int:
    """Check the invariant. Trajectories hold only acknowledged turns, because unanswered agents retried."""
    invariant(record, [choice for agent in crowd.agents for choice in agent.received])
    return crowd.received


def kill_and_replace(
    replicas: list[Served], at: int, command: Sequence[str], balancer: Balancer, opened: ExitStack
) -> None:
    replicas[at].process.kill()
    replicas[at].process.wait(PATIENCE)
    replicas[at] = opened.enter_context(serving(command))
    balancer.servers = [replica.url for replica in replicas]


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.faults)])
def test_replicas_that_are_killed(model_dir: Path, upstream: Upstream, database: str, kills: int) -> None:
    """Kill -9 of one replica after the other, under load."""
    chance = random.Random(kills)
    command = serve_command(model_dir, upstream, database)
    with ExitStack() as opened:
        replicas = [opened.enter_context(serving(command)) for _ in range(2)]
        balancer = opened.enter_context(balancing([replica.url for replica in replicas]))
        crowd = Crowd(balancer.url, 6)
        crowd.start()
        for _ in range(kills):
            crowd.wait_for(chance.randint(20, 60))
            kill_and_replace(replicas, chance.randrange(2), command, balancer, opened)
        crowd.wait_for(20)
        crowd.end()
    print(f"{kills} kills of one of two replicas: {check(database, crowd)} acknowledged turns, none lost")


@pytest.mark.faults
def test_database_server_that_crashes(model_dir: Path, upstream: Upstream) -> None:
    """The database's own processes are killed under load, and it recovers: calls fail or wait, and go on."""
    with running_postgres() as server, ExitStack() as opened:
        if server.process is None:
            pytest.skip("needs a server of its own to kill")
        database = server.new_place()
        command = serve_command(model_dir, upstream, database)
        replicas = [opened.enter_context(serving(command)) for _ in range(2)]
        balancer = opened.enter_context(balancing([replica.url for replica in replicas]))
        crowd = Crowd(balancer.url, 6)
        crowd.start()
        for _ in range(5):
            crowd.wait_for(40)
            server.stop(signal.SIGKILL)
            time.sleep(0.5)
            (server.directory / "data/postmaster.pid").unlink(missing_ok=True)  # type: ignore[operator]
            server.start()
        crowd.wait_for(40)
        crowd.end()
        print(f"5 crashes of the database server: {check(database, crowd)} acknowledged turns, none lost")


def workers_of(served: Served) -> list[int]:
    """The worker processes, without multiprocessing's resource tracker."""
    pgrep = ["pgrep", "-P", str(served.process.pid), "-f", "spawn_main"]
    found = subprocess.run(pgrep, capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.faults)])
def test_workers_that_are_killed(model_dir: Path, upstream: Upstream, tmp_path: Path, kills: int) -> None:
    """Workers over one data directory: each dead one is replaced with a log line; SIGTERM drains them all."""
    chance = random.Random(kills)
    data = tmp_path / "data"
    with serving(serve_command(model_dir, upstream, data, "--workers", "2")) as served:
        crowd = Crowd(served.url, 6)
        crowd.start()
        for _ in range(kills):
            crowd.wait_for(chance.randint(20, 60))
            before = workers_of(served)
            os.kill(chance.choice(before), signal.SIGKILL)
        crowd.wait_for(40)
        crowd.end()
        metrics = httpx2.get(f"{served.url}/metrics", timeout=PATIENCE).text
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
    assert sum("ended by signal SIGKILL" in line for line in served.lines) == kills
    assert "tokentape_store_healthy 1.0" in metrics
    # Of all workers, those that were killed included; these may have died between a commit and counting it.
    (counted,) = re.findall(r'^tokentape_turns_total{cause="",outcome="committed"} (\S+)', metrics, re.MULTILINE)
    assert float(counted) >= crowd.received - len(crowd.agents) * kills
    print(f"{kills} kills of one of two workers: {check(data, crowd)} acknowledged turns, none lost")


@pytest.mark.faults
def test_workers_stopped_by_sigterm(model_dir: Path, upstream: Upstream, tmp_path: Path) -> None:
    """SIGTERM under load: running calls finish and are answered, and no unanswered turn is recorded."""
    agents = [Agent(f"agent-{number}") for number in range(6)]
    for _ in range(10):
        before = sum(len(agent.received) for agent in agents)
        with serving(serve_command(model_dir, upstream, tmp_path, "--workers", "2")) as served:
            threads = [threading.Thread(target=agent.talk, args=(served,), daemon=True) for agent in agents]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + PATIENCE
            while sum(len(agent.received) for agent in agents) < before + 20 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(served.process.pid, signal.SIGTERM)
            assert served.process.wait(PATIENCE) == 0
            for thread in threads:
                thread.join(PATIENCE)
        invariant(tmp_path, [choice for agent in agents for choice in agent.received])


@pytest.mark.faults
@needs_strace
def test_worker_with_one_disk_failure(model_dir: Path, upstream: Upstream, tmp_path: Path) -> None:
    """It acknowledges nothing any more, and is replaced by a worker that has read the disk."""
    command = serve_command(model_dir, upstream, tmp_path / "data", "--workers", "2")
    # Of each process by itself: one of its first flushes fails.
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "inject=fdatasync:error=EIO:when=20"]
    with serving(command, prefix=strace) as served:
        agents = [Agent(f"agent-{number}") for number in range(4)]
        deadline = time.monotonic() + 120
        failures = 0
        while sum("restarting it" in line for line in served.lines) < 1:
            assert time.monotonic() < deadline
            for agent in agents:
                with served.client(agent.session) as client:
                    agent.talk_to(client, most=2)
                failures += agent.error is not None
                agent.error = None
        assert failures
        assert any("can no longer record" in line for line in served.lines)
        served.signal(signal.SIGTERM)
        served.process.wait(PATIENCE)
    invariant(tmp_path / "data", [choice for agent in agents for choice in agent.received], unacknowledged=failures)


def test_workers_end_with_their_supervisor(model_dir: Path, upstream: Upstream, tmp_path: Path) -> None:
    """Workers of a killed supervisor exit, and the directory stays locked until then."""
    with serving(serve_command(model_dir, upstream, tmp_path, "--workers", "2")) as served:
        workers = workers_of(served)
        assert len(workers) == 2
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    agent = Agent("after")
    with serving(serve_command(model_dir, upstream, tmp_path)) as served:
        agent.talk(served, most=1)
    assert len(agent.received) == 1
