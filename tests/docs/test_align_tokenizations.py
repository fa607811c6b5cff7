"""The how-to's example, with two tokenizers of which one is not byte-level."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.chat.conftest import load_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "align-tokenizations.md"


def test_the_example_of_the_how_to_compares_two_models() -> None:
    (code,) = re.findall(r"<!-- executed by [\w/.]+ -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for side, family, eos in (("student", "qwen3", "<|im_end|>"), ("teacher", "mistral_v3_spm", "</s>")):
        tokenizer = load_tokenizer(family)
        control = tokenizer.control(eos)
        assert control is not None
        ids = [*tokenizer.encode_marked("Unbelievable, 12345 naïve cafés").ids, control.id]
        names |= {side: tokenizer, f"{side}_ids": ids, f"{side}_eos": control.id}
        names |= {f"{side}_logprobs": -np.ones(len(ids))}
    names["loss_mask"] = np.ones(len(names["student_ids"]), np.bool_)
    exec(code, names)
    assert names["comparable"].all()
    assert names["gap"].sum() == len(names["teacher_ids"]) - len(names["student_ids"])
    assert names["ends"] == [(-1.0, -1.0)]
    assert np.isfinite(names["loss"])
