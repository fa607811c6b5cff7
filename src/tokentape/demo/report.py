"""The demo's report for a terminal of 80 columns, with colour or without."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokentape.chat._tokenizer import Tokenizer
from tokentape.demo import MODEL
from tokentape.demo.drift import ChangedText
from tokentape.demo.findings import DemoReport, Group


def print_report(report: DemoReport, console: Console | None = None) -> None:
    """Print what was run, what retokenizing would have changed, what the record changed, and where to look."""
    console = console or Console(highlight=False)
    console.print(_table(report))
    console.print(
        "Re-rendered: rebuilt from messages, as stateless servers and trainers do. Like\n"
        "many, this template also drops the reasoning of earlier turns.\n"
    )
    # At temperature 1 first: there the model spells freely.
    change = next((group.drift.longest for group in reversed(report.groups) if group.drift.longest), None)
    if change is not None:
        _print_change(console, change, Tokenizer.load(MODEL))
    console.print("The record against the engine's own log of what it sampled:")
    console.print(
        f"  {report.turns_unlike_engine} of {report.turns} turns differ in prompt, sampled ids or logprobs; "
        f"verify: {report.findings} findings",
        style="bold green" if report.exact else "bold red",
    )
    console.print()
    _print_places(console, report, "demo-00" if change is None else change.session_id)


def _table(report: DemoReport) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    groups = report.groups
    for group in groups:
        table.add_column(_name(group), justify="right")
    table.add_column("all", justify="right")

    def row(label: str, count: Callable[[Group], int], of: Callable[[Group], int] | None = None) -> None:
        cells = [(count(group), None if of is None else of(group)) for group in groups]
        total = sum(part for part, _ in cells), None if of is None else sum(whole or 0 for _, whole in cells)
        table.add_row(label, *(_cell(part, whole) for part, whole in [*cells, total]))

    row("sessions", lambda g: g.sessions)
    row("  of these streamed", lambda g: g.streamed)
    row("  tasks solved", lambda g: g.solved, lambda g: g.sessions)
    row("turns", lambda g: g.drift.completions)
    row("sampled tokens", lambda g: g.drift.tokens)
    table.add_row("all tokens", *[""] * len(groups), _cell(report.tokens, None))
    table.add_section()
    table.add_row(Text("Retokenizing would change", style="bold"))
    row("  completions", lambda g: g.drift.changed_completions, lambda g: g.drift.completions)
    row("  sampled tokens", lambda g: g.drift.changed_tokens, lambda g: g.drift.tokens)
    row("  trajectories", lambda g: g.drift.retokenized_trajectories, lambda g: g.drift.trajectories)
    row("  the same, re-rendered", lambda g: g.drift.rerendered_trajectories, lambda g: g.drift.trajectories)
    return table


def _name(group: Group) -> str:
    return f"temperature {group.temperature:g}" if group.temperature else "greedy"


def _cell(part: int, whole: int | None) -> str:
    return f"{part:,}" if whole is None else f"{part:,} of {whole:,}"


def _print_change(console: Console, change: ChangedText, tokenizer: Tokenizer) -> None:
    console.print(
        f"For example turn {change.turn} of session {change.session_id}, the same text in other ids ({change.kind}):"
    )
    console.print(f"  sampled      {_pieces(tokenizer, change.sampled)}", markup=False)
    console.print(f"  retokenized  {_pieces(tokenizer, change.retokenized)}", markup=False)
    console.print()


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return "  ".join(f"{token_id} {tokenizer.decode([token_id])!r}" for token_id in ids)


def _print_places(console: Console, report: DemoReport, session_id: str) -> None:
    command = "tokentape" if shutil.which("tokentape") else os.path.relpath(sys.argv[0])
    console.print(f"{report.trajectories} trajectories are in", soft_wrap=True)
    console.print(f"  {report.trajectories_file}", soft_wrap=True)
    console.print("Look further:")
    for line in (
        f"{command} view {report.directory}",
        f"{command} drift {report.directory}",
        f"{command} show {report.directory} {session_id} --ids",
        f"{command} verify {report.directory}",
    ):
        console.print(f"  {line}", soft_wrap=True, markup=False)
