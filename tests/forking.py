"""Run tests in processes forked from a process that has imported and collected everything: `pytest --forks 4`.

Each worker of pytest-xdist imports and collects all tests: 15 s of CPU time. If `fork` is not safe, as on macOS, use
xdist.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import pytest

_PRELOADED = ("pandas", "peft", "transformers.models.qwen3.modeling_qwen3", "transformers.generation")
"""Modules that tests of several folders import, if torch is installed: seconds in each process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="at most so many processes, and no more than there are CPUs")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Distribute the folders of tests to processes. Tests of a folder load their tokenizers and models once."""
    if not session.config.option.forks or session.config.option.collectonly or session.testsfailed:
        return None
    count = min(session.config.option.forks, len(os.sched_getaffinity(0)))
    folders: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        folders.setdefault(item.nodeid.partition("::")[0].rpartition("/")[0], []).append(item)
    largest_first = sorted(folders.values(), key=len, reverse=True)
    for module in _PRELOADED if "torch" in sys.modules else ():
        with warnings.catch_warnings(action="ignore"), suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()
    # The numbers of folders that no process has taken. A process takes a folder by reading its byte.
    to_do, to_fill = os.pipe()
    os.write(to_fill, bytes(range(len(folders))))
    os.close(to_fill)
    processes: dict[Connection, int] = {}
    for _ in range(count):
        reader, writer = Pipe(duplex=False)
        process = os.fork()
        if process == 0:
            _work(session, largest_first, to_do, writer)
        writer.close()
        processes[reader] = process
    os.close(to_do)
    _report(session, processes)
    return True


def _report(session: pytest.Session, processes: dict[Connection, int]) -> None:
    """Report results of the processes, until all have ended."""
    hook, running = session.config.hook, dict.fromkeys(processes, "before the first test")
    waited_for = dict(processes)
    try:
        while waited_for:
            for reader in wait(list(waited_for)):
                assert isinstance(reader, Connection)
                try:
                    sent = reader.recv()
                except EOFError:
                    os.waitpid(waited_for.pop(reader), 0)
                    if running[reader]:
                        file, message = running[reader].partition("::")[0], "its process ended, and ran no more tests"
                        lost = pytest.TestReport(
                            running[reader], (file, None, running[reader]), {}, "failed", message, "call"
                        )
                        hook.pytest_runtest_logreport(report=lost)
                    continue
                if isinstance(sent, str):
                    running[reader] = sent
                    continue
                report = hook.pytest_report_from_serializable(config=session.config, data=sent)
                hook.pytest_runtest_logreport(report=report)
                if report.when == "call" or not report.passed:
                    hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for process in waited_for.values():
            os.kill(process, signal.SIGINT)
        for process in waited_for.values():
            os.waitpid(process, 0)


class _Sender:
    """Plugin that sends the reports of a process instead of writing them."""

    def __init__(self, config: pytest.Config, writer: Connection) -> None:
        self._config, self._writer = config, writer

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._writer.send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Passed setups and teardowns are two thirds of all reports.
        if report.when == "call" or not report.passed or self._config.option.durations:
            sent = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            self._writer.send(sent)


def _work(session: pytest.Session, folders: list[list[pytest.Item]], to_do: int, writer: Connection) -> None:
    """Run the tests of folders that no other process has taken, and end the process."""
    config, plugins = session.config, session.config.pluginmanager
    # A process in the background starts with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # Otherwise the processes would share the files of captured output.
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.unregister(name="terminalreporter")
        plugins.register(_Sender(config, writer))
        # Processes that tests start with multiprocessing would import pytest.
        sys.modules["__main__"] = ModuleType("__main__")
        items = chain(_taken(folders, to_do), [None])
        # Take the next folder before the previous one's last test, which would otherwise end the session's fixtures.
        for item, following in pairwise(items):
            assert item is not None
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        writer.send("")
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
        os._exit(0)


def _taken(folders: list[list[pytest.Item]], to_do: int) -> Iterator[pytest.Item]:
    while number := os.read(to_do, 1):
        yield from folders[number[0]]
