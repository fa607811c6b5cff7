"""What several processes at one port share, and how they are started; that they die and drain is in tests/faults."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from tokentape.errors import InvalidRequest
from tokentape.gateway._workers import bind_all


def test_connections_go_to_all_sockets_of_one_port() -> None:
    url, sockets = bind_all("127.0.0.1", 0, 2, has_keys=False)
    port = int(url.rpartition(":")[2])
    assert {one.getsockname()[1] for one in sockets} == {port}
    reached = set()
    for one in sockets:
        one.listen()
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    for number, one in enumerate(sockets):
        while True:
            try:
                one.accept()[0].close()
            except BlockingIOError:
                break
            reached.add(number)
    for one in (*clients, *sockets):
        one.close()
    assert reached == {0, 1}


def test_a_port_that_the_workers_of_another_gateway_have_is_refused() -> None:
    """Sockets that share a port would share it with those of another gateway too: its clients would come to us."""
    url, sockets = bind_all("127.0.0.1", 0, 2, has_keys=False)
    for one in sockets:
        one.listen()
    with pytest.raises(OSError, match="in use"):
        bind_all("127.0.0.1", int(url.rpartition(":")[2]), 2, has_keys=False)
    for one in sockets:
        one.close()


def test_without_keys_workers_serve_this_machine_alone() -> None:
    with pytest.raises(InvalidRequest, match="no API keys"):
        bind_all("0.0.0.0", 0, 2, has_keys=False)


@pytest.mark.slow
def test_workers_that_can_t_start_end_it_all_and_say_why(model_dir: Path, tmp_path: Path) -> None:
    # Port 9 is "discard", which nobody serves.
    engine = ["--engine", "vllm", "--engine-url", "http://127.0.0.1:9"]
    command = [sys.executable, "-m", "tokentape", "serve", model_dir, *engine, "--data", tmp_path, "--port", "0"]
    done = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert "the engine refuses connections" in done.stderr
    assert "the gateway's workers could not start" in done.stderr
    assert "Traceback" not in done.stderr
