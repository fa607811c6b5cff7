"""The pages for users of other tools: their code runs against a real gateway."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tokentape
from tests.test_client import talk

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)

WITH_CODE = sorted(page.name for page in PAGES.glob("*.md") if CODE.search(page.read_text("utf-8")))


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_code_runs(gateway_url: str, name: str) -> None:
    with tokentape.Client(gateway_url) as client:
        talk(client.session("rollout-7").base_url)
    for code in CODE.findall((PAGES / name).read_text("utf-8")):
        assert "http://127.0.0.1:8800" in code
        names: dict[str, Any] = {}
        exec(code.replace("http://127.0.0.1:8800", gateway_url), names)
        names["client"].close()
        for made in ("triplets", "rows", "outputs", "base_url"):
            assert names.get(made, True)


def test_every_page_is_listed() -> None:
    index = (PAGES / "index.md").read_text("utf-8")
    assert {page.name for page in PAGES.glob("*.md")} - {"index.md"} == set(re.findall(r"\(([\w-]+\.md)\)", index))
