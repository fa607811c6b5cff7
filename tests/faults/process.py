"""`tokentape serve` in its own process, to be killed, starved of disk and signaled."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.faults.conftest import QUESTION, say
from tests.faults.invariant import Received
from tests.faults.upstream import Upstream
from tests.processes import Command
from tests.waiting import PATIENCE

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None
    or subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], check=False).returncode != 0,
    reason="needs strace, allowed to trace, which injects the fault",
)


def serve_command(model: Path, upstream: Upstream, record: str | Path, *more: str) -> list[str]:
    """The command line of a gateway that uses the planned upstream; its record is a directory or a database."""
    command = [sys.executable, "-m", "tokentape", "serve", str(model), "--engine", "vllm", "--engine-url", upstream.url]
    return [*command, "--data" if isinstance(record, Path) else "--store", str(record), "--port", "0", *more]


@dataclass
class Served:
    """A running gateway and its output on stderr."""

    process: subprocess.Popen[str] | Command
    url: str = ""
    pid: int = 0
    """Of the gateway itself, if another process wraps it."""
    lines: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"at (http://\S+)/sessions/NAME/v1", line):
                self.url = found[1]
                self.ready.set()
        self.ready.set()

    def signal(self, number: int) -> None:
        """Send a signal to the process, its wrappers and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def client(self, session: str = "s") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/sessions/{session}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@contextmanager
def serving(command: Sequence[str], *, prefix: Sequence[str] = ()) -> Iterator[Served]:
    """Run a gateway until the context ends; it is killed then if it still lives."""
    process: subprocess.Popen[str] | Command
    if prefix or "--workers" in command:
        process = subprocess.Popen(
            [*prefix, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    else:
        process = Command(command[3:])
    served = Served(process)
    reader = threading.Thread(target=served.read, daemon=True)
    reader.start()
    with process:
        try:
            assert served.ready.wait(PATIENCE)
            yield served
        finally:
            served.signal(signal.SIGKILL)
            process.kill()
            reader.join(PATIENCE)


@dataclass
class Agent:
    """A client that continues one session until a call fails, and keeps the replies that it received."""

    session: str
    messages: list[Any] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    error: openai.OpenAIError | None = None
    kills: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def talk(self, served: Served, most: int = 10**9) -> None:
        with served.client(self.session) as client:
            self.talk_to(client, most)

    def talk_to(self, client: OpenAI, most: int = 10**9) -> None:
        for _ in range(most):
            if self.stop.is_set():
                return
            messages = [*self.messages[-8:], {**QUESTION, "content": f"question {len(self.messages)}"}]
            try:
                reply = say(client, messages)
            except openai.OpenAIError as error:
                self.error = error
                return
            self.received += Received.of(reply)
            answer = {"role": "assistant", "content": reply.choices[0].message.content}
            # Now and then the history is cut, so that contexts stay short.
            self.messages = [*messages, answer] if len(messages) < 8 else []


def talk_all(agents: Sequence[Agent], served: Served) -> list[threading.Thread]:
    """Let agents talk, each in a thread; they end when the gateway does."""
    threads = [threading.Thread(target=agent.talk, args=(served,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    return threads
