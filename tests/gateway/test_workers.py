"""What several processes at one port share, and how they are started; that they die and drain is in tests/faults."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import PATIENCE
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.gateway import _workers
from tokentape.gateway._workers import Supervisor, bind_all


def test_connections_go_to_all_sockets_of_one_port() -> None:
    url, sockets = bind_all("127.0.0.1", 0, 2, has_keys=False)
    port = int(url.rpartition(":")[2])
    assert {listener.getsockname()[1] for listener in sockets} == {port}
    reached = set()
    for listener in sockets:
        listener.listen()
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    for number, listening in enumerate(sockets):
        while True:
            try:
                listening.accept()[0].close()
            except BlockingIOError:
                break
            reached.add(number)
    for connection in (*clients, *sockets):
        connection.close()
    assert reached == {0, 1}


def test_port_used_by_workers_of_another_gateway_is_refused() -> None:
    """Sockets that share a port would share it with those of another gateway too: its clients would come to us."""
    url, sockets = bind_all("127.0.0.1", 0, 2, has_keys=False)
    for listening in sockets:
        listening.listen()
    with pytest.raises(InvalidRequest, match="is taken"):
        bind_all("127.0.0.1", int(url.rpartition(":")[2]), 2, has_keys=False)
    for listener in sockets:
        listener.close()


def test_workers_without_keys_serve_only_localhost() -> None:
    with pytest.raises(InvalidRequest, match="no API keys"):
        bind_all("0.0.0.0", 0, 2, has_keys=False)


class StubbornWorkers:
    """Workers that end only when they are killed, and time that passes only while their supervisor sleeps."""

    def __init__(self, *, answer: bool, worker_ends: bool, signals: Sequence[tuple[float, int]] = ()) -> None:
        self.now, self.killed_at = 0.0, 0.0
        self.sent: list[int] = []
        self._answer, self._signals = answer, list(signals)
        self._processes = {number: SimpleNamespace(pid=number, name="w", exitcode=None) for number in range(2)}
        if worker_ends:
            self._processes[0].exitcode = 1

    def run(self, drain_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_workers, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        monkeypatch.setattr(_workers, "os", SimpleNamespace(kill=self._kill, environ={}))
        monkeypatch.setattr(Supervisor, "_start", self._start)
        listeners = [socket.socket() for _ in self._processes]
        self._supervisor = Supervisor(lambda *_: None, None, listeners, drain_seconds=drain_seconds)
        self._supervisor.run(lambda: None)

    def _start(self, worker: Any) -> None:
        worker.answers, worker.process = SimpleNamespace(value=self._answer), self._processes[worker.number]
        worker.process.join = lambda: None

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        while self._signals and self._signals[0][0] <= self.now:
            self._supervisor._note(self._signals.pop(0)[1], None)

    def _kill(self, pid: int, number: int) -> None:
        self.sent.append(number)
        if number == signal.SIGKILL:
            self.killed_at, self._processes[pid].exitcode = self.now, -number


def test_workers_that_failed_to_start_are_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = StubbornWorkers(answer=False, worker_ends=True)
    with pytest.raises(TokentapeError, match="could not start"):
        workers.run(3600.0, monkeypatch)
    assert workers.sent == [signal.SIGTERM, signal.SIGKILL]
    assert 14 < workers.killed_at < 16


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_workers_that_failed_to_start_at_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = StubbornWorkers(answer=False, worker_ends=True, signals=[(3.0, number)])
    with pytest.raises(TokentapeError, match="could not start"):
        workers.run(3600.0, monkeypatch)
    assert 2.9 < workers.killed_at < 3.5


def test_a_second_signal_ends_workers_that_are_still_starting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = StubbornWorkers(answer=False, worker_ends=False, signals=[(3.0, signal.SIGTERM), (5.0, signal.SIGTERM)])
    workers.run(3600.0, monkeypatch)
    assert 4.9 < workers.killed_at < 5.5


def test_serving_workers_get_time_to_drain_and_a_second_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = StubbornWorkers(answer=True, worker_ends=False, signals=[(3.0, signal.SIGINT), (5.0, signal.SIGINT)])
    workers.run(100.0, monkeypatch)
    assert workers.sent == [signal.SIGTERM] * 2 + [signal.SIGINT] * 2 + [signal.SIGKILL] * 2
    assert 117 < workers.killed_at < 119


@pytest.mark.slow
def test_worker_start_failure_stops_the_supervisor_with_the_reason(model_dir: Path, tmp_path: Path) -> None:
    # Port 9 is "discard", which no process serves.
    engine = ["--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--engine-wait", "0"]
    command = [sys.executable, "-m", "tokentape", "serve", model_dir, *engine, "--data", tmp_path, "--port", "0"]
    done = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert "the engine refuses connections" in done.stderr
    assert "the gateway's workers could not start" in done.stderr
    assert "Traceback" not in done.stderr
