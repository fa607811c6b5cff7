"""An audit for people: what differs, why, what to do, and the smallest input that shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokentape.audit.skew.findings import AuditReport, Finding, Outcome
from tokentape.audit.skew.sides.base import Conversation, SideFacts
from tokentape.audit.skew.words import TRIED, apart, inputs_word, quoted
from tokentape.cli.readable import readable

_TOKENS = 8
_TEXT = 70


def print_audit(report: AuditReport, console: Console | None = None) -> None:
    """Print both sides, what was tried, each finding, and the verdict last."""
    console = console or Console(highlight=False)
    for letter, facts in (("A", report.a), ("B", report.b)):
        console.print(_side(letter, facts))
    console.print(Text(_tried(report), style="dim"))
    for number, finding in enumerate(report.findings, 1):
        console.print()
        _print_finding(console, number, finding)
    if report.notes:
        console.print(Text("\nNotes", style="bold"))
        for note in report.notes:
            console.print(Text(f"  {readable(note)}"))
    skews = sum(finding.severity == "skew" for finding in report.findings)
    console.print()
    if skews:
        console.print(Text(f"Skew: {skews} cause{'s' if skews > 1 else ''} found.", style="bold red"))
    else:
        console.print(Text("No skew found: the sides agree on everything that was tried.", style="bold green"))


def _side(letter: str, facts: SideFacts) -> Text:
    versions = ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    line = Text(f"{letter}  ", style="bold")
    line.append(readable(facts.name), style="cyan" if letter == "A" else "magenta")
    line.append(readable(f"  {facts.kind}{f' ({versions})' if versions else ''}"), style="default")
    sha256 = facts.files.get("tokenizer.json") or next(iter(facts.files.values()), None)
    if sha256:
        line.append(f"  sha256 {sha256[:12]}", style="dim")
    return line


def _tried(report: AuditReport) -> str:
    parts = [f"{count} {TRIED[probe]}" for probe, count in report.tried.items()]
    said = f"Tried {', '.join(parts)} in {report.seconds:.1f} s."
    if report.corpus is not None:
        corpus = report.corpus
        said += (
            f"\nCorpus: {corpus.files} files, {corpus.documents} documents, {corpus.bytes / 1e6:.1f} MB, "
            f"{corpus.tokens} tokens at {corpus.megabytes_per_second:.1f} MB/s; {corpus.differing} documents differ."
        )
    for reason in report.skipped.values():
        said += f"\nNot tried: {readable(reason)}."
    return said


def _print_finding(console: Console, number: int, finding: Finding) -> None:
    style = "red" if finding.severity == "skew" else "yellow"
    title = Text(f"{number}. {finding.kind}", style=f"bold {style}")
    title.append(f"  {inputs_word(finding)}", style="dim")
    if finding.severity == "caution":
        title.append("  (caution)", style="yellow")
    console.print(title)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("cause", Text(readable(finding.cause)))
    if finding.example is not None:
        table.add_row("smallest", Text(readable(_example(finding.example))))
        for letter, outcome, other in (("A", finding.a, finding.b), ("B", finding.b, finding.a)):
            for line in _outcome_lines(outcome, other):
                table.add_row(letter, line)
    table.add_row("fix", Text(readable(finding.fix)))
    console.print(table)


def _example(example: str | Conversation | tuple[int, ...]) -> str:
    match example:
        case Conversation():
            prompt = "" if example.generate else ", no generation prompt"
            tools = f", tools {json.dumps(list(example.tools))}" if example.tools else ""
            return f"{json.dumps(list(example.messages))}{tools}{prompt}"
        case tuple():
            return f"ids {list(example)}"
    return quoted(example)


def _outcome_lines(outcome: Outcome, other: Outcome) -> list[Text]:
    if outcome.refused is not None:
        return [Text(readable(f"refused: {outcome.refused}"))]
    start = max(apart(outcome.ids, other.ids) - 2, 0)
    line = Text(readable(_ids(outcome.ids, outcome.tokens, start)))
    if outcome.text is None:
        return [line]
    at = max(apart(outcome.text, other.text or "") - 12, 0)
    shown = outcome.text[at : at + _TEXT]
    dots = ("…" if at else "", "…" if at + _TEXT < len(outcome.text) else "")
    return [line, Text(readable(f"{dots[0]}{quoted(shown)}{dots[1]}"), style="dim")]


def _ids(ids: Sequence[int], tokens: Sequence[str], start: int) -> str:
    shown = range(start, min(start + _TOKENS, len(ids)))
    parts = [f"{ids[n]} {_token(tokens[n])}" if tokens else str(ids[n]) for n in shown]
    before, after = "… " if start else "", " …" if start + _TOKENS < len(ids) else ""
    return f"[{before}{', '.join(parts)}{after}]" + (f" ({len(ids)} ids)" if before or after else "")


def _token(token: str) -> str:
    """A token in one line; quoted where its ends could not be seen."""
    return quoted(token) if token != token.strip() or "\n" in token or not token else token
