"""Group commit: one thread, one connection; calls that wait at the same time share one transaction.

A commit costs a flush to the disk however much it writes, so the calls that arrive during one flush go into
the next together. One that fails leaves the others alone: then each is run in a savepoint of its own.
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

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from tokentape.errors import StoreError, TokentapeError

_log = logging.getLogger(__name__)

MAX_CALLS = 256
"""Calls per transaction: bounds how long the first of them waits for the last."""

RECONNECTIONS = (0.0, 0.2, 0.4, 0.8, 1.6)
"""Seconds to wait before each try to go on after the connection was lost: a server that restarts takes a few."""

Claims: TypeAlias = frozenset[str] | None
"""Names of what a call changes. No other call may change it at the same time. None stands for everything."""

Work: TypeAlias = Callable[[Connection], int]
"""What a call does inside the transaction. Returns about how many bytes it wrote."""


@dataclass(frozen=True, slots=True)
class StoreFailure:
    kind: type[TokentapeError]
    message: str
    fatal: bool = False
    """The store can't be trusted any more: nothing may be acknowledged until a restart has read the disk."""
    lost: bool = False
    """The connection is gone, and with it the knowledge whether a commit under way went through."""

    def error(self) -> TokentapeError:
        return self.kind(self.message)


@dataclass(frozen=True, slots=True)
class _QueuedWork:
    work: Work
    again: Work | None
    claims: Claims
    done: asyncio.Future[None]


_Outcome: TypeAlias = int | Exception
"""The bytes that a call wrote, or what kept it out."""


class CommitQueue:
    """Runs calls in a thread of its own, which alone uses `connection`.

    `classify` explains an error of the driver. `after_commit` gets the number of bytes that the transaction wrote,
    after the callers were answered; a failure that it returns is fatal. `exclusive` is held around each transaction.

    `before_answer` is called after each transaction, before the callers are answered; a failure that it returns is
    fatal, and the callers get it.

    With `claim` others may write to the database too: it begins each transaction by claiming what its calls change.

    The calls of a transaction are first run without savepoints, each of which is a trip to a server that may be far.

    After a fatal failure nothing is run any more. A flush that failed is such a failure: the kernel forgets it,
    and the next flush reports success for data that never reached the disk.
    """

    def __init__(
        self,
        connection: Connection,
        classify: Callable[[DBAPIError], StoreFailure],
        after_commit: Callable[[int], StoreFailure | None],
        exclusive: Callable[[], AbstractContextManager[None]] = nullcontext,
        claim: Callable[[Connection, Sequence[Claims]], None] | None = None,
        before_answer: Callable[[], StoreFailure | None] = lambda: None,
    ) -> None:
        self._connection, self._classify, self._exclusive, self._claim = connection, classify, exclusive, claim
        self._after_commit, self._before_answer = after_commit, before_answer
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
        """Queue `work` and return when it is durable; raises what kept it out.

        If the connection is lost on the way, it is not known whether the work is done. Then `again` is run, which does
        the work unless it is done; without `again` the call fails. If the awaiting task is cancelled, work that has not
        begun is left out, and work that has runs on.
        """
        done = asyncio.get_running_loop().create_future()
        with self._closing:
            if self._closed:
                raise StoreError("the store is closed")
            self._calls.put(_QueuedWork(work, again, claims, done))
        await done

    def close(self) -> None:
        """Run what is queued, then stop. Later calls of `run` raise `StoreError`."""
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
        outcomes = self._commit(batch)
        if self._broken is None and (failure := self._before_answer()) is not None:
            self._break(failure)
            outcomes = self._refusals(batch)
        _answer(batch, outcomes)
        written = [outcome for outcome in outcomes if isinstance(outcome, int)]
        if written and (failure := self._after_commit(sum(written))) is not None:
            self._break(failure)

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
            if (written := self._commit_at_once(batch)) is not None:
                return written
            with self._transaction(batch):
                return [self._attempt(call.work) for call in batch]
        except DBAPIError as error:
            # The whole transaction is gone: no outcome counts.
            failure = self._classify(error)
        if failure.fatal:
            self._break(failure)
            return self._refusals(batch)
        if failure.lost:
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
        """Commit the calls if none of them fails; else nothing, and None."""
        try:
            with self._transaction(batch):
                return [call.work(self._connection) for call in batch]
        except Exception as error:
            if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError):
                raise
            return None

    def _commit_again(self, batch: Sequence[_QueuedWork], failure: StoreFailure) -> Sequence[_Outcome]:
        """Go on after the connection was lost, perhaps within a commit."""
        works = [call.again for call in batch if call.again is not None]
        for seconds in RECONNECTIONS if works else ():
            time.sleep(seconds)
            try:
                with self._transaction(batch):
                    outcomes = iter([self._attempt(work) for work in works])
            except DBAPIError as error:
                found = self._classify(error)
                if not found.lost:
                    # Not their failure: it says that nothing is recorded, and it may have been before.
                    _log.warning("the connection was lost, and it is not known what was recorded: %s", found.message)
                    break
            else:
                _log.warning("the connection to the database was lost and is there again")
                return [failure.error() if call.again is None else next(outcomes) for call in batch]
        return [failure.error() for _ in batch]

    def _attempt(self, work: Work) -> _Outcome:
        """Run one call and undo it if it fails. Raises DBAPIError if the transaction can't go on."""
        self._connection.exec_driver_sql("SAVEPOINT call")
        outcome: _Outcome
        try:
            outcome = work(self._connection)
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
        _log.error("the store takes no more writes: %s", failure.message)
        self._broken = failure

    def _refusals(self, batch: Sequence[_QueuedWork]) -> Sequence[_Outcome]:
        assert self._broken is not None
        return [self._broken.error() for _ in batch]


def _answer(batch: Sequence[_QueuedWork], outcomes: Sequence[_Outcome]) -> None:
    """Resolve the futures of `batch`, waking each event loop once: a wake-up costs more than an insert."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], _Outcome]]] = {}
    for call, outcome in zip(batch, outcomes, strict=True):
        by_loop.setdefault(call.done.get_loop(), []).append((call.done, outcome))
    for loop, answers in by_loop.items():
        # A loop that was closed in the meantime has no waiting task.
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
