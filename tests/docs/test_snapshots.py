"""The snapshots guide: its example runs against a real gateway."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tokentape
from tests.test_client import talk
from tokentape._session.files import read_trajectories

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "snapshots.md"


def test_the_example_of_the_how_to_moves_the_data(
    gateway_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"<!-- executed by [\w/.]+ -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    with tokentape.Client(gateway_url) as client:
        talk(client.session("s").base_url)
        exec(code, {"client": client})
        assert list(client.sessions()) == []
    assert [trajectory.session_id for trajectory in read_trajectories("batch.parquet")] == ["s"]
