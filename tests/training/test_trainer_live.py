"""Adapters inside the trainers' own entries of rollouts: each runs an agent over an engine that keeps a ledger.

`TOKENTAPE_TRAINERS_PYTHON` names interpreters with trainers, as in test_exports.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_exports import PYTHONS

REPOSITORY = Path(__file__).parents[2]


def ran(trainer: str) -> Any:
    """What the first interpreter that has the trainer says."""
    places = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    for python in PYTHONS:
        run = subprocess.run(
            [python, "-m", "tests.training.trainer_live", trainer],
            env={**os.environ, "PYTHONPATH": places},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        made = json.loads(run.stdout.splitlines()[-1])
        if made is not None:
            return made
    pytest.skip(f"needs {trainer} in an interpreter of TOKENTAPE_TRAINERS_PYTHON")


@pytest.mark.differential
@pytest.mark.parametrize(
    ("trainer", "failed", "rows"),
    [
        ("verl", "failure", 6),
        ("slime", "aborted", 6),
        ("miles", "aborted", 6),
        ("skyrl", "error", 6),
        ("verifiers", "HarnessError", 6),
        ("tinker", "skipped", 6),
        # These begin another row where a turn does not continue the last one.
        ("agent_lightning", "failed", 7),
        ("art", "", 7),
        # NeMo-RL takes no session with a branch.
        ("nemo_gym", "Non-contiguous messages found", 4),
        ("openenv", "6 of 6 rollouts", 6),
    ],
)
def test_what_the_trainer_makes_of_live_agents_is_what_its_engine_sampled(trainer: str, failed: str, rows: int) -> None:
    assert ran(trainer) == {"rows": rows, "failed": failed, "found": [], "unnoticed": []}
