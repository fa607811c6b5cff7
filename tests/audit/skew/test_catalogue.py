"""Each known bug that can be rebuilt is found, named and shown on a smallest input; its healthy twin is clean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from tests.audit.skew.cases import CASES, TINY, Case, base, healthy
from tests.chat.conftest import slow_unless
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import Backend, SkewChat
from tokentape.audit._skew.findings import Skew

OF_MODELS = [case for case in CASES if case.family != TINY or case.template]


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_proofs: None) -> None:
    """Compare all conversations, unlike the other tests of audits."""


def on_real_models(test: Callable[..., None]) -> Callable[..., None]:
    """Marks that run a test with the tokenizers and templates of models: seconds each, to load and to exchange."""
    return pytest.mark.real(pytest.mark.slow(pytest.mark.parametrize("source", ["real"], indirect=True)(test)))


FIRST = {case.kind: case for case in reversed(CASES) if not case.real}
"""The first of each kind of finding."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", [slow_unless(case, *FIRST.values()) for case in CASES if not case.real], ids=str)
def test_a_known_bug_is_found_named_and_shown(case: Case) -> None:
    check(case)


@on_real_models
@pytest.mark.parametrize("case", OF_MODELS, ids=str)
def test_a_known_bug_of_a_real_model_is_found_named_and_shown(case: Case, source: str) -> None:
    check(case)


def check(case: Case) -> None:
    a, b = healthy(case.family, case.template), case.make(base(case.family, case.template))
    report = audit(a, b)
    found = [finding for finding in report.findings if finding.kind == case.kind]
    assert found, [(finding.kind, finding.cause) for finding in report.findings]
    assert found[0].severity == case.severity
    assert found[0].fix
    if case.cause:
        causes = " / ".join(finding.cause for finding in found)
        assert re.search(case.cause, causes), causes
    if case.example is not None:
        assert isinstance(found[0].example, str)
        assert re.search(case.example, found[0].example)
    skews = {finding.kind for finding in report.findings if finding.severity == "skew"}
    assert skews <= {case.kind, *case.also}, [(finding.kind, finding.cause) for finding in report.findings]
    assert report.skewed == (case.severity == "skew")
    for finding in report.findings:
        check_smallest(a, b, finding)


def check_smallest(a: Backend, b: Backend, finding: Skew) -> None:
    """The input differs, and no character or message of it can be left out."""
    if finding.probe == "encode" and isinstance(finding.example, str):
        text = finding.example
        assert a.encode([text]) != b.encode([text])
        for at in range(len(text)):
            rest = text[:at] + text[at + 1 :]
            assert a.encode([rest]) == b.encode([rest])
    if finding.probe == "render" and isinstance(finding.example, SkewChat):
        assert finding.a != finding.b
        assert len(finding.example.messages) <= 4


def twins(cases: Sequence[Case]) -> list[tuple[str, str]]:
    return sorted({(case.family, case.template or "") for case in cases})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("twin", [slow_unless(twin, *twins([*FIRST.values()])) for twin in twins(CASES)])
def test_the_healthy_twin_is_clean(twin: tuple[str, str]) -> None:
    check_twin(*twin)


@on_real_models
@pytest.mark.parametrize(("family", "template"), twins(OF_MODELS))
def test_the_healthy_twin_of_a_real_model_is_clean(family: str, template: str, source: str) -> None:
    check_twin(family, template)


def check_twin(family: str, template: str) -> None:
    report = audit(healthy(family, template or None), base(family, template or None).side())
    assert not report.skewed, [(finding.kind, finding.cause) for finding in report.findings]
