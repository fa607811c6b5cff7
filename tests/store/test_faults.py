"""The store under kill -9, full disks and failing flushes.

In every case: acknowledged turns are present, nothing else is, the hash chain holds.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from tests.records import SETUP, bits, make_chain, make_turn
from tests.waiting import PATIENCE
from tokentape.errors import StoreFull
from tokentape.store import SqliteStore, verify
from tokentape.types import Reward, SessionInfo

ROOT = Path(__file__).parents[2]
WRITING_PROCESS = [sys.executable, "-m", "tests.store.writing_process"]


def acknowledged(lines: list[str], before: dict[str, int]) -> dict[str, int]:
    """The newest acknowledged `seq` of each session, from the output of the writing process."""
    newest = dict(before)
    for line in lines:
        if match := re.fullmatch(r"(s\d) (\d+)", line):
            newest[match[1]] = int(match[2])
    return newest


def check_record(directory: Path, newest: dict[str, int]) -> None:
    """Check that every acknowledged turn is complete, with at most the turn in flight added, and no partial turn."""
    report = verify(directory)
    assert report.ok, report.findings
    with SqliteStore.open(directory, read_only=True) as store:
        for stored in store.iter_sessions():
            turns = stored.turns
            assert (
                newest.get(stored.info.session_id, -1) + 1 <= len(turns) <= newest.get(stored.info.session_id, -1) + 2
            )
            assert bits(turns) == bits(make_chain(stored.info.session_id, len(turns), tokens=300))


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_loses_no_acknowledged_turn_and_leaves_no_partial_turn(tmp_path: Path, rounds: int) -> None:
    chance = random.Random(rounds)
    newest: dict[str, int] = {}
    for _ in range(rounds):
        with subprocess.Popen([*WRITING_PROCESS, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(chance.randint(1, 150))]
            process.kill()
            lines += process.stdout.read().splitlines()
        newest = acknowledged(lines, newest)
        check_record(tmp_path, newest)
        with SqliteStore.open(tmp_path) as store:
            newest = {stored.info.session_id: len(stored.turns) - 1 for stored in store.iter_sessions()}
    assert sum(newest.values()) > 0


@pytest.fixture
def limit_pages() -> Iterator[Callable[[int], None]]:
    """Limit the pages beyond its current size that a database opened in this test may use."""
    connections: list[sqlite3.Connection] = []

    def note(connection: Any, _: object) -> None:
        connections.append(connection)

    def limit(more: int) -> None:
        writer = connections[0]
        pages = writer.execute("PRAGMA page_count").fetchone()[0]
        writer.execute(f"PRAGMA max_page_count = {pages + more}").fetchall()

    event.listen(Pool, "connect", note)
    yield limit
    event.remove(Pool, "connect", note)


def test_a_full_disk_fails_the_call_and_the_store_recovers_with_space(
    tmp_path: Path, limit_pages: Callable[[int], None]
) -> None:
    root, child = make_chain("s", 2, tokens=5000)
    with SqliteStore.open(tmp_path) as store:
        asyncio.run(store.write(SETUP, SessionInfo("s", 1.0), root))
        limit_pages(3)
        for _ in range(2):
            with pytest.raises(StoreFull):
                asyncio.run(store.write(child))
        assert store.healthy
        assert len(store.load_session("s").turns) == 1
        assert verify(tmp_path).ok
        limit_pages(10_000)
        asyncio.run(store.write(child))
        assert bits(store.load_session("s").turns) == bits([root, child])


def test_call_too_large_for_the_disk_does_not_affect_other_calls(
    tmp_path: Path, limit_pages: Callable[[int], None]
) -> None:
    large = make_turn("s", 0, tokens=5000)

    async def write_together(store: SqliteStore) -> list[BaseException | None]:
        await store.write(SETUP, SessionInfo("s", 1.0), Reward("s", None, 0.0, 1.0))
        limit_pages(3)
        small = (store.write(Reward("s", None, float(value), 1.0)) for value in (1, 2))
        return await asyncio.gather(next(small), store.write(large), next(small), return_exceptions=True)

    with SqliteStore.open(tmp_path) as store:
        outcomes = asyncio.run(write_together(store))
        assert [type(outcome) for outcome in outcomes] == [type(None), StoreFull, type(None)]
        assert [reward.value for reward in store.load_session("s").rewards] == [0.0, 1.0, 2.0]
        assert store.load_session("s").turns == ()


def test_checkpoint_without_disk_space_is_postponed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = sqlite3.connect

    def connect_failing(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        return connect(*args, **kwargs, factory=NoRoomForCheckpoints)

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect_failing)
        for _ in range(2):
            with SqliteStore.open(tmp_path) as store:
                name = f"s{len(store.sessions())}"
                asyncio.run(store.write(SETUP, SessionInfo(name, 1.0), make_turn(name, 0, tokens=5000)))
                assert store.healthy
    assert "disk is full" in caplog.text
    with SqliteStore.open(tmp_path) as store:
        assert [summary.turns for summary in store.sessions()] == [1, 1]


class NoRoomForCheckpoints(sqlite3.Connection):
    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        if "wal_checkpoint" in statement:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(statement, *parameters)


FILE_SIZE_LIMIT = """
import asyncio, resource, sys
from pathlib import Path
from tests.records import SETUP, make_chain
from tokentape.errors import StoreError
from tokentape.store import SqliteStore
from tokentape.types import SessionInfo

turns = make_chain("s", 40, tokens=300)

async def main(store):
    await store.write(SETUP, SessionInfo("s", 1.0))
    size = (Path(sys.argv[1]) / "tokentape.db-wal").stat().st_size
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, hard))
    for number, turn in enumerate(turns):
        try:
            await store.write(turn)
        except StoreError as error:
            break
    assert 0 < number < len(turns) - 1, number
    assert store.healthy
    assert len(store.load_session("s").turns) == number
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for turn in turns[number:]:
        await store.write(turn)

with SqliteStore.open(sys.argv[1]) as store:
    asyncio.run(main(store))
"""


def test_a_file_size_limit_fails_the_call_and_corrupts_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FILE_SIZE_LIMIT, tmp_path], cwd=ROOT, check=True)
    assert verify(tmp_path).ok
    with SqliteStore.open(tmp_path, read_only=True) as store:
        assert bits(store.load_session("s").turns) == bits(make_chain("s", 40, tokens=300))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, which injects the fault")
@pytest.mark.parametrize("when", ["25+", "25"], ids=["from the 25th on", "the 25th only"])
def test_a_failing_fdatasync_poisons_the_store_and_keeps_only_acknowledged_turns(tmp_path: Path, when: str) -> None:
    strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject=fdatasync:error=EIO:when={when}"]
    command = [*strace, *WRITING_PROCESS, tmp_path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            # The traced process outlives strace if that alone is killed.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    *lines, failed, still, healthy = output.splitlines()
    assert "SQLITE_IOERR_FSYNC" in failed
    assert "SQLITE_IOERR_FSYNC" in still
    assert healthy == "broken"
    newest = acknowledged(lines, {})
    check_record(tmp_path, newest)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        recorded = {summary.info.session_id: summary.turns - 1 for summary in store.sessions()}
    assert recorded == newest
