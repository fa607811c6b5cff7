"""Opens a record of an older version repeatedly, killed before the first statement, the second, and so on.

    python -m tests.store.killed_migration LOCATION

A line of JSON is written before the first attempt and after each: whether it was killed, the schema version of the
record, and a digest of all its turns and rewards. It ends with the first attempt that is not killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, select

from tokentape.store import _postgres as postgres
from tokentape.store import _schema as schema
from tokentape.store import open_record
from tokentape.store._postgres import is_url

SINCE_4 = ("sampled_from", "logprobs_of", "resumes", "adapter")
"""Columns of turns that version 3 lacks."""


def in_child(work: Callable[[], Any]) -> tuple[bool, str]:
    """Run the work in a process. Return whether it was killed, and its result."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, json.dumps(work()).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with open(read, "rb") as pipe:
        error_text = pipe.read().decode()
    assert os.WIFSIGNALED(status) or error_text, "the process failed"
    return os.WIFSIGNALED(status), error_text


def open_until(location: str, last: int) -> None:
    """Open the record to write, and die before the statement or commit of this number, counted from 0."""
    numbers = count()

    def die(*_: Any) -> None:
        if next(numbers) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", die)
    event.listen(Engine, "commit", die)
    open_record(location).close()


def look(location: str) -> tuple[str, str]:
    """Return the schema version and the digest, changing nothing."""
    path = Path(location, "tokentape.db").absolute()
    engine = (
        postgres.reading_engine(location)
        if is_url(location)
        else create_engine(f"sqlite:///file:{path}?mode=ro&uri=true")
    )
    with engine.connect() as connection, connection.begin():
        version = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "schema_version"))
        schema_version = version.scalar_one()
        hasher = hashlib.sha256()
        for table in (schema.sessions, schema.turns, schema.rewards, schema.answers):
            columns = [column for column in table.c if column.name not in SINCE_4]
            for row in connection.execute(select(*columns).order_by(*table.primary_key)):
                hasher.update(repr(tuple(row)).encode())
    engine.dispose()
    return schema_version, hasher.hexdigest()


def check_kills(location: str) -> None:
    """Assert that a record of version 3 has the same contents after each kill, in version 3 or the current one."""
    command = [sys.executable, "-m", "tests.store.killed_migration", location]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tries = [json.loads(line) for line in done.stdout.splitlines()]
    versions = [attempt["version"] for attempt in tries]
    current = str(schema.VERSION)
    assert versions == sorted(versions)
    assert (versions[0], {*versions}) == ("3", {"3", current})
    # At least one attempt per statement of the migration, none of which left a change.
    assert versions.count("3") > 10
    assert len({attempt["digest"] for attempt in tries}) == 1
    assert [attempt["killed"] for attempt in tries] == [True] * (len(tries) - 1) + [False]


def main(location: str) -> None:
    for number in count(-1):
        killed = number < 0 or in_child(lambda last=number: open_until(location, last))[0]
        version, digest = json.loads(in_child(lambda: look(location))[1])
        print(json.dumps({"killed": killed, "version": version, "digest": digest}), flush=True)
        if not killed:
            return


if __name__ == "__main__":
    main(sys.argv[1])
