"""An audit as one HTML file."""

from __future__ import annotations

import json

from markupsafe import Markup

from tokentape.audit import html
from tokentape.audit.skew.findings import AuditReport, Finding, Outcome, parts
from tokentape.audit.skew.sides.base import Conversation, SideFacts
from tokentape.audit.skew.words import TRIED, apart, inputs_word, quoted

_AROUND = 40
"""Ids and characters that are shown on either side of the first difference."""


def audit_page(report: AuditReport) -> str:
    """The report as a page of its own; see `tokentape.audit.html`."""
    skews = [finding for finding in report.findings if finding.severity == "skew"]
    said = f"{len(skews)} causes of skew" if skews else "No skew: the sides agree on everything that was tried"
    body = [
        html.paragraph(html.status("fail" if skews else "ok", said), "."),
        html.heading("Sides"),
        html.table(
            ["", "A", "B"],
            [[name, one, other] for name, one, other in _side_rows(report.a, report.b)],
        ),
        html.heading("Tried"),
        html.table(["inputs", "compared"], [[TRIED[probe], n] for probe, n in report.tried.items()], numeric={1}),
    ]
    body += [html.paragraph(f"Not tried: {reason}.") for reason in report.skipped.values()]
    if report.corpus is not None:
        corpus = report.corpus
        body.append(
            html.facts(
                {
                    "corpus files": corpus.files,
                    "documents": corpus.documents,
                    "documents that differ": corpus.differing,
                    "megabytes": f"{corpus.bytes / 1e6:.3f}",
                    "tokens": corpus.tokens,
                    "MB/s": f"{corpus.megabytes_per_second:.2f}",
                }
            )
        )
    if report.findings:
        body.append(html.heading("Findings"))
        rows = [[n, f.kind, f.severity, f.count, f.cause] for n, f in enumerate(report.findings, 1)]
        body.append(html.table(["", "class", "severity", "inputs", "cause"], rows, numeric={0, 3}))
        for number, finding in enumerate(report.findings, 1):
            body += _finding(number, finding)
    if report.notes:
        body.append(html.heading("Notes"))
        body += [html.paragraph(note) for note in report.notes]
    body.append(html.heading("Fingerprints"))
    ours, theirs = parts(report.a), parts(report.b)
    body += [
        html.details(name, html.code(f"A  {ours.get(name, 'not known')}\n\nB  {theirs.get(name, 'not known')}"))
        for name in dict.fromkeys([*ours, *theirs])
    ]
    return html.page(f"Audit of {report.a.name} and {report.b.name}", *body)


def _side_rows(a: SideFacts, b: SideFacts) -> list[tuple[str, str, str]]:
    rows = [("named", a.name, b.name), ("loaded as", a.kind, b.kind)]
    for name in dict.fromkeys([*a.versions, *b.versions]):
        rows.append((name, a.versions.get(name, "-"), b.versions.get(name, "-")))
    rows.append(("ids end at", str(a.vocab_size or "not told"), str(b.vocab_size or "not told")))
    rows.append(("added tokens", str(len(a.added) or "not told"), str(len(b.added) or "not told")))
    for name in dict.fromkeys([*a.special_tokens, *b.special_tokens]):
        rows.append((name, a.special_tokens.get(name, "-"), b.special_tokens.get(name, "-")))
    for name in dict.fromkeys([*a.files, *b.files]):
        rows.append((f"{name}, SHA-256", a.files.get(name, "-")[:16], b.files.get(name, "-")[:16]))
    return rows


def _finding(number: int, finding: Finding) -> list[Markup]:
    body = [
        html.heading(f"{number}. {finding.kind}", 3),
        html.paragraph(finding.cause),
        html.paragraph("Fix: ", finding.fix),
        html.paragraph(inputs_word(finding)),
    ]
    if finding.example is None:
        return body
    body.append(html.code(_example(finding.example)))
    at = apart(finding.a.ids, finding.b.ids)
    start = max(at - _AROUND, 0)
    rows = {letter: one.ids[start : at + _AROUND] for letter, one in (("A", finding.a), ("B", finding.b)) if one.ids}
    if rows:
        body.append(html.id_rows(rows, differs=(at - start, at - start + 1)))
    body.append(html.facts({"A": _said(finding.a, finding.b, start), "B": _said(finding.b, finding.a, start)}))
    return body


def _example(example: str | Conversation | tuple[int, ...]) -> str:
    match example:
        case Conversation():
            said = {"messages": list(example.messages), "tools": list(example.tools)}
            return json.dumps({**said, "add_generation_prompt": example.generate}, indent=1)
        case tuple():
            return f"ids {list(example)}"
    return quoted(example)


def _said(outcome: Outcome, other: Outcome, start: int) -> str:
    if outcome.refused is not None:
        return f"refused: {outcome.refused}"
    tokens = " · ".join(outcome.tokens[start : start + 2 * _AROUND])
    if outcome.text is None:
        return tokens
    at = max(apart(outcome.text, other.text or "") - _AROUND, 0)
    return f"{tokens}\n{quoted(outcome.text[at : at + 3 * _AROUND])}"
