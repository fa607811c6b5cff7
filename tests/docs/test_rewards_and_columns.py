"""The how-to's example, run against a real gateway."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import tokentape
from tests.test_client import talk

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rewards-and-columns.md"


def test_the_example_of_the_how_to_attaches_columns(gateway_url: str) -> None:
    (code,) = re.findall(r"<!-- executed by [\w/.]+ -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    with tokentape.Client(gateway_url) as client:
        session = client.session()
        talk(session.base_url)
        sampled = session.info().turns[0].sampled_tokens
        exec(code, {"session": session, "sampled": sampled, "np": np})
        (trajectory,) = session.trajectories()
    assert trajectory.columns["advantages"][trajectory.loss_mask].tolist() == [0.5] * int(trajectory.loss_mask.sum())
    assert trajectory.columns["value"][trajectory.completion_starts[0]] == np.float32(0.1)
