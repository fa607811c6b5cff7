"""Compare the CPU seconds and the memory of `verify` and `export` with those of an older commit, on one long record.

    python benchmarks/long_record.py CHECKOUT [--turns N] [--per-session N] [--rounds N] [--directory DIR]

CHECKOUT is a checkout of the older commit (`git worktree add`). Its code writes the record: sessions that use tools, 64
added and 64 sampled tokens per turn with four characters of text each. This release migrates a copy of it, as a gateway
does when it starts. Both then take turns, each on its own record and in a new process. The table shows medians of the
process's user and system time, and its largest peak of memory. With `--directory` the records are kept, and used again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
COMMANDS = ("verify", "export")

FILL = """
import asyncio, random, sys
from pathlib import Path
import numpy as np
from tokentape.session.chain import seal, setup_digest
from tokentape.store import SqliteStore
from tokentape.types import Provenance, Reward, SessionInfo, Setup, Turn

directory, turns, per_session = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tools = ({"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}},)
fields = tools, {}, "2026-01-01", "f"
setup = Setup(*fields, setup_digest(*fields))
sampling = {"max_tokens": 1024, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [151645], "seed": 1}
words = sorted({word for word in open(asyncio.base_events.__file__).read().split() if word.isascii()})
provenance = np.full(64, Provenance.TOOL, np.uint8)
provenance[:8] = provenance[-8:] = Provenance.TEMPLATE

def text():
    return " ".join(random.choices(words, k=64))[:256]

def chain(session_id, count):
    parent = None
    for seq in range(count):
        call = {"name": "search", "arguments": '{"query":"%s"}' % "".join(filter(str.isalnum, text()))}
        calls = [{"id": f"call_{seq}", "type": "function", "function": call}]
        messages = {"role": "tool", "tool_call_id": f"call_{seq - 1}", "content": text()},
        if not seq:
            messages = {"role": "system", "content": text()}, {"role": "user", "content": text()}
        parent = seal(Turn(
            session_id=session_id, seq=seq, parent=seq - 1 if seq else None, setup=setup.digest, messages=messages,
            reply={"role": "assistant", "content": "", "tool_calls": calls},
            added_ids=rng.integers(151000, size=64, dtype=np.int32), added_provenance=provenance,
            completion_ids=rng.integers(151000, size=64, dtype=np.int32),
            logprobs=-rng.random(64, dtype=np.float32), finish_reason="stop", stop=151645, fork=None,
            sampling=sampling, engine="vllm 0.32.0 processed_logprobs", weight_version=f"step-{seq}",
            created_at=1.7e9 + seq, digest="",
        ), parent and parent.digest)
        yield parent

async def fill():
    with SqliteStore.open(directory, synchronous="NORMAL") as store:
        await store.write(setup)
        for number in range(turns // per_session):
            session_id = f"{number:032x}"
            found = list(chain(session_id, per_session))
            await store.write(SessionInfo(session_id, 1.7e9), *found, Reward(session_id, None, 0.5, 1.7e9))

random.seed(1)
rng = np.random.default_rng(1)
asyncio.run(fill())
"""

MIGRATE = """
import sys
from tokentape.store import SqliteStore

SqliteStore.open(sys.argv[1]).close()
"""


def run(checkout: Path, *arguments: str) -> tuple[float, int]:
    """Run Python with a checkout's sources. Return CPU seconds and the peak of memory in MB. Findings end the run."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    _, process.returncode, used = os.wait4(process.pid, 0)
    if process.returncode:
        raise SystemExit(f"{arguments[:4]} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss // 1024


def measure(before: Path, directory: Path, rounds: int) -> None:
    """Print the table for the records in `directory`."""
    output = directory / "trajectories.parquet"
    records = {before: str(directory / "before"), HERE: str(directory / "now")}
    options = {"verify": [], "export": ["-o", str(output)]}
    load = os.getloadavg()[0]
    print(f"{'':8}{'CPU s before':>14}{'now':>8}{'ratio':>8}{'MB before':>12}{'now':>6}")
    for command in COMMANDS:
        measured: dict[Path, list[tuple[float, int]]] = {before: [], HERE: []}
        for _ in range(rounds):
            for checkout, figures in measured.items():
                figures.append(run(checkout, "-m", "tokentape", command, records[checkout], *options[command]))
                output.unlink(missing_ok=True)
        old, new = (statistics.median(seconds for seconds, _ in measured[checkout]) for checkout in (before, HERE))
        peaks = [max(peak for _, peak in measured[checkout]) for checkout in (before, HERE)]
        print(f"{command:8}{old:>14.1f}{new:>8.1f}{new / old:>8.2f}{peaks[0]:>12}{peaks[1]:>6}", flush=True)
    print(f"load {load:.0f} to {os.getloadavg()[0]:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--turns", type=int, default=200_000)
    parser.add_argument("--per-session", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="folder for the record; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = arguments.directory or Path(folder)
        before, now = directory / "before", directory / "now"
        if not now.exists():
            before.mkdir(parents=True, exist_ok=True)
            run(arguments.checkout, "-c", FILL, str(before), str(arguments.turns), str(arguments.per_session))
            shutil.copytree(before, now)
            run(HERE, "-c", MIGRATE, str(now))
        measure(arguments.checkout, directory, arguments.rounds)


if __name__ == "__main__":
    main()
