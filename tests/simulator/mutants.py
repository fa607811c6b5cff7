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

OWN: dict[str, tuple[str, str, str]] = {
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
        "gateway/_events.py",
        "abandoned = not self._readers and not self._read_to_end",
        "abandoned = not self._readers and not self._read",
    ),
    "every reply counts as sent whole": (
        "gateway/_endpoint.py",
        "complete = response.complete",
        "complete = True",
    ),
    "marks are not loaded from the record": (
        "_session/tree.py",
        "    return {turn for turn, unread in marks.items() if unread}",
        "    return set()",
    ),
    "a retry takes no mark back": (
        "gateway/_unread.py",
        '{"unread": False}',
        '{"unread": True}',
    ),
    "answers are forgotten when a session is loaded": (
        "gateway/_session_cache.py",
        "        self.answers[answer.reply_id] = answer\n",
        "        if time.time() - answer.created_at < 0.5:\n            self.answers[answer.reply_id] = answer\n",
    ),
    "aborted turns are trained": (
        "_session/tree.py",
        'seqs = [turn.seq for turn in self.turns if turn.finish_reason != "abort" and turn.seq not in excluded]',
        "seqs = [turn.seq for turn in self.turns if turn.seq not in excluded]",
    ),
}

BLIND: dict[str, tuple[str, str, str]] = {
    "after a full disk all waiters get the answer of the first": (
        "store/_commit.py",
        "return [outcome for call in batch for outcome in self._commit([call])]",
        "return [*self._commit(batch[:1])] * len(batch)",
    ),
    "a drop looks only at turns for what came after the snapshot": (
        "store/_snapshots.py",
        "if extent_of(row) != extent:",
        "if row.turns != extent.turns:",
    ),
    "a drop takes what another snapshot holds": (
        "store/_snapshots.py",
        "elif holder is not None:",
        "elif False:",
    ),
    "a session that was dropped can be created again": (
        "store/_writes.py",
        "                refuse_dropped(connection, record.session_id)\n",
        "                pass\n",
    ),
    "a new column of a turn deletes those of the other turns": (
        "store/_writes.py",
        '    schema.token_columns.c.turn == bindparam("turn"),\n',
        "",
    ),
    "a snapshot lacks the newest reward": (
        "store/_reads.py",
        "schema.rewards.c.position, le, last.last_reward",
        "schema.rewards.c.position, lt, last.last_reward",
    ),
    "a reward of a path is read as one of its last turn": (
        "store/_rows.py",
        'turn, leaf = (None, row.turn) if row.scope == "trajectory" else (row.turn, None)',
        "turn, leaf = row.turn, None",
    ),
    "aborted turns are continued": (
        "_session/tree.py",
        'if turn.finish_reason != "abort":\n                if key in',
        "if turn.completion_ids.size:\n                if key in",
    ),
    "tokens of two branches are trained twice": (
        "_session/flatten.py",
        "trained.update(turn.seq for turn in path)",
        "trained.add(leaf)",
    ),
    "the first mark of a turn counts, not the last": (
        "_session/tree.py",
        "for event in events if event.kind == UNREAD",
        "for event in reversed(list(events)) if event.kind == UNREAD",
    ),
    "a column of a path is not written to turns that later branches share": (
        "_session/flatten.py",
        "for other in session.leaves() if other < leaf for",
        "for other in session.leaves() if other != leaf for",
    ),
    "of siblings with the same text the newest is continued": (
        "_session/tree.py",
        "seq = max(same, key=lambda candidate: self._agreement(candidate, sent_reasoning))",
        "seq = newest",
    ),
    "finished choices of an aborted call are kept as turns": (
        "gateway/_recording.py",
        'choice.finish_reason, choice.stop = "abort", None',
        'choice.finish_reason = choice.finish_reason or "abort"',
    ),
    "a call goes on after an abort without the ids before it": (
        "gateway/_sampling.py",
        "ids = np.concatenate([ids, np.array(choice.ids, dtype=np.int32)])",
        "ids = np.concatenate([ids, np.array(choice.ids[choice.part :], dtype=np.int32)])",
    ),
    "a call that goes on after an abort may sample all of max_tokens again": (
        "gateway/_sampling.py",
        "max_tokens=params.max_tokens - sampled,",
        "max_tokens=params.max_tokens,",
    ),
    "a call keeps the weight version that it began with": (
        "gateway/_turns.py",
        "weights_now=partial(self.gate.version_of, sampling.adapter),",
        "weights_now=lambda now=self.gate.version_of(sampling.adapter): now,",
    ),
    "values of a path are written to turns from its first new one on": (
        "gateway/_sessions.py",
        "for turn, part in zip(path, np.split(values, ends[:-1]), strict=True)\n        if turn.seq in trained",
        "for turn, part in zip([t for t in path if t.seq in trained], np.split(values, ends[:-1]), strict=False)",
    ),
    "sessions leave the memory with calls in flight": (
        "gateway/_session_cache.py",
        "            if not (opened.calls or opened.sending or opened.unmarked or opened.lock.locked()):",
        "            if True:",
    ),
    "sessions leave the memory while their replies are sent": (
        "gateway/_session_cache.py",
        "opened.calls or opened.sending or opened.unmarked",
        "opened.calls or opened.unmarked",
    ),
    "an abort ends a call while it is recorded": (
        "gateway/_events.py",
        "if self._task is not None and not self._committing:",
        "if self._task is not None:",
    ),
    "a drop takes sessions with calls in flight": (
        "gateway/_snapshots.py",
        "caller.sees, turns.sessions_in_use())",
        "caller.sees, ())",
    ),
    "a retry gets the first choice only": (
        "gateway/_recording.py",
        "turns=tuple([turn.seq for turn in turns]),",
        "turns=(turns[0].seq,),",
    ),
    "a key answers another body": (
        "gateway/_events.py",
        "if self.key == key and self.body_digest != body_digest:",
        "if False:",
    ),
    "a reply that was left counts as read to its end": (
        "gateway/_events.py",
        "        finally:\n            self._readers -= 1",
        "        finally:\n            self._read_to_end = True\n            self._readers -= 1",
    ),
}
"""Chosen from the sources by an engineer who had not read the simulator."""

MUTANTS = {**OWN, **BLIND}


def mutated(name: str) -> str:
    """Return the source file of a mutant with its change. Raises AssertionError unless it changes exactly one place."""
    path, old, new = MUTANTS[name]
    text = Path(ROOT, "src", "tokentape", path).read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise AssertionError(f"{path} no longer has once what {name!r} changes")
    return text.replace(old, new)


def found(name: str, calls: int = CALLS) -> tuple[bool, str]:
    """Return whether the simulator finds a mutant, and its output."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder, "src"), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, "src", "tokentape", MUTANTS[name][0]).write_text(mutated(name), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{ROOT}", "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "tests.simulator", "--calls", str(calls)]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = "\n".join((run.stdout + run.stderr).splitlines()[-3:])
    return run.returncode == 1 and "seed" in run.stdout, output


if __name__ == "__main__":
    missed = []
    for name in sys.argv[1:] or MUTANTS:
        caught, message = found(name)
        print("found " if caught else "MISSED", name, "\n   ", message.replace("\n", "\n    "), flush=True)
        missed += [] if caught else [name]
    sys.exit(bool(missed))
