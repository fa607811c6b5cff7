"""Serve one port with several worker processes: start, restart, drain and stop them.

Each worker has its own socket on the shared port, so that the kernel distributes connections among workers.
docs/decisions/0020 explains why uvicorn's supervisor is not used.
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
from tokentape.gateway._serve import bind, end_signals, url_of

_log = logging.getLogger("tokentape.workers")

_KILL_SECONDS = 15.0
"""Time for a worker to exit, in addition to the drain time."""
_PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a dead worker is restarted, indexed by how often in a row it died before it was ready."""
_TICK_SECONDS = 0.2

_spawn = get_context("spawn")

Serve: TypeAlias = Callable[[Any, socket.socket, Callable[[], None]], None]
"""Function that serves with settings on a socket, calls the callback when ready, and returns after SIGTERM."""


@dataclass
class _Worker:
    number: int
    listener: socket.socket
    process: SpawnProcess | None = None
    answers: Any = None
    """A shared byte: 1 once the worker answers requests."""
    failures: int = 0
    start_at: float = 0.0
    """When to start it, in seconds of the monotonic clock."""


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, inherited: Any) -> None:
        self.fd = inherited.detach()


class Supervisor:
    """Runs one worker process per listener until a signal. Use it in the main thread of a separate process.

    Each worker calls `serve` with `settings`, inherits the file descriptors `inherited` and the additional environment
    variables `environment`. `on_end` is called with the pid of each worker that has exited.
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
        self._workers = [_Worker(number, listener) for number, listener in enumerate(listeners)]
        self._inherited = [_Descriptor(fd) for fd in inherited]
        # Keep workers from importing modules from the working directory.
        self._environment = {"PYTHONSAFEPATH": "1", **(environment or {})}
        self._on_end = on_end
        self._signals: list[int] = []

    def run(self, on_ready: Callable[[], None]) -> None:
        """Start the workers, call `on_ready` when all of them accept requests, and return after a signal ended them.

        Raises `TokentapeError` if a worker fails to start, after ending all workers.
        """
        handlers = {number: signal.signal(number, self._note) for number in end_signals()}
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
        """Wait until all workers accept requests. Return False if a signal arrives first."""
        while not all(worker.answers.value for worker in self._workers):
            time.sleep(_TICK_SECONDS)
            if self._signals:
                return False
            if len(self._living()) < len(self._workers):
                raise TokentapeError("the gateway's workers could not start; see its log")
        return True

    def _keep(self) -> None:
        """Restart workers that die, until a signal arrives."""
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
                    _log.error("%s ended %s; restarting it%s", who, how, f" in {pause:g} s" if pause else "")
                    self._on_end(worker.process.pid)
                    worker.process = None
            time.sleep(_TICK_SECONDS)

    def _end(self, *, drain: bool) -> None:
        """End the workers with SIGTERM, and kill workers that take too long.

        Without `drain` they get no time for calls in flight, and a further signal kills them at once.
        """
        for worker in self._workers:
            # Close this process's copy, so that the socket closes when its worker exits.
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
            _log.error("%s does not exit; killing it", process.name)
        self._send(signal.SIGKILL)
        for worker in self._workers:
            if worker.process is not None:
                worker.process.join()
                self._on_end(worker.process.pid)

    def _start(self, worker: _Worker) -> None:
        worker.answers = _spawn.RawValue("b", 0)
        arguments = (self._serve, self._settings, worker.listener, worker.answers, self._inherited)
        worker.process = _spawn.Process(target=_work, args=arguments, name=f"tokentape-worker-{worker.number}")
        # Only the supervisor handles Ctrl-C in a terminal. The worker's server sets its own handler.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            worker.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)

    def _living(self) -> list[SpawnProcess]:
        return [
            worker.process for worker in self._workers if worker.process is not None and worker.process.exitcode is None
        ]

    def _send(self, number: int) -> None:
        for process in self._living():
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _work(serve: Serve, settings: Any, listener: socket.socket, answers: Any, _: list[_Descriptor]) -> None:
    """Run a worker in its own process until SIGTERM or until the supervisor process exits."""
    os.setpgrp()
    supervisor = parent_process()
    assert supervisor is not None

    def end_with_supervisor() -> None:
        supervisor.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_supervisor, daemon=True, name="tokentape-lifeline").start()
    serve(settings, listener, lambda: setattr(answers, "value", 1))


def bind_all(host: str, port: int, count: int, *, has_keys: bool) -> tuple[str, list[socket.socket]]:
    """Return the base URL, and `count` sockets on one port (0: a free one). Raises the errors of `serve`."""
    # Shared sockets could also share the port with another gateway. Binding an unshared socket fails in that case.
    with bind(host, port, has_keys) as alone:
        alone.listen(1)
        port = alone.getsockname()[1]
    sockets = [bind(host, port, has_keys, shared=True) for _ in range(count)]
    return url_of(sockets[0]), sockets
