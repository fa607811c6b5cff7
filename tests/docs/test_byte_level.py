"""The page's example and the figures of its table, on the tiny model."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tokentape.audit._byte_level import Bounds, Spellings, TransformersModel, price
from tokentape.chat import _grammar as grammar
from tokentape.chat._renderer import Renderer

PAGE = (Path(__file__).parents[2] / "docs" / "byte-level.md").read_text("utf-8")
QUESTION = "What do 3 pears cost if one costs 12?"


@pytest.mark.slow
def test_the_example_gives_the_figures_of_the_table(
    model_dir: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"<!-- executed by [\w/.]+ -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    setup = grammar.setup(renderer.fingerprint, {}, tools=())
    prompt = renderer.render([{"role": "user", "content": QUESTION}], setup).ids.tolist()
    think = renderer.tokenizer.control("<think>")
    assert think is not None
    rows = re.findall(r"^\| (\w+).*? \| (-[\d.]+) \| ([\d.]+) % \|$", PAGE, re.MULTILINE)
    pieces = re.findall("`(.*?)`", next(line for line in PAGE.splitlines() if line.startswith("| sampled")))
    names = {
        "context_ids": [*prompt, think.id, *renderer.tokenizer.encode_plain("\n")],
        "sampled_ids": [token_id for piece in pieces for token_id in renderer.tokenizer.encode_plain(piece)],
    }
    exec(code.replace("path/to/model", str(model_dir)), names)
    found = names["found"]
    values = [found.sampled, found.canonical, found.text.lower]
    assert [word for word, _, _ in rows] == ["sampled", "canonical", "the"]
    assert [float(logprob) for _, logprob, _ in rows] == pytest.approx(values, abs=1e-3)
    assert [float(percent) / 100 for _, _, percent in rows] == pytest.approx([math.exp(v) for v in values], abs=1e-3)
    assert capsys.readouterr().out.startswith(str(found.sampled))

    model = TransformersModel.load(model_dir, names["context_ids"])
    spellings = Spellings.of(renderer.tokenizer)

    def bounds(most: int) -> Bounds:
        return price(model, names["sampled_ids"], renderer.tokenizer, spellings, max_evaluations=most).text

    early, late = bounds(32), bounds(2048)
    assert early.upper - early.lower == pytest.approx(0.014, abs=5e-4)
    assert late.upper - late.lower <= 1e-6
    assert late.evaluations == pytest.approx(266, abs=10)
