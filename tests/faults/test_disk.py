"""Faults of the disk and of the process above it."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import openai
import pytest

from tests.faults.conftest import QUESTION, Gateway, Serve, goes_on
from tests.faults.invariant import Received, invariant
from tests.faults.process import Agent, needs_strace, serve_command, serving, talk_all
from tests.faults.upstream import Plan, Upstream
from tests.processes import Command
from tests.store.test_faults import limit_pages  # noqa: F401 - a fixture
from tests.waiting import PATIENCE
from tokentape.store import verify

LONG = Plan(text="pears and plums " * 300 + "<|im_end|>")


def received_by(agents: list[Agent]) -> list[Received]:
    return [choice for agent in agents for choice in agent.received]


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.faults)])
def test_kill_9(model_dir: Path, upstream: Upstream, tmp_path: Path, rounds: int) -> None:
    """Row 1: a gateway under load killed at any moment, again and again; the same sessions go on after each."""
    chance = random.Random(rounds)
    agents = [Agent(f"agent-{number}") for number in range(6)]
    command = serve_command(model_dir, upstream, tmp_path)
    for kills in range(1, rounds + 1):
        before = len(received_by(agents))
        with serving(command) as served:
            threads = talk_all(agents, served)
            deadline = time.monotonic() + PATIENCE
            while len(received_by(agents)) < before + 12 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.3))
            served.signal(signal.SIGKILL)
            for thread in threads:
                thread.join()
        assert all(isinstance(agent.error, openai.APIConnectionError) for agent in agents), "it ended before the kill"
        invariant(tmp_path, received_by(agents), unacknowledged=kills * len(agents))
    print(f"{len(received_by(agents))} acknowledged turns, {rounds} kills, none lost")


@pytest.mark.faults
@needs_strace
@pytest.mark.parametrize("call", ["fdatasync", "pwrite64"])
@pytest.mark.parametrize("when", [6, 11, 16, 23])
def test_kill_9_within_a_commit(model_dir: Path, upstream: Upstream, tmp_path: Path, call: str, when: int) -> None:
    """Row 1: killed in the very system call that writes or flushes a commit."""
    agents = [Agent(f"agent-{number}") for number in range(3)]
    command = serve_command(model_dir, upstream, tmp_path)
    with serving(command) as served:
        agents[0].talk(served, most=2)
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"inject={call}:signal=KILL:when={when}"]
    with serving(command, prefix=strace) as served:
        for thread in talk_all(agents, served):
            thread.join(PATIENCE)
        assert all(agent.error is not None for agent in agents)
    with serving(command) as served:
        for agent in agents:
            agent.talk(served, most=2)
    invariant(tmp_path, received_by(agents), unacknowledged=len(agents))


def test_full_database(limit_pages: Callable[[int], None], gateway: Gateway, upstream: Upstream) -> None:  # noqa: F811
    """Row 2: SQLite finds no page; the turn is invisible, and with space the session continues."""
    history = [QUESTION, gateway.ask()]
    limit_pages(1)
    for stream in (False, True):
        upstream.plans = [LONG]
        error = gateway.refused([*history, QUESTION], stream=stream)
        assert error.code == "store_full"
        if isinstance(error, openai.APIStatusError):
            assert error.status_code == 507
            assert error.response.headers["x-should-retry"] == "false"
        gateway.check()
    assert httpx2.get(f"{gateway.url}/readyz").status_code == 200
    limit_pages(10_000)
    assert goes_on(gateway, history).seq == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=False).returncode:
        pytest.skip("needs root, to mount a file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.faults
def test_full_disk(model_dir: Path, upstream: Upstream, small_disk: Path) -> None:
    """Row 2: a real file system without room, and then with."""
    agent = Agent("s")
    ballast = small_disk / "ballast"
    with serving(serve_command(model_dir, upstream, small_disk / "data")) as served:
        agent.talk(served, most=2)
        ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 30_000))
        upstream.plans = [LONG] * 20
        agent.talk(served, most=20)
        assert isinstance(agent.error, openai.APIStatusError)
        assert (agent.error.status_code, agent.error.code) == (507, "store_full")
        assert agent.error.response.headers["x-should-retry"] == "false"
        assert httpx2.get(f"{served.url}/readyz").status_code == 503
        invariant(small_disk / "data", agent.received)
        upstream.plans = []
        ballast.unlink()
        assert httpx2.get(f"{served.url}/readyz").status_code == 200
        received = len(agent.received)
        agent.talk(served, most=2)
        assert len(agent.received) == received + 2
        served.signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
    invariant(small_disk / "data", agent.received)


def test_file_size_limit(model_dir: Path, upstream: Upstream, tmp_path: Path) -> None:
    """Row 3: the system refuses a write (EFBIG); the call fails, nothing is corrupted, a higher limit mends it."""
    agent = Agent("s")
    with serving(serve_command(model_dir, upstream, tmp_path)) as served:
        agent.talk(served, most=2)
        size = (tmp_path / "tokentape.db-wal").stat().st_size
        _, hard = resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (size + 20_000, hard))
        upstream.plans = [LONG] * 20
        agent.talk(served, most=20)
        assert isinstance(agent.error, openai.APIStatusError)
        assert (agent.error.status_code, agent.error.code) == (503, "store_error")
        assert agent.error.response.headers["x-should-retry"] == "false"
        invariant(tmp_path, agent.received)
        upstream.plans = []
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        received = len(agent.received)
        agent.talk(served, most=2)
        assert len(agent.received) == received + 2
    invariant(tmp_path, agent.received)


@pytest.mark.faults
@needs_strace
@pytest.mark.parametrize("when", ["12+", "12"], ids=["from the 12th on", "the 12th only"])
def test_failing_flush(model_dir: Path, upstream: Upstream, tmp_path: Path, when: str) -> None:
    """Row 4: after one failed flush nothing is acknowledged any more, and /readyz reports it."""
    agent = Agent("s")
    command = serve_command(model_dir, upstream, tmp_path)
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"inject=fdatasync:error=EIO:when={when}"]
    with serving(command, prefix=strace) as served:
        agent.talk(served, most=40)
        assert isinstance(agent.error, openai.APIStatusError)
        assert (agent.error.status_code, agent.error.code) == (503, "store_error")
        assert agent.error.response.headers["x-should-retry"] == "false"
        received = len(agent.received)
        agent.talk(served, most=3)
        assert len(agent.received) == received, "a turn was acknowledged after a flush had failed"
        assert httpx2.get(f"{served.url}/readyz").status_code == 503
        assert httpx2.get(f"{served.url}/healthz").status_code == 200
    with serving(command) as served:
        assert httpx2.get(f"{served.url}/readyz").status_code == 200
        agent.messages = []
        agent.talk(served, most=2)
    invariant(tmp_path, agent.received)


def test_flipped_bit(serve: Serve) -> None:
    """Row 5: `verify` names session and turn; the session can't be taken further, its neighbours can."""
    gateway = serve()
    for session in ("good", "bad"):
        history = [QUESTION, gateway.ask(session=session)]
        gateway.ask([*history, QUESTION], session)
    gateway.check()
    gateway.stop()
    with closing(sqlite3.connect(gateway.directory / "tokentape.db")) as database, database:
        where = "session_id = 'bad' AND seq = 1"
        (ids,) = database.execute(f"SELECT completion_ids FROM turns WHERE {where}").fetchone()
        flipped = bytes([ids[0] ^ 4]) + ids[1:]
        database.execute(f"UPDATE turns SET completion_ids = ? WHERE {where}", (flipped,))
    (finding,) = verify(gateway.directory).findings
    assert (finding.session_id, finding.turn) == ("bad", 1)
    gateway.start()
    error = gateway.refused([*history, QUESTION], "bad")
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (500, "store_corrupt")
    assert error.response.headers["x-should-retry"] == "false"
    gateway.ask([QUESTION], "good")
    gateway.stop()
    assert verify(gateway.directory).findings == (finding,)


@pytest.mark.parametrize("kept", [0, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (100, 5000, 20_000))])
def test_torn_file(serve: Serve, model_dir: Path, upstream: Upstream, kept: int) -> None:
    """Row 5: a database cut short is found, and a gateway on it acknowledges nothing that it can't keep."""
    gateway = serve()
    for number in range(6):
        gateway.ask(session=f"s{number}")
    gateway.stop()
    path = gateway.directory / "tokentape.db"
    os.truncate(path, min(kept, path.stat().st_size - 1))
    assert not verify(gateway.directory).ok
    command = serve_command(model_dir, upstream, gateway.directory)
    agent = Agent("new")
    with serving(command) as served:
        if served.url:
            agent.talk(served, most=2)
        else:
            assert served.process.wait(PATIENCE) != 0
    if kept == 0:
        # An empty file is a new database, whatever it held before; only its owner can tell.
        invariant(gateway.directory, agent.received)
    else:
        assert not agent.received
        assert not verify(gateway.directory).ok


def test_second_process_on_a_data_directory(gateway: Gateway, model_dir: Path, upstream: Upstream) -> None:
    """Row 6: it refuses to start and names the running process, which continues."""
    gateway.ask()
    command = serve_command(model_dir, upstream, gateway.directory)
    with Command(command[3:]) as second:
        stderr = second.stderr.read()
    assert second.returncode != 0
    assert f"process {os.getpid()}" in " ".join(stderr.split())
    gateway.ask(session="t")
    gateway.check()
