"""The conformance kit against the trainers' own code: golden sessions, exported, to what each loss gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from tests.training.interpreters import answered
from tokentape.testing._rows import Row, findings
from tokentape.testing.golden import GOLDEN
from tokentape.testing.samples import golden_samples
from tokentape.training import exports
from tokentape.training._collate import group_advantages
from tokentape.training._samples import Sample

BATCHES = [one for one in GOLDEN if one.name != "no reward" and "1.4" not in one.name]
GROUPS = {"forked", "groups of unequal branches"}


EXPORTS: dict[str, Callable[[Sample, int], dict[str, Any]]] = {
    "verl": lambda one, n: exports.verl_agent_loop_output(one),
    "slime": lambda one, n: exports.slime_sample(one, n, 0),
    "miles": lambda one, n: exports.slime_sample(one, n, 0),
    "nemo_rl": exports.nemo_rl_datum,
    "tinker": lambda one, n: exports.tinker_datum(one),
}


def exported(trainer: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """What a trainer is given, by session."""
    if trainer == "skyrl":
        return {"all": exports.skyrl_generator_output(samples)}
    made: dict[str, Any] = {}
    for n, one in enumerate(group_advantages(samples)):
        made.setdefault(one.session_id, []).append(EXPORTS[trainer](one, n))
    return made


@cache
def rows(trainer: str) -> dict[str, list[Row]]:
    given = [
        exported(trainer, golden_samples([path for session in golden.sessions for path in session.trajectories()]))
        for golden in BATCHES
    ]
    made = answered(trainer, "trainer_paths", given)
    for row in (row for batch in made for row in batch if "weight_versions" in row):
        row["weight_versions"] = set(row["weight_versions"])
    return {golden.name: [Row(**row) for row in batch] for golden, batch in zip(BATCHES, made, strict=True)}


@pytest.mark.differential
@pytest.mark.parametrize("golden", BATCHES, ids=lambda golden: golden.name)
@pytest.mark.parametrize("trainer", [*EXPORTS, "skyrl"])
def test_golden_sessions_reach_the_loss_of_the_trainer_s_own_code(trainer: str, golden: Any) -> None:
    found = {one.kind for one in findings(golden, rows(trainer)[golden.name])}
    # Its baseline counts samples: docs/reference/samples.md.
    assert found == ({"siblings counted as sessions"} if trainer == "nemo_rl" and golden.name in GROUPS else set())
