"""A PostgreSQL server started here, or named by TOKENTAPE_POSTGRES_URL, with a schema per record."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from tests.waiting import PATIENCE

_numbers = itertools.count()


@dataclass
class Server:
    """A server and its address. A server started here can be stopped and killed; an external one can't."""

    url: str
    directory: Path | None = None
    binary: str = ""
    user: str | None = None
    process: subprocess.Popen[bytes] | None = field(default=None)
    engine: Engine | None = field(default=None)
    """Keeps a single connection: the server starts a process for each."""

    def start(self) -> None:
        assert self.directory is not None
        log = (self.directory / "log").open("ab")
        options = [
            "-c",
            "listen_addresses=",
            "-c",
            f"unix_socket_directories={self.directory}",
            "-c",
            "shared_buffers=16MB",
        ]
        with log:
            self.process = subprocess.Popen(
                [self.binary, "-D", str(self.directory / "data"), *options],
                stdout=log,
                stderr=log,
                user=self.user,
                cwd=self.directory,
                start_new_session=True,
                preexec_fn=_end_with_the_tests if sys.platform == "linux" else None,
            )
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.execute("SELECT 1")
                return
            except DBAPIError:
                assert self.process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop it immediately and cleanly; with SIGKILL, as in a crash."""
        self.close()
        if self.process is None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        self.process.wait(PATIENCE)
        self.process = None

    def execute(self, statement: str) -> list[Any]:
        """Run a statement and return its rows."""
        if self.engine is None:
            options = {"pool_size": 1, "pool_pre_ping": True, "isolation_level": "AUTOCOMMIT"}
            self.engine = create_engine(self._driver(self.url), **options)
        with self.engine.connect() as connection:
            result = connection.execute(text(statement))
            return list(result.all()) if result.returns_rows else []

    def close(self) -> None:
        """Close the connection of `execute`; the next one opens another."""
        if self.engine is not None:
            self.engine.dispose()
            self.engine = None

    def new_place(self) -> str:
        """Return the URL of an empty schema."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self.execute(f"CREATE SCHEMA {name}")
        return make_url(self.url).update_query_dict({"options": f"-csearch_path={name}"}).render_as_string(False)

    def drop(self, place: str) -> None:
        """Delete the schemas of `new_place`."""
        name = str(make_url(place).query["options"]).partition("=")[2]
        self.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")

    @staticmethod
    def _driver(url: str) -> Any:
        return make_url(url).set(drivername="postgresql+psycopg")


def _end_with_the_tests() -> None:
    """Let the kernel end this process with its parent, however that ends: PR_SET_PDEATHSIG is 1."""
    ctypes.CDLL(None).prctl(1, signal.SIGINT)


def binary(name: str) -> str | None:
    """Return the path of a PostgreSQL program, in the folders of distributions."""
    found = shutil.which(name)
    if found is not None:
        return found
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(versions[-1]) if versions else None


@contextmanager
def running() -> Iterator[Server]:
    """Yield the server in TOKENTAPE_POSTGRES_URL, else a server started here. Skips if there is neither."""
    pytest.importorskip("psycopg", reason="needs psycopg (the extra `postgres`)")
    if url := os.environ.get("TOKENTAPE_POSTGRES_URL"):
        server = Server(url)
        yield server
        server.close()
        return
    initdb, postgres = binary("initdb"), binary("postgres")
    if initdb is None or postgres is None:
        pytest.skip("needs PostgreSQL's programs, or a server: TOKENTAPE_POSTGRES_URL")
    # The server refuses to run as root.
    user = "nobody" if os.geteuid() == 0 else None
    # In memory if there is room: each test creates and drops tables, and flushes their files.
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2**30
    with _temporary_directory(memory if roomy else None) as directory:
        if user is not None:
            shutil.chown(directory, user)
        subprocess.run(
            [initdb, "-D", str(directory / "data"), "-U", "tokentape", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"],
            check=True,
            stdout=subprocess.DEVNULL,
            user=user,
            cwd=directory,
        )
        server = Server(f"postgresql://tokentape@/postgres?host={directory}", directory, postgres, user)
        server.start()
        try:
            yield server
        finally:
            with suppress(ProcessLookupError):
                server.stop()


@contextmanager
def _temporary_directory(parent: Path | None) -> Iterator[Path]:
    """Return a new directory. A process that waits for its input to close deletes it, however this process ends."""
    directory = Path(tempfile.mkdtemp(prefix="tokentape-postgres-", dir=parent))
    # Files reappear until the server has also ended.
    delete = ["sh", "-c", 'read _; until rm -rf "$1"; do sleep 0.1; done', "delete", str(directory)]
    with subprocess.Popen(delete, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True):
        yield directory
