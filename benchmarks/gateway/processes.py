"""Start the measured processes and read their CPU time and memory."""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


class Process:
    """Process of the benchmark, with its children. Its output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._log = log
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENTAPE_")}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**clean, **(env or {})}
            )
        # Stop it even if the benchmark is interrupted during the start.
        atexit.register(self.stop)

    def said(self, pattern: str, seconds: float = 180.0) -> re.Match[str]:
        """Return the first match in the output. Raise `RuntimeError` if the process ends, or is silent for too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.output()):
                return found
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        self.stop()
        raise RuntimeError(f"it did not say {pattern!r}:\n{self.output()[-2000:]}")

    def answers(self, url: str, seconds: float = 180.0) -> None:
        """Return when `url` answers 200. Raises as `said`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.02)
        self.stop()
        raise RuntimeError(f"{url} never answered:\n{self.output()[-2000:]}")

    def output(self) -> str:
        """Return the output so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def cpu_seconds(self) -> float:
        """Return user and system time so far, including children."""
        return sum(cpu_seconds(one.pid) for one in self._family())

    def resident_bytes(self) -> int:
        """Return the resident memory, including children."""
        return sum(one.memory_info().rss for one in self._family())

    def own_bytes(self) -> int:
        """Return private memory plus the proportional share of shared memory (PSS), including children. Linux only."""
        return sum(one.memory_full_info().pss for one in self._family())

    def stop(self) -> None:
        """Stop the process and its children. May be called again."""
        atexit.unregister(self.stop)
        family = self._family()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for one in family[1:]:
            if one.is_running():
                one.kill()

    def _family(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process; on Linux in nanoseconds, where psutil has hundredths of a second."""
    if sys.platform == "linux":
        # Same computation as clock_getcpuclockid(3).
        return time.clock_gettime((~pid << 3) | 2)
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def disk_bytes(folder: Path) -> int:
    """Return the disk space of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
