"""What the generator finds today, each class reduced to the few options that bring it about: expected failures.

When a change removes a class, its test fails: delete the entry in known_failures.json then. A class that is not listed
there fails the run over many templates: either the product is to be mended, or the class is to be listed, see
`tests.generator`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generator.__main__ import run
from tests.generator.causes import Cause, known_causes, unexplained
from tests.generator.examine import case_of, examine
from tests.generator.options import only

TEMPLATES = 50
BESIDE = ("base=real/", "base=trial/")
"""The prefix of causes that need templates from outside the repository."""


def _parameters() -> list[object]:
    return [
        pytest.param(
            cause,
            id=f"{cause.kind}: {', '.join(cause.cause) or 'plainest'}",
            marks=[
                pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"{cause.command}: {cause.example}"),
                *([pytest.mark.real] if any(option.startswith(BESIDE) for option in cause.cause) else []),
            ],
        )
        for cause in known_causes()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cause", _parameters())
def test_a_known_class_of_failures_is_gone(cause: Cause) -> None:
    case = only(case_of(cause.seed, cause.index), list(cause.cause))
    assert cause.kind not in examine(case).kinds


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_templates_show_no_other_failures(tmp_path: Path) -> None:
    results = run(1, TEMPLATES, 20, tmp_path / "results.jsonl", processes=2)
    rest = unexplained(results, known_causes())
    assert [f"{kind}: python -m tests.generator --case {r['seed']}:{r['index']}" for r, kind in rest] == []
