"""Lay out checks of a lock as a page, and for CI systems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokentape.audit._lock.comparing import CAUSES, LockReport, all_notes, change_lines, shown_input
from tokentape.audit._report import Block, CiCase, CiFinding, Facts, Heading, Paragraph, Report

RULES = {
    **{part: f"the {part} changed" for part in CAUSES},
    "certificate": "what is certified changed",
    "golden ids": "an input has other ids",
    "versions and files": "another version, or other bytes of a file",
}
"""What can change, for CI systems."""


def lock_layout(lockfile: str, reports: Sequence[LockReport]) -> Report:
    """Return checks against a lock as blocks."""
    return Report(f"Check of {lockfile}", [block for report in reports for block in _blocks(report)])


def _blocks(report: LockReport) -> Iterator[Block]:
    yield Heading(
        report.compared, note="as locked" if report.ok else "not as locked", style="ok" if report.ok else "fail"
    )
    yield Paragraph(f"Compared {report.inputs} golden inputs.", "dim")
    for change in report.changes:
        yield Heading(change.what, 3, style="fail")
        yield Facts([("changed", change.found), *shown_input(change), ("cause", change.cause or "not known")])
    yield from (Paragraph(note) for note in all_notes(report))


def lock_cases(report: LockReport) -> list[CiCase]:
    """Return what was compared, and what was not, for CI systems."""
    found = [CiFinding(one.what, "error", one.what, "\n".join(change_lines(one))) for one in report.changes]
    skipped = [CiCase(f"{report.compared}: {why.partition(':')[0]}", skipped=why) for why in report.not_compared]
    return [CiCase(report.compared, found, str(report).splitlines()[0]), *skipped]
