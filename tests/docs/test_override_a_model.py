"""The how-to's package, built as the page shows it and found like an installed package."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat.conftest import setup_for
from tokentape.chat._renderer import Renderer
from tokentape.chat._reply import Reply

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "override-a-model.md"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    text = PAGE.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"<!-- executed by [\w/.]+: ([\w.]+) -->\n```\w+\n(.*?)```", text, re.DOTALL))
    (tmp_path / "acme_format.py").write_text(blocks["acme_format.py"], encoding="utf-8")
    info = tmp_path / "acme_format-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-format\nVersion: 1\n")
    groups = tomllib.loads(blocks["pyproject.toml"])["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("acme_format", None)


def parsed(renderer: Renderer, text: str) -> Reply:
    parser = renderer.parser(setup_for(renderer, tools=()))
    parser.feed(renderer.tokenizer.encode_plain(text))
    return parser.finish()[1]


@pytest.mark.usefixtures("installed")
def test_the_package_of_the_how_to_parses_its_model(model_dir: Path, renderer: Renderer, tmp_path: Path) -> None:
    template = tmp_path / "acme.jinja"
    template.write_text("{# ACME-1 #}" + renderer.template.source, encoding="utf-8")
    acme = Renderer.load(model_dir, template)
    assert acme.overrides is not None
    assert acme.fingerprint != Renderer(acme.tokenizer, acme.template).fingerprint
    reply = parsed(acme, "Thought: hm\nAnswer: 42<|im_end|>")
    assert (reply.content, reply.reasoning, reply.reasoning_open) == ("42", "hm", False)
    assert parsed(acme, "Thought: hm").reasoning_open


@pytest.mark.usefixtures("installed")
def test_the_package_of_the_how_to_leaves_other_models_alone(model_dir: Path) -> None:
    assert Renderer.load(model_dir).overrides is None
