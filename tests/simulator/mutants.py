"""Errors planted one at a time in a copy of the sources: the simulator has to find each within 20,000 calls.

python -m tests.simulator.mutants
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALLS = 20_000

MUTANTS: dict[str, tuple[str, str, str]] = {
    "a turn is acknowledged before it is durable": (
        "gateway/_recording.py",
        "await self.store.write(*records)",
        "asyncio.ensure_future(self.store.write(*records)).add_done_callback(lambda done: done.exception())",
    ),
    "memory is ahead of the disk": (
        "gateway/_recording.py",
        '        try:\n            with self.telemetry.stage("commit"):',
        "        for turn in turns:\n            opened.session.add(turn)\n"
        '        try:\n            with self.telemetry.stage("commit"):',
    ),
    "turns are committed without the session's lock": (
        "gateway/_recording.py",
        "        async with opened.lock:\n            while True:",
        "        async with asyncio.Lock():\n            while True:",
    ),
    "replies that no client read are not marked": (
        "gateway/_turns.py",
        "        self.unread.mark(opened, call.left_reply)\n",
        "",
    ),
    "a reply counts as read once a client has come": (
        "gateway/_in_flight_call.py",
        "left = not self._readers and not self._read_to_end",
        "left = not self._readers and not self._read",
    ),
    "every reply counts as sent whole": (
        "gateway/_endpoint.py",
        "complete = not isinstance(response, EventStream) or response.complete",
        "complete = True",
    ),
    "marks are not loaded from the record": (
        "_session/tree.py",
        "    return {turn for turn, unread in marks.items() if unread}",
        "    return set()",
    ),
    "a retry takes no mark back": (
        "gateway/_session_cache.py",
        "if (seq in marked) != unread)",
        "if (seq in marked) < unread)",
    ),
    "answers are forgotten when a session is loaded": (
        "gateway/_session_cache.py",
        "        self.answers[answer.reply_id] = answer\n",
        "        if time.time() - answer.created_at < 0.5:\n            self.answers[answer.reply_id] = answer\n",
    ),
    "aborted turns are trained": (
        "_session/tree.py",
        'kept = [turn.seq for turn in self.turns if turn.finish_reason != "abort" and turn.seq not in out]',
        "kept = [turn.seq for turn in self.turns if turn.seq not in out]",
    ),
}


def found(name: str, calls: int = CALLS) -> tuple[bool, str]:
    """Return whether the simulator finds a mutant, and what it says."""
    path, old, new = MUTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder, "src"), ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder, "src", "tokentape", path)
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise AssertionError(f"{path} no longer has once what {name!r} changes")
        file.write_text(text.replace(old, new), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{ROOT}", "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "tests.simulator", "--calls", str(calls)]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = "\n".join((run.stdout + run.stderr).splitlines()[-3:])
    return run.returncode == 1 and "seed" in run.stdout, said


if __name__ == "__main__":
    missed = []
    for name in sys.argv[1:] or MUTANTS:
        caught, said = found(name)
        print("found " if caught else "MISSED", name, "\n   ", said.replace("\n", "\n    "), flush=True)
        missed += [] if caught else [name]
    sys.exit(bool(missed))
