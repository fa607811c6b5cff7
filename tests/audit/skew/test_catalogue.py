"""Each known bug that can be rebuilt is found, named and shown on a smallest input; its healthy twin is clean."""

from __future__ import annotations

import re

import pytest

from tests.audit.skew.cases import CASES, TINY, Case, base, healthy
from tests.chat.conftest import TEMPLATES
from tokentape.audit.skew.auditor import audit
from tokentape.audit.skew.findings import Finding
from tokentape.audit.skew.sides.base import Conversation, Side

FAST = (TINY, "mistral_v3_spm")
"""Small tokenizers; the others take seconds each to load and to exchange parts of."""


def needed(family: str, template: str | None) -> None:
    if not TEMPLATES and (family != TINY or template):
        pytest.skip("set TOKENTAPE_TOKENIZERS to a folder of real tokenizers")


def marks(family: str, template: str | None = None) -> tuple[pytest.MarkDecorator, ...]:
    quick = family == TINY or (family in FAST and not template)
    return () if quick else (pytest.mark.slow,)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=marks(case.family, case.template)) for case in CASES]
)
def test_a_known_bug_is_found_named_and_shown(case: Case) -> None:
    needed(case.family, case.template)
    a, b = healthy(case.family, case.template), case.make(base(case.family, case.template))
    report = audit(a, b)
    found = [finding for finding in report.findings if finding.kind == case.kind]
    assert found, [(one.kind, one.cause) for one in report.findings]
    assert found[0].severity == case.severity
    assert found[0].fix
    if case.says:
        causes = " / ".join(one.cause for one in found)
        assert re.search(case.says, causes), causes
    if case.example is not None:
        assert isinstance(found[0].example, str)
        assert re.search(case.example, found[0].example)
    skews = {one.kind for one in report.findings if one.severity == "skew"}
    assert skews <= {case.kind, *case.also}, [(one.kind, one.cause) for one in report.findings]
    assert report.skewed == (case.severity == "skew")
    for finding in report.findings:
        check_smallest(a, b, finding)


def check_smallest(a: Side, b: Side, finding: Finding) -> None:
    """The input differs, and no character or message of it can be left out."""
    if finding.probe == "encode" and isinstance(finding.example, str):
        text = finding.example
        assert a.encode([text]) != b.encode([text])
        for at in range(len(text)):
            rest = text[:at] + text[at + 1 :]
            assert a.encode([rest]) == b.encode([rest])
    if finding.probe == "render" and isinstance(finding.example, Conversation):
        assert finding.a != finding.b
        assert len(finding.example.messages) <= 4


TWINS = sorted({(case.family, case.template or "") for case in CASES})


@pytest.mark.parametrize(("family", "template"), [pytest.param(*twin, marks=marks(*twin)) for twin in TWINS])
def test_the_healthy_twin_is_clean(family: str, template: str) -> None:
    needed(family, template)
    report = audit(healthy(family, template or None), base(family, template or None).side())
    assert not report.skewed, [(one.kind, one.cause) for one in report.findings]
