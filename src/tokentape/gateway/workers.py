"""Several processes that serve at one address: started together, restarted when they die, drained and ended together.

A worker is a process of its own with a socket of its own, bound to the one port: the kernel deals connections out among
them. Its standard input is its job and its lifeline: when that ends, the supervisor is gone, and the worker goes too.
It writes a line to its standard output once it answers requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tokentape.errors import TokentapeError
from tokentape.gateway.serve import check_host, url_of

_log = logging.getLogger("tokentape.workers")

READY = b"ready\n"

_START_SECONDS = 120.0
_KILL_SECONDS = 15.0
"""How long a worker may take to end, besides the time that calls have for it."""
_PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a worker that died is started again, the longer the more often it dies before it is ready."""


@dataclass(frozen=True)
class Job:
    """What a worker is started with."""

    run: Callable[[Any, socket.socket, Callable[[], None]], None]
    """Serves on the socket, calls back when it answers requests, and returns when it was told to end."""
    settings: Any
    """The first argument of `run`. Whatever can be pickled."""


@dataclass
class _Worker:
    number: int
    listener: socket.socket
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    failures: int = 0
    start_at: float = 0.0
    """Seconds of the monotonic clock."""


class Supervisor:
    """Runs workers until a signal ends them all. For the main thread of a process that does nothing else.

    `inherited` are descriptors that every worker gets, and `environment` what is added to its environment. `on_end` is
    told the pid of each worker that has ended.
    """

    def __init__(
        self,
        job: Job,
        listeners: Sequence[socket.socket],
        *,
        drain_seconds: float,
        inherited: Sequence[int] = (),
        environment: dict[str, str] | None = None,
        on_end: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._job = pickle.dumps(job)
        self._workers = [_Worker(number, one) for number, one in enumerate(listeners)]
        self._drain_seconds = drain_seconds
        self._inherited = tuple(inherited)
        self._environment = environment or {}
        self._on_end = on_end
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()

    def run(self, on_ready: Callable[[], None]) -> None:
        """Start the workers, call `on_ready` when all of them answer, and return when they have ended.

        Raises `TokentapeError` if one of them can't start at the beginning; all are ended then.
        """
        with ExitStack() as undo:
            woken, waking = socket.socketpair()
            undo.callback(woken.close)
            undo.callback(waking.close)
            undo.callback(self._selector.close)
            woken.setblocking(False)
            waking.setblocking(False)
            self._selector.register(woken, selectors.EVENT_READ)
            undo.enter_context(_handling((signal.SIGINT, signal.SIGTERM, signal.SIGCHLD), self._signals.append, waking))
            undo.callback(self._kill)
            for worker in self._workers:
                self._start(worker)
            if self._all_ready(woken):
                on_ready()
                self._keep(woken)
            self._end(woken)

    def _all_ready(self, woken: socket.socket) -> bool:
        """Wait until all workers answer; False if a signal came before."""
        deadline = time.monotonic() + _START_SECONDS
        while not all(worker.ready for worker in self._workers):
            self._wait(woken, 1.0)
            if self._told_to_end():
                return False
            dead = any(one.process is not None and one.process.poll() is not None for one in self._workers)
            if dead or time.monotonic() > deadline:
                self._stop(signal.SIGTERM)
                raise TokentapeError("the gateway's workers could not start; see its log")
        return True

    def _keep(self, woken: socket.socket) -> None:
        """Start workers that die again, until a signal."""
        while not self._told_to_end():
            now = time.monotonic()
            for worker in self._workers:
                if worker.process is None:
                    if now >= worker.start_at:
                        self._start(worker)
                elif (status := worker.process.poll()) is not None:
                    worker.failures = 0 if worker.ready else worker.failures + 1
                    pause = _PAUSES[min(worker.failures, len(_PAUSES) - 1)]
                    worker.start_at = now + pause
                    _log.error(
                        "worker %d (process %d) ended %s; it is started again%s",
                        worker.number,
                        worker.process.pid,
                        _how(status),
                        f" in {pause:g} s" if pause else "",
                    )
                    self._forget(worker)
            self._wait(woken, 0.2 if any(worker.process is None for worker in self._workers) else 5.0)

    def _end(self, woken: socket.socket) -> None:
        """Let the workers finish, then return."""
        for worker in self._workers:
            # With its own copy gone, a worker's socket closes when the worker has finished, and no sooner.
            worker.listener.close()
        self._stop(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_seconds + _KILL_SECONDS
        told = len(self._signals)
        while self._living() and time.monotonic() < deadline:
            self._wait(woken, 1.0)
            if signal.SIGINT in self._signals[told:]:
                told = len(self._signals)
                self._stop(signal.SIGINT)

    def _start(self, worker: _Worker) -> None:
        # -P: the working directory is not where modules come from.
        command = [sys.executable, "-P", "-m", "tokentape.gateway.worker", str(worker.listener.fileno())]
        process = worker.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(worker.listener.fileno(), *self._inherited),
            env={**os.environ, **self._environment},
            # A terminal's Ctrl-C is for the supervisor alone.
            process_group=0,
        )
        worker.ready = False
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(len(self._job).to_bytes(8, "big") + self._job)
            process.stdin.flush()
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)

    def _wait(self, woken: socket.socket, seconds: float) -> None:
        """Return when a signal comes, a worker says something or ends, or so much time is over."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is woken:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                continue
            said = os.read(key.fd, 4096)
            if READY in said:
                key.data.ready = True
            if not said:
                self._selector.unregister(key.fileobj)

    def _told_to_end(self) -> bool:
        return signal.SIGTERM in self._signals or signal.SIGINT in self._signals

    def _living(self) -> list[_Worker]:
        return [one for one in self._workers if one.process is not None and one.process.poll() is None]

    def _stop(self, number: int) -> None:
        for worker in self._living():
            assert worker.process is not None
            worker.process.send_signal(number)

    def _kill(self) -> None:
        deadline = time.monotonic() + _KILL_SECONDS
        while self._living() and time.monotonic() < deadline and not self._told_to_end():
            time.sleep(0.05)
        for worker in self._living():
            _log.error("worker %d does not end; it is killed", worker.number)
        self._stop(signal.SIGKILL)
        for worker in self._workers:
            if worker.process is not None:
                worker.process.wait()
                self._forget(worker)

    def _forget(self, worker: _Worker) -> None:
        process, worker.process = worker.process, None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.stdout)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        self._on_end(process.pid)


def bind(host: str, port: int, count: int, *, has_keys: bool) -> tuple[str, list[socket.socket]]:
    """The base URL, and a socket for each of `count` workers, all on one port; 0 takes a free one.

    Raises as `serve`, and `OSError` if anything else has the port.
    """
    family, address = check_host(host, has_keys)
    # Whoever else shares its port among sockets would share it with us: one that shares with nobody finds that out.
    with socket.socket(family, socket.SOCK_STREAM) as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind((address, port))
        alone.listen(1)
        port = alone.getsockname()[1]
    sockets: list[socket.socket] = []
    for _ in range(count):
        one = socket.socket(family, socket.SOCK_STREAM)
        sockets.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((address, port))
        one.setblocking(False)
    return url_of(sockets[0]), sockets


@contextmanager
def _handling(numbers: Sequence[int], note: Callable[[int], None], waking: socket.socket) -> Iterator[None]:
    """Within the context these signals are noted, and `waking` is written to."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            note(number)

    before = {number: signal.signal(number, handle) for number in numbers}
    descriptor = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)


def _how(status: int) -> str:
    return f"with exit code {status}" if status >= 0 else f"by signal {signal.Signals(-status).name}"


def work(descriptor: int) -> None:
    """Be a worker: read the job from standard input and do it on the socket `descriptor`, until told to end."""
    source = sys.stdin.buffer
    size = int.from_bytes(source.read(8), "big")
    job: Job = pickle.loads(source.read(size))
    threading.Thread(target=_end_with_supervisor, daemon=True, name="tokentape-lifeline").start()

    def ready() -> None:
        os.write(1, READY)

    job.run(job.settings, socket.socket(fileno=descriptor), ready)


def _end_with_supervisor() -> None:
    # Nothing more comes: it ends when the supervisor does, however that ended.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
