"""The examples of training, run as their docstrings say, with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow


def printed_by(name: str, *arguments: str, folder: Path) -> str:
    """Return the output of an example, run in an empty folder, where it leaves nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


def test_grpo_has_ratio_1_at_every_step(tmp_path: Path) -> None:
    lines = printed_by("grpo_trl.py", "--steps", "3", folder=tmp_path).splitlines()
    numbers = [[float(number) for number in re.findall(r"-?\d+\.\d+", line)] for line in lines]
    assert [line.split("   ")[0] for line in lines] == ["step  1", "step  2", "step  3"]
    for _, _, ratio, apart in numbers:
        assert ratio == pytest.approx(1, abs=1e-3)
        assert apart < 1e-3
    # The model differs from the initial one.
    assert numbers[2][1] > numbers[0][1]


def test_sft_trains_assistant_text_and_its_loss_falls(tmp_path: Path) -> None:
    output = printed_by("sft_masks.py", "--steps", "4", folder=tmp_path)
    trained = re.findall(r"\[\[(.*?)\]\]", output, re.DOTALL)
    assert len(trained) == 2
    assert trained[0].startswith("<tool_call>")
    assert all(text.endswith("<|im_end|>") for text in trained)
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 4
    assert losses[3] < losses[0] / 2


def test_export_to_verl_shows_tensors_and_tokens(tmp_path: Path) -> None:
    output = printed_by("export_to_verl.py", folder=tmp_path)
    assert re.search(r"^response_mask +torch.int64 +\(4, \d+\)$", output, re.MULTILINE)
    assert re.search(r"^ +\d+ 1 +-\d\.\d{4}  '<think>'$", output, re.MULTILINE)
    assert "samples=4" in output
