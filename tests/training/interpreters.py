"""Runs trainers' own code in interpreters that have it.

`TOKENTAPE_TRAINERS_PYTHON` names them, separated as in `PATH`. Of trainers that are on no index a `.pth` file there may
name a checkout. CONTRIBUTING.md says how to make one.
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


def answered(trainer: str, module: str, given: Any = None) -> Any:
    """What `python -m tests.training.MODULE TRAINER` writes last, as JSON, in the first interpreter with the trainer.

    One that lacks it writes null, and why to standard error.
    """
    places = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    why = []
    for python in PYTHONS:
        ran = subprocess.run(
            [python, "-m", f"tests.training.{module}", trainer],
            env={**os.environ, "PYTHONPATH": places},
            input=json.dumps(given, default=lambda array: array.tolist()),
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
    """Skip, or fail where trainers are all that is tested: a run that compared nothing is not a green one."""
    text = f"needs {trainer} in an interpreter of {VARIABLE}"
    if "TOKENTAPE_TRAINERS_REQUIRED" in os.environ:
        found = "; ".join(why) or "it names none"
        pytest.fail(f"{text} ({found}). CONTRIBUTING.md, 'Trainers', says how to make one", pytrace=False)
    pytest.skip(text)
