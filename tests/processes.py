"""Run `tokentape` in processes forked from a process that has imported it: imports take most of a short command."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any

from tests.waiting import PATIENCE

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.processes", "tokentape.cli.serve", "tokentape.cli.view", "tokentape.viewer"])
# Waits for the forking process, so that its time and that of its children count for the tests.
atexit.register(forkserver._forkserver._stop)  # type: ignore[attr-defined]  # there is no other way to end it


class Command:
    """A process of `tokentape` with these arguments, like `subprocess.Popen` with pipes for its output."""

    def __init__(self, arguments: Sequence[object]) -> None:
        ends = [_context.Pipe(duplex=False) for _ in range(2)]
        command = [str(argument) for argument in arguments]
        written = [writer for _, writer in ends]
        self._process = _context.Process(target=_run, args=(command, written, dict(os.environ), os.getcwd()))
        self._process.start()
        for writer in written:
            writer.close()
        self.stdout, self.stderr = (_file(reader) for reader, _ in ends)
        self.pid: int = self._process.pid  # type: ignore[assignment]  # it has started

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return the exit code, or minus the number of the signal that ended the process."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


def _file(reader: Connection) -> IO[str]:
    with reader:
        return os.fdopen(os.dup(reader.fileno()), encoding="utf-8")


def _run(arguments: list[str], written: list[Connection], environment: dict[str, str], folder: str) -> Any:
    os.setsid()
    for number, writer in enumerate(written, start=1):
        os.dup2(writer.fileno(), number)
        writer.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["tokentape", *arguments]
    from tokentape.cli import main

    main()
