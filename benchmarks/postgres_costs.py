"""Measure what a recorded turn costs a PostgreSQL server: CPU, bytes of its log, bytes of its tables.

    python benchmarks/postgres_costs.py postgresql://... --postmaster PID [--sessions 64] [--seconds 20]

One process runs `--sessions` sessions. Each waits until a turn of 600 tokens is durable before it writes the next (see
`writers.py`). CPU is that of the server's processes, so the server must have no other users. Prints JSON, the source of
the figures in `unit_costs.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
from sqlalchemy import create_engine, make_url, text

WRITERS = Path(__file__).with_name("writers.py")


def cpu_seconds(postmaster: psutil.Process) -> float:
    """Return the CPU seconds of the server, including processes that have ended."""
    own = postmaster.cpu_times()
    living = (child.cpu_times() for child in postmaster.children(recursive=True))
    return (
        own.user + own.system + own.children_user + own.children_system + sum(one.user + one.system for one in living)
    )


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--postmaster", type=int, required=True)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    engine = create_engine(make_url(given.store).set(drivername="postgresql+psycopg"))

    def asked() -> tuple[float, int, int]:
        with engine.connect() as connection:
            log = connection.execute(text("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")).scalar_one()
            size = connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
        return cpu_seconds(psutil.Process(given.postmaster)), int(log), int(size)

    command = [sys.executable, str(WRITERS), "--be", given.store, str(time.time_ns())]
    writing = subprocess.Popen(
        [*command, str(given.sessions), str(given.seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writing.stdout is not None
    writing.stdout.readline()
    before = asked()
    waits = json.loads(writing.communicate("\n")[0])
    after = asked()
    turns = len(waits)
    cpu, log, size = (late - early for late, early in zip(after, before, strict=True))
    print(
        json.dumps(
            {
                "turns": turns,
                "turns_per_second": round(turns / given.seconds, 1),
                "cpu_ms_per_turn": round(cpu * 1000 / turns, 3),
                "log_bytes_per_turn": round(log / turns),
                "table_bytes_per_turn": round(size / turns),
            }
        )
    )


if __name__ == "__main__":
    main()
