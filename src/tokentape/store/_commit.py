"""Group commits: one thread with one connection runs all waiting calls in one transaction.

A commit costs one flush to disk, however much it writes, so calls that arrive during a flush share the next
transaction. If one of them fails, each is run in its own savepoint, so that the others still succeed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from msgspec import Struct
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from tokentape.errors import StoreCorrupt, StoreError, TokentapeError

_log = logging.getLogger(__name__)

MAX_CALLS = 256
"""The maximum number of calls per transaction, which bounds how long the first call waits for the last."""

RECONNECTIONS = (0.0, 0.2, 0.4, 0.8, 1.6)
"""Seconds to wait before each attempt to reconnect: a server takes a few seconds to restart."""

Claims: TypeAlias = frozenset[str] | None
"""Names of what a call changes, which no other call may change at the same time. None: everything."""

Work: TypeAlias = Callable[[Connection], int | None]
"""The part of a call that runs in the transaction. Returns approximately how many bytes it wrote if it may be many."""


@dataclass(frozen=True, slots=True)
class StoreFailure:
    kind: type[TokentapeError]
    message: str
    fatal: bool = False
    """Whether the store can no longer be trusted, so that nothing may be acknowledged until a restart."""
    lost: bool = False
    """Whether to use a new connection, because this one was lost, maybe after the commit, or is read-only."""

    def error(self) -> TokentapeError:
        return self.kind(self.message)


@contextmanager
def explaining(explain: Callable[[DBAPIError], StoreFailure]) -> Iterator[None]:
    """Convert the database driver's errors to the store's errors."""
    try:
        yield
    except DBAPIError as error:
        # Drop the driver's message: it may quote data that it could not decode.
        raise explain(error).error() from None
    except UnicodeDecodeError:
        # What SQLite says about a damaged schema quotes its bytes.
        raise StoreCorrupt("the database is damaged; restore it from a backup or an archive") from None


class _QueuedWork(Struct, frozen=True):
    work: Work
    again: Work | None
    claims: Claims
    done: asyncio.Future[None]


_Outcome: TypeAlias = int | Exception
"""The number of bytes that a call wrote, or the error with which it failed."""


class CommitQueue:
    """Runs calls in its own thread, the only user of `connection`.

    `classify` converts a driver error. Each transaction runs in the context `exclusive()`. `check` is called before a
    transaction and, after it, before the callers are answered; if it returns a failure, that is fatal and raised to
    them. Then `after_commit` is called with the number of written bytes; if it returns a failure, that is fatal.

    Pass `claim` if other processes also write to the database. It is called first in each transaction and locks what
    the calls change.

    A transaction's calls are first run without savepoints, because each savepoint is a round trip to the server.

    After a fatal failure the queue refuses all calls. A failed flush is fatal: the kernel forgets it, and the next
    flush reports success for data that never reached the disk.
    """

    def __init__(
        self,
        connection: Connection,
        classify: Callable[[DBAPIError], StoreFailure],
        after_commit: Callable[[int], StoreFailure | None],
        exclusive: Callable[[], AbstractContextManager[None]] = nullcontext,
        claim: Callable[[Connection, Sequence[Claims]], None] | None = None,
        check: Callable[[], StoreFailure | None] = lambda: None,
    ) -> None:
        self._connection, self._classify, self._exclusive, self._claim = connection, classify, exclusive, claim
        self._after_commit, self._check = after_commit, check
        self._calls: SimpleQueue[_QueuedWork | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._broken: StoreFailure | None = None
        self._thread = threading.Thread(target=self._run, name="tokentape-commit", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def run(self, work: Work, again: Work | None = None, claims: Claims = None) -> None:
        """Queue `work`. Return when it is durable, or raise the error with which it failed.

        If the connection is lost, the work may or may not have been committed. The queue then runs `again`, which must
        do the work only if it was not committed. Without `again`, the call fails. If the awaiting task is cancelled,
        the queue skips work that has not begun and finishes work that has.
        """
        done = asyncio.get_running_loop().create_future()
        with self._closing:
            if self._closed:
                raise StoreError("the store is closed")
            self._calls.put(_QueuedWork(work, again, claims, done))
        await done

    def close(self) -> None:
        """Run the queued calls, then stop. Later calls to `run` raise `StoreError`."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        for batch in self._batches():
            try:
                self._serve(batch)
            except Exception as error:
                _log.exception("the commit thread failed")
                self._break(StoreFailure(StoreError, f"the store failed ({type(error).__name__}); restart", fatal=True))
                _answer(batch, self._refusals(batch))

    def _serve(self, batch: Sequence[_QueuedWork]) -> None:
        # Check first as well: what is refused must not be recorded.
        outcomes = self._refused(batch) or self._commit(batch)
        outcomes = self._refused(batch) or outcomes
        _answer(batch, outcomes)
        sizes = [outcome for outcome in outcomes if isinstance(outcome, int)]
        if sizes and (failure := self._after_commit(sum(sizes))) is not None:
            self._break(failure)

    def _refused(self, batch: Sequence[_QueuedWork]) -> Sequence[_Outcome]:
        """Return refusals if `check` fails, else nothing."""
        if self._broken is not None or (failure := self._check()) is None:
            return ()
        self._break(failure)
        return self._refusals(batch)

    def _batches(self) -> Iterator[list[_QueuedWork]]:
        while (first := self._calls.get()) is not None:
            batch = [first]
            while len(batch) < MAX_CALLS and not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    self._calls.put(None)
                    break
                batch.append(call)
            yield [call for call in batch if not call.done.cancelled()]

    def _commit(self, batch: Sequence[_QueuedWork]) -> Sequence[_Outcome]:
        if self._broken is not None:
            return self._refusals(batch)
        try:
            if (outcomes := self._commit_at_once(batch)) is not None:
                return outcomes
            with self._transaction(batch):
                return [self._attempt(call.work) for call in batch]
        except DBAPIError as error:
            # The whole transaction was rolled back, so none of its calls succeeded.
            failure = self._classify(error)
        if failure.fatal:
            self._break(failure)
            return self._refusals(batch)
        if failure.lost:
            self._connection.invalidate()
            return self._commit_again(batch, failure)
        if len(batch) == 1:
            return [failure.error()]
        return [outcome for call in batch for outcome in self._commit([call])]

    @contextmanager
    def _transaction(self, batch: Sequence[_QueuedWork]) -> Iterator[None]:
        with self._exclusive(), self._connection.begin():
            if self._claim is not None:
                self._claim(self._connection, [call.claims for call in batch])
            yield

    def _commit_at_once(self, batch: Sequence[_QueuedWork]) -> Sequence[_Outcome] | None:
        """Run and commit the calls without savepoints. If one of them fails, commit nothing and return None."""
        try:
            with self._transaction(batch):
                return [call.work(self._connection) or 0 for call in batch]
        except Exception as error:
            if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError):
                raise
            return None

    def _commit_again(self, batch: Sequence[_QueuedWork], failure: StoreFailure) -> Sequence[_Outcome]:
        """Reconnect after the connection was lost, possibly during a commit, and run each call's `again`."""
        works = [call.again for call in batch if call.again is not None]
        for seconds in RECONNECTIONS if works else ():
            time.sleep(seconds)
            try:
                with self._transaction(batch):
                    outcomes = iter([self._attempt(work) for work in works])
            except DBAPIError as error:
                cause = self._classify(error)
                if not cause.lost:
                    # Don't raise this failure: it would mean that nothing was recorded, which is uncertain.
                    _log.warning("the connection was lost; records may or may not have been written: %s", cause.message)
                    break
            else:
                _log.warning("the connection to the database was lost and has been restored")
                return [failure.error() if call.again is None else next(outcomes) for call in batch]
        return [failure.error() for _ in batch]

    def _attempt(self, work: Work) -> _Outcome:
        """Run a call in a savepoint, and undo it if it fails. Raises DBAPIError if the transaction can't continue."""
        self._connection.exec_driver_sql("SAVEPOINT call")
        outcome: _Outcome
        try:
            outcome = work(self._connection) or 0
        except IntegrityError as error:
            outcome = self._classify(error).error()
        except DBAPIError:
            raise
        except Exception as error:
            outcome = error
        if isinstance(outcome, Exception):
            self._connection.exec_driver_sql("ROLLBACK TO SAVEPOINT call")
        self._connection.exec_driver_sql("RELEASE SAVEPOINT call")
        return outcome

    def _break(self, failure: StoreFailure) -> None:
        _log.error("the store refuses all writes until a restart: %s", failure.message)
        self._broken = failure

    def _refusals(self, batch: Sequence[_QueuedWork]) -> Sequence[_Outcome]:
        assert self._broken is not None
        return [self._broken.error() for _ in batch]


def _answer(batch: Sequence[_QueuedWork], outcomes: Sequence[_Outcome]) -> None:
    """Resolve the futures in `batch`, waking each event loop only once: a wake-up costs more than an insert."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], _Outcome]]] = {}
    for call, outcome in zip(batch, outcomes, strict=True):
        by_loop.setdefault(call.done.get_loop(), []).append((call.done, outcome))
    for loop, answers in by_loop.items():
        # An event loop that was closed in the meantime has no waiting tasks.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: Sequence[tuple[asyncio.Future[None], _Outcome]]) -> None:
    for future, outcome in answers:
        if future.done():  # cancelled meanwhile, or answered before the commit thread failed
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(None)
