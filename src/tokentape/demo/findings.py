"""Compute and print the results of a demo run from its record and the engine's log. Needs no torch."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tokentape._session.files import read_trajectories, write_trajectories
from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._drift.report import Example
from tokentape.audit._drift.rerender import through_messages
from tokentape.audit._id_rows import session_rows
from tokentape.audit._report import Block, Code, Facts, Heading, Paragraph, Report, Table
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.audit._tokendiff.retokenizing import retokenized
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.errors import Conflict, TemplateRefused
from tokentape.store import SqliteStore, StoredSession, verify
from tokentape.store._served_model import ServedModel, write_served_model
from tokentape.types import Trajectory

RECORDED = Path(__file__).parent / "recorded"
"""A run that `scripts/record_demo.py` recorded: the database, and digests of the calls in the engine's log."""


@dataclass(frozen=True, slots=True)
class Group:
    """Counts for the sessions that sampled at one temperature."""

    temperature: float
    sessions: int
    streamed: int
    solved: int
    completions: int
    changed_completions: int
    """Completions that change when they are decoded and encoded again."""
    tokens: int
    changed_tokens: int
    trajectories: int
    retokenized_trajectories: int
    """Trajectories that change when they are decoded and encoded again."""
    rerendered_trajectories: int
    """Trajectories that change when their messages are rendered again, for example because templates drop reasoning."""
    example: Example | None
    """A change that only affects a word if there is one, otherwise the change of the most ids."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The results of a demo run, computed from the record and the engine's log."""

    directory: Path
    trajectories_file: Path
    groups: tuple[Group, ...]
    turns: int
    tokens: int
    """All added and sampled tokens, each counted once."""
    trajectories: int
    turns_differing_from_engine: int
    """Recorded turns that equal no call in the engine's log."""
    findings: int
    """Number of findings of `verify`."""
    seconds: float
    """Time from the first request to the last reply."""

    @property
    def exact(self) -> bool:
        """Whether the record contains exactly what the engine sampled."""
        return not self.turns_differing_from_engine and not self.findings


def new_directory() -> Path:
    """Return the path of a new directory under runs/demo, named after the current time."""
    return Path("runs/demo") / time.strftime("%Y%m%d-%H%M%S")


def refuse_used(directory: Path) -> None:
    """Raise `Conflict` if the directory is not empty."""
    if directory.exists() and any(directory.iterdir()):
        raise Conflict(f"{directory} is not empty: choose a new directory")


def replay(directory: Path) -> DemoReport:
    """Copy the shipped run to `directory`, and examine it. Raises `Conflict` if the directory is not empty."""
    refuse_used(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # `copyfile` does not copy permissions: the installed file may be read-only.
    shutil.copyfile(RECORDED / "tokentape.db", directory / "tokentape.db")
    renderer = Renderer.load(MODEL)
    write_served_model(directory, ServedModel(str(MODEL), renderer.tokenizer.sha256, renderer.fingerprint))
    engine_log = json.loads((RECORDED / "engine.json").read_text(encoding="utf-8"))
    return examine(directory, renderer, engine_log["calls"], engine_log["seconds"])


def examine(directory: Path, renderer: Renderer, calls: Iterable[str], seconds: float) -> DemoReport:
    """Write the trajectories of a run to a file, and return a report. `calls` has a digest of each answered call."""
    file = directory / "trajectories.jsonl"
    with SqliteStore.open(directory, read_only=True) as record:
        sessions = sorted(record.iter_sessions(), key=lambda session: session.info.session_id)
    write_trajectories((row for session in sessions for row in session.trajectories()), file)
    trajectories = read_trajectories(file)
    grouped: defaultdict[float, list[StoredSession]] = defaultdict(list)
    for session in sessions:
        grouped[session.info.metadata["temperature"]].append(session)
    return DemoReport(
        directory=directory,
        trajectories_file=file,
        groups=tuple(group_of(renderer, temperature, grouped[temperature]) for temperature in sorted(grouped)),
        turns=sum(len(session.turns) for session in sessions),
        tokens=sum(t.added_ids.size + t.completion_ids.size for session in sessions for t in session.turns),
        trajectories=len(trajectories),
        turns_differing_from_engine=turns_differing_from_engine(trajectories, calls),
        findings=len(verify(directory).findings),
        seconds=seconds,
    )


def group_of(renderer: Renderer, temperature: float, sessions: list[StoredSession]) -> Group:
    """Retokenize every completion, render every branch again, and compare the results with the recorded ids."""
    tokenizer = renderer.tokenizer
    drift = measure_drift((row for session in sessions for row in session_rows(session)), tokenizer)
    branches = [(session, trajectory) for session in sessions for trajectory in session.trajectories()]
    return Group(
        temperature=temperature,
        sessions=len(sessions),
        streamed=sum(bool(session.info.metadata.get("stream")) for session in sessions),
        solved=sum(any(reward.value > 0 for reward in session.rewards) for session in sessions),
        completions=drift.completions.total,
        changed_completions=drift.completions.changed,
        tokens=drift.tokens.total,
        changed_tokens=drift.tokens.changed,
        trajectories=len(branches),
        retokenized_trajectories=sum(
            not np.array_equal(row.token_ids, retokenized(tokenizer, row.token_ids)) for _, row in branches
        ),
        rerendered_trajectories=sum(not _comes_back(renderer, session, trajectory) for session, trajectory in branches),
        example=max(
            drift.examples, key=lambda case: ("".join(case.sampled_pieces).isalpha(), len(case.sampled)), default=None
        ),
    )


def _comes_back(renderer: Renderer, session: StoredSession, trajectory: Trajectory) -> bool:
    path = session.tree().path(trajectory.leaf)
    try:
        return np.array_equal(trajectory.token_ids, through_messages(renderer, path, session.setups[path[-1].setup]))
    except TemplateRefused:
        return False


def turns_differing_from_engine(trajectories: Iterable[Trajectory], calls: Iterable[str]) -> int:
    """Count the recorded turns that equal no call in the engine's log in prompt, sampled ids and logprobs.

    `calls` has the `call_digest` of each call. The prompt of a turn is its trajectory up to its first sampled token. So
    the result 0 also proves that every context is the previous context + the completion + the bridge.
    """
    recorded: dict[tuple[str, int], str] = {}
    for trajectory in trajectories:
        for seq, start, end in trajectory.completions():
            recorded[trajectory.session_id, seq] = call_digest(
                trajectory.token_ids[:start], trajectory.token_ids[start:end], trajectory.logprobs[start:end]
            )
    return (Counter(recorded.values()) - Counter(calls)).total()


def call_digest(prompt_ids: Any, token_ids: Any, logprobs: Any) -> str:
    """Return the hex SHA-256 of a call's prompt, sampled ids and logprobs."""
    prompt, ids = np.asarray(prompt_ids, np.int32), np.asarray(token_ids, np.int32)
    arrays = (prompt, ids, np.asarray(logprobs, np.float32))
    return sha256(b"".join([len(prompt).to_bytes(8, "little"), *(array.tobytes() for array in arrays)])).hexdigest()


def print_report(report: DemoReport, console: Console | None = None) -> None:
    """Print the results of the run, and commands that show more."""
    # Prefer an example at temperature 1, where spellings vary most.
    example = next((group.example for group in reversed(report.groups) if group.example), None)
    console = console or Console(highlight=False)
    Report("Demo", list(_blocks(report, example))).print(console)
    started = "python -m tokentape" if sys.argv[0].endswith("__main__.py") else os.path.relpath(sys.argv[0])
    command = "tokentape" if shutil.which("tokentape") else started
    session_id = "demo-00" if example is None else example.row.rpartition(":")[0]
    for line in (
        f"{report.trajectories} trajectories are in",
        f"  {report.trajectories_file}",
        "Look further:",
        f"  {command} view {report.directory}",
        f"  {command} drift {report.directory}",
        f"  {command} show {report.directory} {session_id} --ids",
        f"  {command} verify {report.directory}",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _blocks(report: DemoReport, example: Example | None) -> Iterator[Block]:
    groups = report.groups
    names = [f"temperature {group.temperature:g}" if group.temperature else "greedy" for group in groups]

    def row(label: str, count: str, of: str = "") -> list[str]:
        counts, wholes = ([getattr(group, name) for group in groups] if name else [] for name in (count, of))
        ends = [f" of {many:,}" for many in (*wholes, sum(wholes))] if of else [""] * (len(groups) + 1)
        return [label, *(f"{many:,}{end}" for many, end in zip((*counts, sum(counts)), ends, strict=True))]

    rows = [
        row("sessions", "sessions"),
        row("  of these streamed", "streamed"),
        row("  tasks solved", "solved", "sessions"),
        row("turns", "completions"),
        row("sampled tokens", "tokens"),
        ["all tokens", *[""] * len(groups), f"{report.tokens:,}"],
        ["retokenizing would change", *[""] * (len(groups) + 1)],
        row("  completions", "changed_completions", "completions"),
        row("  sampled tokens", "changed_tokens", "tokens"),
        row("  trajectories", "retokenized_trajectories", "trajectories"),
        row("  the same, re-rendered", "rerendered_trajectories", "trajectories"),
    ]
    yield Table(["", *names, "all"], rows, range(1, len(groups) + 2))
    yield Paragraph(
        "Re-rendered: rebuilt from messages, as stateless servers and trainers do. Like\n"
        "many, this template also drops the reasoning of earlier turns."
    )
    if example is not None:
        kind = ARTIFACTS[example.artifact].kind
        yield Heading(f"For example in {example.row}, the same text in other ids ({kind})")
        sides = ((example.sampled, example.sampled_pieces), (example.retokenized, example.retokenized_pieces))
        spelled = ["  ".join(f"{token_id} {piece!r}" for token_id, piece in zip(*side, strict=True)) for side in sides]
        yield Facts(list(zip(("sampled", "retokenized"), spelled, strict=True)))
    yield Heading("The record against the engine's own log of what it sampled")
    yield Paragraph(
        f"  {report.turns_differing_from_engine} of {report.turns} turns differ in prompt, sampled ids or logprobs; "
        f"verify: {report.findings} findings",
        "ok" if report.exact else "fail",
    )
    yield Code("")
