"""Findings of audits and locks as CI systems read them: JUnit by a parser, SARIF by its schema."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import jsonschema
import pytest

from tests.audit.tokendiff.test_formats import SARIF
from tokentape.audit._lock.comparing import RULES as LOCK_RULES
from tokentape.audit._lock.comparing import LockChange, LockReport, lock_cases
from tokentape.audit._report import CiCase, CiFinding, ci_report
from tokentape.audit._skew.backends import BackendFacts
from tokentape.audit._skew.findings import (
    RULES,
    AuditReport,
    CorpusStatistics,
    Skew,
    SkewResult,
    audit_cases,
    audit_layout,
)
from tokentape.audit._skew.probing import as_text

SIDE = BackendFacts("model", "tokenizer.json", frozenset())
AUDIT = AuditReport(
    SIDE,
    SIDE,
    (
        Skew(
            "merges", "encode", "a merge", "Use one file.", 3, ("words",), "a\x07b", SkewResult((1,)), SkewResult((2,))
        ),
        Skew("padding", "facts", "both pad", "Set it.", 1, severity="caution"),
    ),
    {"encode": 10, "render": 5},
    {},
    (),
    0.1,
    CorpusStatistics(1, 40, 100, 100, 30, 4, 0.1, 20, 5),
)
LOCK = LockReport("a folder", 9, (LockChange("merges", "1 differs", "usually this"),), ())


@pytest.mark.parametrize(
    ("cases", "rules", "counts", "results"),
    [
        (audit_cases(AUDIT), RULES, ("3", "1"), [("merges", "error"), ("padding", "warning")]),
        (lock_cases(LOCK), LOCK_RULES, ("1", "1"), [("merges", "error")]),
        ([CiCase("fine"), CiCase("left", skipped="why")], RULES, ("2", "0"), []),
    ],
)
def test_every_format_has_the_findings(
    cases: list[CiCase], rules: dict[str, str], counts: tuple[str, str], results: list[tuple[str, str]]
) -> None:
    suite = ElementTree.fromstring(ci_report("junit", "tokentape x", "model", rules, cases))
    assert (suite.get("tests"), suite.get("failures")) == counts
    assert (
        suite.get("skipped") == str(len(suite.findall("testcase/skipped"))) == str(sum(bool(c.skipped) for c in cases))
    )
    log = json.loads(ci_report("sarif", "tokentape x", "model", rules, cases))
    jsonschema.validate(log, SARIF)
    assert [(result["ruleId"], result["level"]) for result in log["runs"][0]["results"]] == results
    lines = ci_report("github", "tokentape x", "model", rules, cases).splitlines()
    assert [line.split(" ")[0] for line in lines] == [f"::{level}" for _, level in results]
    assert "\x07" not in str(log)


def test_finding_names_both_sides_and_what_to_do() -> None:
    text = audit_cases(AUDIT)[0].findings[0].text
    assert all(part in text for part in ("A: [1]", "B: [2]", "fix: Use one file.", "3 texts: words"))


def test_the_report_names_the_sides_and_the_share_of_the_corpus() -> None:
    page = audit_layout(AUDIT).html()
    for part in ("A (train)", "B (serve)", "Of your 20 conversations, 5 (25.0%)", "Of your 40 documents, 4 (10.0%)"):
        assert part in page


@pytest.mark.parametrize(
    ("token", "decoder", "text"),
    [
        ("\u010a", {"type": "ByteLevel"}, "\n"),
        ("\u0120caf\u00c3\u00a9", {"type": "ByteLevel"}, " caf\u00e9"),
        ("\u00c3", {"type": "ByteLevel"}, "\\xc3"),
        ("\u2581the", {"type": "Sequence"}, " the"),
        ("<|end|>", {"type": "ByteLevel"}, "<|end|>"),
        ("\u010a", None, "\u010a"),
    ],
)
def test_tokens_are_shown_as_what_they_spell(token: str, decoder: object, text: str) -> None:
    facts = BackendFacts("m", "k", frozenset(), spec=None if decoder is None else {"decoder": decoder})
    assert as_text(token, facts) == text


def test_annotations_are_single_lines_and_limited_in_number() -> None:
    found = [CiFinding("merges", "error", "a:b", f"line\n{n}%") for n in range(30)]
    lines = ci_report("github", "t", "p", RULES, [CiCase("c", found)]).splitlines()
    assert lines[0] == "::error file=p,line=1,title=a%3Ab::line%0A0%25"
    assert len(lines) == 10
