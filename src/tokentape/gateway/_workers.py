"""Several processes that serve at one port: started together, restarted when they die, drained and stopped together.

Each worker has a socket of its own, bound to the one port, so that the kernel distributes connections among them. Why
this is not uvicorn's supervisor: docs/decisions/0020.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, reduction
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias

from tokentape.errors import TokentapeError
from tokentape.gateway._serve import bind, url_of

_log = logging.getLogger("tokentape.workers")

_START_SECONDS = 120.0
_KILL_SECONDS = 15.0
"""Added to the time that calls have to end: how long a worker may take to exit."""
_PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a worker that died is restarted, longer the more often it dies before it is ready."""
_TICK_SECONDS = 0.2

_spawn = get_context("spawn")

Serve: TypeAlias = Callable[[Any, socket.socket, Callable[[], None]], None]
"""Serves settings on a socket, calls back once it answers requests, and returns after SIGTERM."""


@dataclass
class _Worker:
    number: int
    listener: socket.socket
    process: SpawnProcess | None = None
    answers: Any = None
    """A shared byte: 1 once the worker answers requests."""
    failures: int = 0
    start_at: float = 0.0
    """Seconds of the monotonic clock."""


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, inherited: Any) -> None:
        self.fd = inherited.detach()


class Supervisor:
    """Runs workers until a signal ends them all. For the main thread of a process that does nothing else.

    Every worker calls `serve` with `settings`, inherits the descriptors `inherited` and has `environment` added to its
    environment. `on_end` is called with the pid of each worker that has ended.
    """

    def __init__(
        self,
        serve: Serve,
        settings: Any,
        listeners: Sequence[socket.socket],
        *,
        drain_seconds: float,
        inherited: Sequence[int] = (),
        environment: dict[str, str] | None = None,
        on_end: Callable[[int | None], None] = lambda _: None,
    ) -> None:
        self._serve, self._settings, self._drain_seconds = serve, settings, drain_seconds
        self._workers = [_Worker(number, one) for number, one in enumerate(listeners)]
        self._inherited = [_Descriptor(fd) for fd in inherited]
        # The working directory is not where a worker's modules come from.
        self._environment = {"PYTHONSAFEPATH": "1", **(environment or {})}
        self._on_end = on_end
        self._signals: list[int] = []

    def run(self, on_ready: Callable[[], None]) -> None:
        """Start the workers, call `on_ready` when all of them answer, and return when they have ended.

        Raises `TokentapeError` if a worker can't start at the beginning; all are ended then.
        """
        handlers = {one: signal.signal(one, self._note) for one in (signal.SIGINT, signal.SIGTERM)}
        ready = False
        try:
            os.environ.update(self._environment)
            for worker in self._workers:
                self._start(worker)
            if self._all_ready():
                on_ready()
                ready = True
                self._keep()
        finally:
            self._end(drain=ready)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self._signals.append(number)

    def _all_ready(self) -> bool:
        """Wait until all workers answer; return False if a signal came first."""
        deadline = time.monotonic() + _START_SECONDS
        while not all(worker.answers.value for worker in self._workers):
            time.sleep(_TICK_SECONDS)
            if self._signals:
                return False
            if len(self._living()) < len(self._workers) or time.monotonic() > deadline:
                raise TokentapeError("the gateway's workers could not start; see its log")
        return True

    def _keep(self) -> None:
        """Restart workers that die, until a signal."""
        while not self._signals:
            for worker in self._workers:
                if worker.process is None and time.monotonic() >= worker.start_at:
                    self._start(worker)
                elif worker.process is not None and (status := worker.process.exitcode) is not None:
                    worker.failures = 0 if worker.answers.value else worker.failures + 1
                    pause = _PAUSES[min(worker.failures, len(_PAUSES) - 1)]
                    worker.start_at = time.monotonic() + pause
                    how = f"with exit code {status}" if status >= 0 else f"by signal {signal.Signals(-status).name}"
                    who = f"worker {worker.number} (process {worker.process.pid})"
                    _log.error("%s ended %s; it is restarted%s", who, how, f" in {pause:g} s" if pause else "")
                    self._on_end(worker.process.pid)
                    worker.process = None
            time.sleep(_TICK_SECONDS)

    def _end(self, *, drain: bool) -> None:
        """Let the workers finish; kill those that do not.

        Without `drain` there are no calls to wait for: a worker has less time, and none after another signal.
        """
        for worker in self._workers:
            # Without this copy a worker's socket closes as soon as the worker has finished.
            worker.listener.close()
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + _KILL_SECONDS + (self._drain_seconds if drain else 0.0)
        seen = len(self._signals)
        while self._living() and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
            newer = self._signals[seen:]
            if newer and not drain:
                break
            if signal.SIGINT in newer:
                seen += len(newer)
                self._send(signal.SIGINT)
        for process in self._living():
            _log.error("%s does not end; it is killed", process.name)
        self._send(signal.SIGKILL)
        for worker in self._workers:
            if worker.process is not None:
                worker.process.join()
                self._on_end(worker.process.pid)

    def _start(self, worker: _Worker) -> None:
        worker.answers = _spawn.RawValue("b", 0)
        arguments = (self._serve, self._settings, worker.listener, worker.answers, self._inherited)
        worker.process = _spawn.Process(target=_work, args=arguments, name=f"tokentape-worker-{worker.number}")
        # A terminal's Ctrl-C is for the supervisor alone; the worker's server sets a handler of its own.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            worker.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)

    def _living(self) -> list[SpawnProcess]:
        return [one.process for one in self._workers if one.process is not None and one.process.exitcode is None]

    def _send(self, number: int) -> None:
        for process in self._living():
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _work(serve: Serve, settings: Any, listener: socket.socket, answers: Any, _: list[_Descriptor]) -> None:
    """Run one worker, in its own process, until SIGTERM or until its supervisor is gone."""
    os.setpgrp()
    supervisor = parent_process()
    assert supervisor is not None

    def end_with_supervisor() -> None:
        supervisor.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_supervisor, daemon=True, name="tokentape-lifeline").start()
    serve(settings, listener, lambda: setattr(answers, "value", 1))


def bind_all(host: str, port: int, count: int, *, has_keys: bool) -> tuple[str, list[socket.socket]]:
    """Return the base URL, and a socket for each of `count` workers, all on one port; 0 takes a free one.

    Raises as `serve`, and `OSError` if anything else has the port.
    """
    # Another gateway's sockets would share the port with these. A socket that shares with none finds that out.
    with bind(host, port, has_keys) as alone:
        alone.listen(1)
        port = alone.getsockname()[1]
    sockets = [bind(host, port, has_keys, shared=True) for _ in range(count)]
    return url_of(sockets[0]), sockets
