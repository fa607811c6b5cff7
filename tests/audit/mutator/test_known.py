"""What the mutator found stays mended; an expected failure for each known complaint, and no complaint beside them.

The lists are `mended.json` and `known.json`. A known case that is mended fails here until it is moved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.audit.mutator.__main__ import run
from tests.audit.mutator.changes import Change, apply
from tests.audit.mutator.drawing import draw
from tests.audit.mutator.files import TINY, load, names
from tests.audit.mutator.harmless import REWRITINGS
from tests.audit.mutator.judge import CLEAN, Base, judge_harmless, judge_mutant
from tests.audit.mutator.known import known, mended, unknown
from tests.chat.conftest import slow_unless

MUTANTS = 500


def _complaints(base: Base, case: dict[str, Any], *, check: bool) -> list[str]:
    if "harmless" in case:
        made = [REWRITINGS[case["harmless"]](base.model, random.Random(seed)) for seed in range(5)]
        models = [model for model in made if model is not None]
        verdicts = [judge_harmless(base, case["harmless"], model, served=case.get("served")) for model in models]
        return [complaint for verdict in verdicts for complaint in verdict.complaints]
    changes = [Change.from_json(change) for change in case["changes"]]
    how = {"check": check, "flipped": case.get("flipped", False), "served": case.get("served")}
    return judge_mutant(base, apply(base.model, changes), changes, **how).complaints


def _cases() -> Iterator[Any]:
    here = set(names())
    open_cases = known()
    for complaint, case in {**mended(), **open_cases}.items():
        if case["model"] in here:
            failing = pytest.mark.xfail(strict=True, raises=AssertionError, reason=complaint)
            marks: list[pytest.MarkDecorator] = [failing] if complaint in open_cases else []
            if case["model"] != TINY or not complaint.startswith(CLEAN):
                marks.append(pytest.mark.slow)
            yield pytest.param(complaint, case, marks=marks, id=complaint)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("complaint", "case"), list(_cases()))
def test_the_complaint_is_gone(
    base: Base, tmp_path_factory: pytest.TempPathFactory, complaint: str, case: dict[str, Any]
) -> None:
    if case["model"] != TINY:
        base = Base(load(case["model"]), tmp_path_factory.mktemp("models"))
    assert complaint not in _complaints(base, case, check=complaint.startswith("check"))


@pytest.mark.parametrize("seed", [slow_unless(seed, 10_000, 10_001) for seed in range(10_000, 10_006)])
def test_mutant_has_only_known_complaints(base: Base, seed: int) -> None:
    model, changes = draw(TINY, seed)
    assert unknown(judge_mutant(base, model, changes, check=False).complaints) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutants_have_only_known_complaints(tmp_path: Path) -> None:
    lines = run(names(real=False), range(MUTANTS), tmp_path / "mutants.jsonl", seconds=300)
    assert len(lines) == MUTANTS
    assert unknown(complaint for line in lines for complaint in line["complaints"]) == []
