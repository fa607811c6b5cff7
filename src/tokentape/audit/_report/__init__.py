"""Build a report from blocks, and write it for a terminal (rich), as one HTML file (Jinja2) or as JSON.

    report = Report("Drift of run 7", [
        Paragraph("What a trainer would have seen."),
        Facts({"sessions": 120, "model": "Qwen3-8B"}),
        Heading("Classes"),
        Table(["class", "stretches"], [["whitespace", 12]], numeric={1}),
        Bars([Bar("whitespace", 0.031, low=0.018, high=0.052)], unit="share"),
    ])
    Path("drift.html").write_text(report.html(), encoding="utf-8")
    report.print()
    json_text(findings)

Much of the content comes from models and unknown users. Both writers escape all text: HTML's special characters, and
control characters, lone surrogates and characters that change the writing direction.
"""

from tokentape.audit._report.blocks import (
    Bar,
    Bars,
    Block,
    Code,
    Details,
    Facts,
    Heading,
    Paragraph,
    Table,
    TokenIds,
    escape_for_terminal,
    escape_invisible,
    json_text,
    json_value,
    rate_bar,
)
from tokentape.audit._report.ci_formats import CiCase, CiFinding, ci_report
from tokentape.audit._report.writers import Report, html_environment

__all__ = [
    "Bar",
    "Bars",
    "Block",
    "CiCase",
    "CiFinding",
    "Code",
    "Details",
    "Facts",
    "Heading",
    "Paragraph",
    "Report",
    "Table",
    "TokenIds",
    "ci_report",
    "escape_for_terminal",
    "escape_invisible",
    "html_environment",
    "json_text",
    "json_value",
    "rate_bar",
]
