"""Faults of time: a long life, an end on request, a clock that jumps, data from before."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.faults.conftest import Gateway, Serve
from tests.faults.invariant import invariant
from tests.faults.process import Agent, needs_strace, serve_command, serving, talk_all
from tests.faults.upstream import Upstream
from tests.processes import Command
from tests.waiting import PATIENCE
from tokentape.store import verify

GOLDEN = Path(__file__).parents[1] / "store/golden"
SOAK_TURNS = int(os.environ.get("TOKENTAPE_SOAK_TURNS", "50000"))


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_long_running_process(tmp_path: Path) -> None:
    """Row 30: memory and open files stay constant over `TOKENTAPE_SOAK_TURNS` turns."""
    command = [sys.executable, "-m", "tests.faults.soaked_process", str(tmp_path)]
    samples: list[tuple[int, int, int]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        def sample(done: int) -> None:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            samples.append((done, pages * os.sysconf("SC_PAGE_SIZE") >> 10, files))

        async def session(client: httpx2.AsyncClient, number: int) -> None:
            messages: list[Any] = []
            for turn in range(10):
                messages.append({"role": "user", "content": f"question {turn}"})
                reply = await client.post(f"/sessions/s{number}/v1/chat/completions", json={"messages": messages})
                (choice,) = reply.json()["choices"]
                assert choice["tokentape"]["turn"] == turn
                messages.append({"role": "assistant", "content": choice["message"]["content"]})
            if number % 2:
                assert (await client.delete(f"/sessions/s{number}")).status_code == 204

        async def soak() -> None:
            async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
                done = 0
                while done < SOAK_TURNS:
                    await asyncio.gather(*(session(client, done // 10 + at) for at in range(20)))
                    done += 200
                    if done % max(200, SOAK_TURNS // 10) < 200:
                        sample(done)

        asyncio.run(soak())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    print("turns, RSS in KiB, open files:", *samples, sep="\n")
    # The first third is left out: pools, caches and the allocator fill.
    _, rss, files = samples[len(samples) // 3]
    assert samples[-1][1] < rss * 1.15, samples
    assert samples[-1][2] <= files + 2, samples
    assert verify(tmp_path).ok


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.faults)])
def test_sigterm_under_load(model_dir: Path, upstream: Upstream, tmp_path: Path, rounds: int) -> None:
    """Row 31: running calls finish and are answered, the process exits with 0, and no unanswered turn is committed."""
    agents = [Agent(f"agent-{number}") for number in range(6)]
    for _ in range(rounds):
        before = sum(len(agent.received) for agent in agents)
        with serving(serve_command(model_dir, upstream, tmp_path)) as served:
            threads = talk_all(agents, served)
            deadline = time.monotonic() + PATIENCE
            while sum(len(agent.received) for agent in agents) < before + 20 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(served.process.pid, signal.SIGTERM)
            assert served.process.wait(PATIENCE) == 0
            for thread in threads:
                thread.join(PATIENCE)
        invariant(tmp_path, [choice for agent in agents for choice in agent.received])


def test_clock_that_jumps(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 32: the clock jumps by years between turns; the order is that of commits, and the context continues."""
    real = time.time()
    clock = iter([real, real - 4e8, real + 4e8, real - 8e8] * 100)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    messages: list[Any] = []
    for number in range(6):
        messages.append({"role": "user", "content": f"question {number}"})
        messages.append(gateway.ask(messages))
        gateway.ask(session=f"other-{number}")
    turns = gateway.check()["s"].turns
    assert [turn.parent for turn in turns] == [None, 0, 1, 2, 3, 4]
    times = [turn.created_at for turn in turns]
    assert times != sorted(times), "the clock did not jump"
    listed = httpx2.get(f"{gateway.url}/sessions").json()["data"]
    assert [session["session_id"] for session in listed] == ["s", *(f"other-{number}" for number in range(6))]
    gateway.stop()
    gateway.start()
    messages.append({"role": "user", "content": "and now?"})
    gateway.ask(messages)
    assert gateway.check()["s"].turns[-1].parent == 5


@pytest.fixture(params=sorted(path.name for path in GOLDEN.glob("*.db")))
def old_data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A data directory as an earlier version left it."""
    directory = tmp_path / "data"
    directory.mkdir()
    shutil.copy(GOLDEN / request.param, directory / "tokentape.db")
    return directory


def contents(directory: Path) -> dict[str, list[str]]:
    """The digests of every session's turns, read without our code."""
    with closing(sqlite3.connect(directory / "tokentape.db")) as database:
        rows = database.execute("SELECT session_id, digest FROM turns ORDER BY session_id, seq").fetchall()
    found: dict[str, list[str]] = {}
    for session_id, digest in rows:
        found.setdefault(session_id, []).append(digest)
    return found


def test_data_of_an_older_version(old_data: Path, serve: Serve) -> None:
    """Row 33: it is migrated, with every turn unchanged, and old sessions continue."""
    before = contents(old_data)
    gateway = serve()
    listed = httpx2.get(f"{gateway.url}/sessions").json()["data"]
    assert {session["session_id"] for session in listed} >= before.keys()
    for session_id in before:
        gateway.ask(session=session_id)
    gateway.stop()
    assert verify(old_data).ok
    after = contents(old_data)
    assert {session_id: digests[:-1] for session_id, digests in after.items()} == before
    assert [after[choice.session_id][choice.turn] for choice in gateway.received] == [
        after[name][-1] for name in before
    ]


def test_data_of_a_newer_version(model_dir: Path, upstream: Upstream, serve: Serve) -> None:
    """Row 33: a gateway that does not know the version refuses to start and changes nothing."""
    gateway = serve()
    gateway.ask()
    gateway.stop()
    path = gateway.directory / "tokentape.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    before = path.read_bytes()
    command = serve_command(model_dir, upstream, gateway.directory)
    with Command(command[3:]) as refused:
        stderr = refused.stderr.read()
    assert refused.returncode != 0
    assert "schema version 99" in " ".join(stderr.split())
    assert path.read_bytes() == before


@pytest.mark.faults
@needs_strace
@pytest.mark.parametrize("when", range(1, 9))
def test_migration_that_is_killed(old_data: Path, model_dir: Path, upstream: Upstream, when: int) -> None:
    """Row 33: killed while it migrates, it has migrated or it has not; the next start makes it whole."""
    before = contents(old_data)
    command = serve_command(model_dir, upstream, old_data)
    kill = f"inject=pwrite64,fdatasync,ftruncate:signal=KILL:when={when}"
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", kill]
    with serving(command, prefix=strace) as served:
        assert when > 2 or not served.url, "it was not killed"
        if not served.url:
            served.process.wait(PATIENCE)
    with closing(sqlite3.connect(old_data / "tokentape.db")) as database:
        (version,) = database.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert ("events" in tables) == (version != "3"), "half a migration"
    agent = Agent("new")
    with serving(command) as served:
        agent.talk(served, most=2)
    assert len(agent.received) == 2
    assert verify(old_data).ok
    assert {name: contents(old_data)[name] for name in before} == before
