"""Runs trainers' own code in interpreters that have it.

`TOKENTAPE_TRAINERS_PYTHON` names them, separated as in `PATH`. For a trainer that is on no
index, a `.pth` file there can name a checkout. CONTRIBUTING.md explains how to make one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

VARIABLE = "TOKENTAPE_TRAINERS_PYTHON"
PYTHONS = [python for python in os.environ.get(VARIABLE, "").split(os.pathsep) if python]
REPOSITORY = Path(__file__).parents[2]


def answered(trainer: str, module: str, request: Any = None) -> Any:
    """Return the last output line of `python -m tests.training.MODULE TRAINER`, as JSON.

    The first interpreter with the trainer runs it. Others write null, and the reason to standard error.
    """
    places = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    why = []
    for python in PYTHONS:
        ran = subprocess.run(
            [python, "-m", f"tests.training.{module}", trainer],
            env={**os.environ, "PYTHONPATH": places},
            input=json.dumps(request, default=lambda array: array.tolist()),
            capture_output=True,
            text=True,
            timeout=1000,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        # Some trainers print while they are imported.
        made = json.loads(ran.stdout.splitlines()[-1])
        if made is not None:
            return made
        why.append(f"{python}: {ran.stderr.splitlines()[-1]}")
    return lacking(trainer, *why)


def lacking(trainer: str, *why: str) -> NoReturn:
    """Skip the test, or fail if trainers are required: a run that compared nothing must not pass."""
    text = f"needs {trainer} in an interpreter of {VARIABLE}"
    if "TOKENTAPE_TRAINERS_REQUIRED" in os.environ:
        reasons = "; ".join(why) or "it names none"
        pytest.fail(f"{text} ({reasons}). CONTRIBUTING.md, 'Trainers', says how to make one", pytrace=False)
    pytest.skip(text)
