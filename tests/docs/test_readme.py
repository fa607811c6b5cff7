"""The README's code, run unchanged against a gateway, except for the port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chat.conftest import load_tokenizer
from tokentape import Client

README = Path(__file__).parents[2] / "README.md"


def blocks() -> dict[str, str]:
    text = README.read_text(encoding="utf-8")
    return dict(
        re.findall(r"<!-- executed by tests/docs/test_readme.py: (\w+) -->\n```python\n(.*?)```", text, re.DOTALL)
    )


# The README does not show how clients are closed.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_readme_s_agent_and_samples_run(gateway_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks()
    assert set(code) == {"agent", "tools", "samples"}
    with Client(gateway_url) as client:
        client.session("task-8", pin={"temperature": 0.0})  # what it samples is not the point
    names: dict[str, object] = {}
    for name in ("agent", "tools", "samples"):
        exec(code[name].replace("http://127.0.0.1:8800", gateway_url), names)
    *answer, verdict = capsys.readouterr().out.splitlines()
    assert answer
    assert verdict == "exact 1.0"
    assert names["input_ids"].shape == names["loss_mask"].shape == names["old_logprobs"].shape


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_readme_s_python_is_all_executed() -> None:
    assert README.read_text(encoding="utf-8").count("```python") == len(blocks())


@pytest.mark.real
@pytest.mark.slow
def test_the_readme_s_example_of_drift_is_real() -> None:
    tokenizer = load_tokenizer("real/qwen3")
    assert tokenizer.decode([32713, 385]) == tokenizer.decode([9707]) == "Hello"
    assert tokenizer.encode_plain("Hello") == [9707]
