"""The conformance kit against the trainers' own code: from exported golden sessions to the inputs of each loss."""

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

BATCHES = [golden for golden in GOLDEN if golden.name != "no reward" and "1.4" not in golden.name]
GROUPS = {"forked", "groups of unequal branches"}


EXPORTS: dict[str, Callable[[Sample, int], dict[str, Any]]] = {
    "verl": lambda sample, n: exports.verl_agent_loop_output(sample),
    "slime": lambda sample, n: exports.slime_sample(sample, n, 0),
    "miles": lambda sample, n: exports.slime_sample(sample, n, 0),
    "nemo_rl": exports.nemo_rl_datum,
    "tinker": lambda sample, n: exports.tinker_datum(sample),
}


def exported(trainer: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the exported samples, by session."""
    if trainer == "skyrl":
        return {"all": exports.skyrl_generator_output(samples)}
    made: dict[str, Any] = {}
    for n, sample in enumerate(group_advantages(samples)):
        made.setdefault(sample.session_id, []).append(EXPORTS[trainer](sample, n))
    return made


@cache
def rows(trainer: str) -> dict[str, list[Row]]:
    batches = [
        exported(trainer, golden_samples([path for session in golden.sessions for path in session.trajectories()]))
        for golden in BATCHES
    ]
    made = answered(trainer, "trainer_paths", batches)
    for row in (row for batch in made for row in batch if "weight_versions" in row):
        row["weight_versions"] = set(row["weight_versions"])
    return {golden.name: [Row(**row) for row in batch] for golden, batch in zip(BATCHES, made, strict=True)}


@pytest.mark.differential
@pytest.mark.parametrize("golden", BATCHES, ids=lambda golden: golden.name)
@pytest.mark.parametrize("trainer", [*EXPORTS, "skyrl"])
def test_golden_sessions_reach_the_loss_of_the_trainer_s_code(trainer: str, golden: Any) -> None:
    kinds = {finding.kind for finding in findings(golden, rows(trainer)[golden.name])}
    # Its baseline counts samples: docs/reference/samples.md.
    assert kinds == ({"siblings counted as sessions"} if trainer == "nemo_rl" and golden.name in GROUPS else set())
