"""Print the demo's report on a terminal of 80 columns."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator

from rich.console import Console

from tokentape.audit._drift.report import Example
from tokentape.audit._report import Block, Code, Facts, Heading, Paragraph, Report, Table
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.demo.findings import DemoReport, Group


def print_report(report: DemoReport, console: Console | None = None) -> None:
    """Print the run, the effect of retokenizing, the exactness of the record, and commands to look further."""
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

    def row(label: str, count: Callable[[Group], int], of: Callable[[Group], int] | None = None) -> list[str]:
        counts = [f"{sum(map(count, some)):,}" for some in (*([group] for group in groups), groups)]
        wholes = [f" of {sum(map(of, some)):,}" if of else "" for some in (*([group] for group in groups), groups)]
        return [label, *map(str.__add__, counts, wholes)]

    rows = [
        row("sessions", lambda g: g.sessions),
        row("  of these streamed", lambda g: g.streamed),
        row("  tasks solved", lambda g: g.solved, lambda g: g.sessions),
        row("turns", lambda g: g.completions),
        row("sampled tokens", lambda g: g.tokens),
        ["all tokens", *[""] * len(groups), f"{report.tokens:,}"],
        ["retokenizing would change", *[""] * (len(groups) + 1)],
        row("  completions", lambda g: g.changed_completions, lambda g: g.completions),
        row("  sampled tokens", lambda g: g.changed_tokens, lambda g: g.tokens),
        row("  trajectories", lambda g: g.retokenized_trajectories, lambda g: g.trajectories),
        row("  the same, re-rendered", lambda g: g.rerendered_trajectories, lambda g: g.trajectories),
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
        spelled = ["  ".join(f"{one} {piece!r}" for one, piece in zip(*side, strict=True)) for side in sides]
        yield Facts(list(zip(("sampled", "retokenized"), spelled, strict=True)))
    yield Heading("The record against the engine's own log of what it sampled")
    yield Paragraph(
        f"  {report.turns_unlike_engine} of {report.turns} turns differ in prompt, sampled ids or logprobs; "
        f"verify: {report.findings} findings",
        "ok" if report.exact else "fail",
    )
    yield Code("")
