from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError

from tests.records import SETUP, make_chain, make_turn
from tokentape.errors import Conflict, StoreError, StoreFull, StoreUnavailable
from tokentape.store import SqliteStore
from tokentape.store._commit import CommitQueue, StoreFailure, Work
from tokentape.store._sqlite import explain, writing_engine
from tokentape.types import SessionInfo


class Numbers:
    """A table of unique numbers with a commit queue, and a gate that blocks the queue."""

    def __init__(
        self,
        engine: Engine,
        after_commit: Callable[[int], StoreFailure | None],
        classify: Callable[[DBAPIError], StoreFailure],
    ) -> None:
        self.connection = engine.connect()
        with self.connection.begin():
            self.connection.execute(text("CREATE TABLE numbers (n INTEGER PRIMARY KEY)"))
        self.commits = 0
        event.listen(engine, "commit", self._count)
        self.queue = CommitQueue(self.connection, classify, after_commit)

    def _count(self, _: Connection) -> None:
        self.commits += 1

    def insert(self, *numbers: int) -> Coroutine[Any, Any, None]:
        def work(connection: Connection) -> int:
            for number in numbers:
                connection.execute(text("INSERT INTO numbers VALUES (:n)"), {"n": number})
            return 1

        return self.queue.run(work)

    async def held(self, *calls: Coroutine[Any, Any, None]) -> list[BaseException | None]:
        """Return the outcomes of `calls`, which all wait while a first call runs."""
        begun, gate = threading.Event(), threading.Event()

        def hold(_: Connection) -> int:
            begun.set()
            gate.wait()
            return 0

        holding = asyncio.ensure_future(self.queue.run(hold))
        await asyncio.to_thread(begun.wait)
        waiting = asyncio.gather(*calls, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        gate.set()
        await holding
        return await waiting

    def recorded(self) -> list[int]:
        self.queue.close()
        with self.connection.begin():
            return list(self.connection.execute(text("SELECT n FROM numbers ORDER BY n")).scalars())


@contextmanager
def numbers(
    directory: Path,
    after_commit: Callable[[int], StoreFailure | None] = lambda _: None,
    classify: Callable[[DBAPIError], StoreFailure] = explain,
) -> Iterator[Numbers]:
    table = Numbers(writing_engine(directory / "numbers.db", "NORMAL"), after_commit, classify)
    try:
        yield table
    finally:
        table.queue.close()
        table.connection.close()


def test_calls_that_wait_share_one_transaction(tmp_path: Path) -> None:
    with numbers(tmp_path) as table:
        asyncio.run(table.held(*(table.insert(n) for n in range(100))))
        assert table.commits == 2
        assert table.recorded() == list(range(100))


def test_a_transaction_takes_a_bounded_number_of_calls(tmp_path: Path) -> None:
    with numbers(tmp_path) as table:
        asyncio.run(table.held(*(table.insert(n) for n in range(600))))
        assert table.commits == 1 + 3


def test_failed_call_does_not_affect_other_calls(tmp_path: Path) -> None:
    with numbers(tmp_path) as table:
        outcomes = asyncio.run(table.held(table.insert(1), table.insert(2, 3, 1), table.insert(4)))
        assert [type(outcome) for outcome in outcomes] == [type(None), Conflict, type(None)]
        assert table.commits == 2
        assert table.recorded() == [1, 4]


def test_any_exception_is_returned_to_its_call_without_a_trace(tmp_path: Path) -> None:
    def work(connection: Connection) -> int:
        connection.execute(text("INSERT INTO numbers VALUES (7)"))
        raise ZeroDivisionError

    with numbers(tmp_path) as table:
        outcomes = asyncio.run(table.held(table.insert(1), table.queue.run(work), table.insert(2)))
        assert [type(outcome) for outcome in outcomes] == [type(None), ZeroDivisionError, type(None)]
        assert table.recorded() == [1, 2]


def test_error_that_ends_the_transaction_reaches_only_its_call(tmp_path: Path) -> None:
    def work(connection: Connection) -> int:
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("SELECT * FROM nothing_of_that_name")
        return 1

    with numbers(tmp_path) as table:
        outcomes = asyncio.run(table.held(table.insert(1), table.queue.run(work), table.insert(2)))
        assert [type(outcome) for outcome in outcomes] == [type(None), StoreError, type(None)]
        assert table.recorded() == [1, 2]


def test_after_a_lost_connection_no_error_denies_the_record(tmp_path: Path) -> None:
    """The commit may have gone through before the connection was lost, whatever fails the retry."""

    def classify(error: DBAPIError) -> StoreFailure:
        what = str(error.orig)
        return StoreFailure(StoreUnavailable, what, lost=True) if what == "lost" else StoreFailure(StoreFull, what)

    def failing(what: str) -> Work:
        def work(connection: Connection) -> int:
            raise DBAPIError("", None, Exception(what))

        return work

    with numbers(tmp_path, classify=classify) as table:
        with pytest.raises(StoreUnavailable):
            asyncio.run(table.queue.run(failing("lost"), again=failing("full")))
        with pytest.raises(StoreFull):
            asyncio.run(table.queue.run(failing("full")))
        asyncio.run(table.insert(1))
        assert table.recorded() == [1]


def test_call_canceled_before_it_begins_is_left_out(tmp_path: Path) -> None:
    async def cancelled(call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        task.cancel()

    with numbers(tmp_path) as table:
        asyncio.run(table.held(table.insert(1), cancelled(table.insert(2)), table.insert(3)))
        assert table.recorded() == [1, 3]


def test_call_canceled_while_running_finishes_and_the_queue_continues(tmp_path: Path) -> None:
    begun, gate = threading.Event(), threading.Event()

    def work(connection: Connection) -> int:
        begun.set()
        gate.wait()
        connection.execute(text("INSERT INTO numbers VALUES (1)"))
        return 1

    async def cancel_at_work(table: Numbers) -> None:
        call = asyncio.ensure_future(table.queue.run(work))
        await asyncio.to_thread(begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.set()
        await table.insert(2)

    with numbers(tmp_path) as table:
        asyncio.run(cancel_at_work(table))
        assert table.recorded() == [1, 2]


def test_caller_with_a_closed_event_loop_does_not_stop_the_queue(tmp_path: Path) -> None:
    begun, gate = threading.Event(), threading.Event()

    def work(_: Connection) -> int:
        begun.set()
        gate.wait()
        return 0

    async def leave(table: Numbers) -> None:
        call = asyncio.ensure_future(table.queue.run(work))
        await asyncio.to_thread(begun.wait)
        call.cancel()

    with numbers(tmp_path) as table:
        asyncio.run(leave(table))
        gate.set()
        asyncio.run(table.insert(1))
        assert table.recorded() == [1]


def test_closed_queue_refuses_calls(tmp_path: Path) -> None:
    with numbers(tmp_path) as table:
        table.queue.close()
        with pytest.raises(StoreError, match="closed"):
            asyncio.run(table.insert(1))


def test_fatal_error_after_a_commit_keeps_it_and_refuses_later_calls(tmp_path: Path) -> None:
    failure = StoreFailure(StoreError, "the disk failed", fatal=True)
    with numbers(tmp_path, lambda _: failure) as table:
        asyncio.run(table.insert(1))
        with pytest.raises(StoreError, match="the disk failed"):
            asyncio.run(table.insert(2))
        assert table.queue.broken
        assert table.recorded() == [1]


def test_bug_after_a_commit_keeps_it_and_leaves_no_caller_waiting(tmp_path: Path) -> None:
    def crash(_: int) -> None:
        raise ZeroDivisionError

    with numbers(tmp_path, crash) as table:
        asyncio.run(table.insert(1))
        with pytest.raises(StoreError, match="ZeroDivisionError"):
            asyncio.run(table.insert(2))
        assert table.recorded() == [1]


# The same through a store


def test_200_concurrent_writes_need_far_fewer_transactions(tmp_path: Path) -> None:
    commits: list[Connection] = []

    def note(connection: Connection) -> None:
        commits.append(connection)

    chains = [make_chain(f"s{number}", 5) for number in range(40)]

    async def write_all(store: SqliteStore) -> None:
        await store.write(SETUP, *(SessionInfo(chain[0].session_id, 1.0) for chain in chains))
        event.listen(Engine, "commit", note)
        for turns in zip(*chains, strict=True):
            await asyncio.gather(*(store.write(turn) for turn in turns))

    with SqliteStore.open(tmp_path) as store:
        try:
            asyncio.run(write_all(store))
        finally:
            event.remove(Engine, "commit", note)
        assert sum(summary.turns for summary in store.sessions()) == 200
    assert 5 <= len(commits) <= 50


def test_of_concurrent_writers_of_one_turn_exactly_one_succeeds(tmp_path: Path) -> None:
    async def race(store: SqliteStore) -> list[BaseException | None]:
        await store.write(SETUP, SessionInfo("s", 1.0))
        rivals = (make_turn("s", 0, engine=f"engine {number}") for number in range(20))
        return await asyncio.gather(*map(store.write, rivals), return_exceptions=True)

    with SqliteStore.open(tmp_path) as store:
        outcomes = asyncio.run(race(store))
        assert [type(outcome) for outcome in outcomes].count(Conflict) == 19
        winner = outcomes.index(None)
        assert store.load_session("s").turns[0].engine == f"engine {winner}"


class FailingFlush(sqlite3.Connection):
    """A connection whose commits fail once, as they do when the kernel can't write a page back."""

    fail_next = False

    def commit(self) -> None:
        if FailingFlush.fail_next:
            FailingFlush.fail_next = False
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
            raise error
        super().commit()


def test_a_failed_flush_is_not_acknowledged_and_poisons_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated at the driver; in `test_faults`, the kernel fails if strace is installed."""
    connect = sqlite3.connect

    def connect_failing(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        return connect(*args, **kwargs, factory=FailingFlush)

    monkeypatch.setattr(sqlite3, "connect", connect_failing)
    with SqliteStore.open(tmp_path) as store:
        asyncio.run(store.write(SETUP, SessionInfo("s", 1.0), make_turn("s", 0)))
        FailingFlush.fail_next = True
        for _ in range(3):
            with pytest.raises(StoreError, match="restart"):
                asyncio.run(store.write(SessionInfo("t", 1.0)))
        assert not store.healthy
        assert [summary.info.session_id for summary in store.sessions()] == ["s"]
    with SqliteStore.open(tmp_path) as store:
        assert store.healthy
        assert [summary.info.session_id for summary in store.sessions()] == ["s"]
