"""Wrong audits are caught: always clean, always skewed, or naming a wrong part."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.audit.mutator import judge
from tests.audit.mutator.changes import Change, apply
from tests.audit.mutator.files import GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, load
from tests.audit.mutator.harmless import REWRITINGS
from tests.audit.mutator.judge import Audit, Base, Verdict, judge_harmless, judge_mutant
from tests.audit.mutator.served import KINDS
from tests.chat.conftest import slow_unless
from tokentape.audit._skew.backends import Backend, BackendFacts
from tokentape.audit._skew.findings import AuditReport, Kind, Skew
from tokentape.errors import TokenizerUnusable

NO_NORMALIZER = Change(TOKENIZER, "set", ("normalizer",), None)


A, B = (BackendFacts(name, "planted", frozenset()) for name in "ab")
CLEAN = AuditReport(A, B, (), {}, {}, (), 0.0)


def _judged(base: Base, change: Change, run: Audit | None = None, *, check: bool = False) -> Verdict:
    return judge_mutant(base, apply(base.model, [change]), [change], run, check=check)


def _audit_with(*findings: Skew) -> Audit:
    return lambda a, b: replace(CLEAN, findings=findings)


def _finding(kind: Kind, example: str | None) -> Skew:
    return Skew(kind, "encode", "planted", "none", 1, example=example)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_of_a_changed_folder_is_judged_by_what_it_shows(base: Base, kind: str) -> None:
    served = {"check": False, "served": kind}
    missed = judge_mutant(base, apply(base.model, [NO_NORMALIZER]), [NO_NORMALIZER], _audit_with(), **served)
    assert ([effect.what for effect in missed.effects], missed.complaints) == (
        ["ids"],
        ["called clean: normalizer: ids"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_audit_of_a_server_that_finds_the_change_has_no_complaint(base: Base, kind: str) -> None:
    mutant = apply(base.model, [NO_NORMALIZER])
    right = judge_mutant(base, mutant, [NO_NORMALIZER], check=False, served=kind)
    assert ([effect.what for effect in right.effects], right.skewed, right.complaints) == (["ids"], True, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stop_ids_without_a_server_endpoint_are_not_a_complaint(base: Base, kind: str) -> None:
    stop = Change(GENERATION, "set", ("eos_token_id",), 3991)
    hidden = judge_mutant(base, apply(base.model, [stop]), [stop], check=False, served=kind)
    assert (hidden.effects, hidden.skewed, hidden.complaints) == ([], False, [])


@pytest.mark.slow
def test_an_audit_that_names_the_right_part_has_no_complaint(base: Base) -> None:
    verdict = _judged(base, NO_NORMALIZER)
    assert verdict.skewed
    assert [kind for kind, _, _ in verdict.findings] == ["normalizer"]
    assert verdict.complaints == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (NO_NORMALIZER, "called clean: normalizer: ids"),
        (Change(TOKENIZER, "remove", ("model", "merges", 3000)), "called clean: merges: ids"),
        (Change(GENERATION, "set", ("eos_token_id",), 3991), "called clean: generation_ids: stop ids"),
        (Change(TEMPLATE, "splice", (), [0, "", "x"]), "called clean: template: rendering"),
    ],
)
def test_audit_that_always_reports_clean_is_caught(base: Base, change: Change, complaint: str) -> None:
    assert complaint in _judged(base, change, _audit_with()).complaints


@pytest.mark.slow
@pytest.mark.parametrize("name", ["copied", *map(slow_unless, ("wrapped", "offsets"))])
def test_audit_that_always_reports_skew_is_caught(base: Base, name: str) -> None:
    made = REWRITINGS[name](base.model, random.Random(1))
    assert made is not None
    verdict = judge_harmless(base, name, made, _audit_with(_finding("normalizer", "e\u0301")))
    assert f"false alarm: {name}" in verdict.complaints


@pytest.mark.slow
def test_an_audit_that_refuses_a_healthy_folder_is_caught(base: Base) -> None:
    def refuse(a: str | Backend, b: str | Backend) -> AuditReport:
        raise TokenizerUnusable("planted")

    verdict = judge_harmless(base, "copied", base.model, refuse)
    assert "false alarm: copied" in verdict.complaints


@pytest.mark.parametrize("kind", ["merges", *map(slow_unless, ("added token", "template", "library"))])
def test_cause_that_fails_when_undone_is_caught(base: Base, kind: Kind) -> None:
    verdict = _judged(base, NO_NORMALIZER, _audit_with(_finding(kind, "e\u0301")))
    assert verdict.complaints == [f"cause does not hold: {kind} for normalizer"]


@pytest.mark.slow
def test_an_input_on_which_the_sides_agree_is_caught(base: Base) -> None:
    verdict = _judged(base, NO_NORMALIZER, _audit_with(_finding("normalizer", "plain")))
    assert verdict.complaints == ["input shows no difference: normalizer for normalizer"]


@pytest.mark.slow
def test_a_vocabulary_that_differs_without_a_text_is_caught(base: Base) -> None:
    swap = Change(TOKENIZER, "swap", ("model", "vocab"), ["Ġthe", "Ġa"])
    verdict = _judged(base, swap, _audit_with(_finding("vocabulary", None)))
    assert verdict.complaints == ["no input shown: vocabulary for vocabulary"]


def test_an_audit_that_raises_what_it_should_not_is_caught(base: Base) -> None:
    def crash(a: str | Backend, b: str | Backend) -> AuditReport:
        raise IndexError

    assert _judged(base, NO_NORMALIZER, crash).complaints == ["audit crashes: normalizer: IndexError"]


def test_a_check_that_always_passes_is_caught(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "examine", lambda lock, folder: SimpleNamespace(ok=True))
    assert _judged(base, NO_NORMALIZER, check=True).complaints == ["check passes: normalizer: ids"]


@pytest.mark.slow
def test_a_check_that_never_passes_is_caught(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "examine", lambda lock, folder: SimpleNamespace(ok=False))
    verdict = judge_harmless(base, "copied", base.model, _audit_with())
    assert verdict.complaints == ["check alarms: copied"]


@pytest.mark.slow
def test_two_changes_are_undone_together(base: Base) -> None:
    changes = [NO_NORMALIZER, Change(TOKENIZER, "set", ("added_tokens", 3, "lstrip"), True)]
    verdict = judge_mutant(base, apply(base.model, changes), changes, check=False)
    assert {kind for kind, _, _ in verdict.findings} == {"normalizer", "added token"}
    assert verdict.complaints == []


@pytest.mark.slow
def test_bos_that_llama_cpp_strips_is_not_a_difference(tmp_path: Path) -> None:
    """Seed 180305 of Mistral Nemo: its tokenizer always puts BOS before a text, independent of the template."""
    base = Base(load("small-mistral_nemo"), tmp_path)
    change = Change(TOKENIZER_CONFIG, "set", ("bos_token",), "<pad>")
    verdict = judge_mutant(base, apply(base.model, [change]), [change], check=False, served="llamacpp")
    assert (verdict.effects, verdict.complaints) == ([], [])
