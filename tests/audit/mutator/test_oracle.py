"""Brute force finds known differences, and none between equivalent models."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.audit.mutator.changes import Change, apply
from tests.audit.mutator.drawing import MERGES, VOCAB
from tests.audit.mutator.files import CONFIG, GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, Model
from tests.audit.mutator.harmless import REWRITINGS
from tests.audit.mutator.judge import Base
from tests.audit.mutator.oracle import View, effects
from tests.audit.mutator.texts import about
from tests.chat.conftest import slow_unless


def _effects(base: Base, *changes: Change) -> dict[str, str]:
    model = apply(base.model, changes)
    view = View(model, base.written(model))
    return {effect.what: effect.shown for effect in effects(base.view, view, about(base.model, model, changes))}


def _set(*path: str, value: Any, file: str = TOKENIZER) -> Change:
    return Change(file, "set", path, value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        pytest.param([Change(TOKENIZER, "remove", (*MERGES, 3000))], "ids", id="merge dropped"),
        pytest.param([Change(TOKENIZER, "swap", VOCAB, ["Ġthe", "Ġa"])], "ids", id="ids exchanged"),
        pytest.param([_set("normalizer", value=None)], "ids", id="normalizer"),
        pytest.param([_set("model", "dropout", value=0.5)], "unstable", id="dropout"),
        pytest.param([_set("model", "type", value="NoModel")], "refused", id="model unknown"),
        pytest.param([_set("decoder", value={"type": "Fuse"})], "text of ids", id="decoder"),
        pytest.param(
            [
                _set(
                    "truncation",
                    value={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
                )
            ],
            "cut or padded",
            id="truncation",
        ),
        pytest.param([_set("eos_token_id", value=3991, file=GENERATION)], "stop ids", id="stop ids"),
        pytest.param([_set("vocab_size", value=3992, file=CONFIG)], "rows", id="embedding rows"),
        pytest.param([_set("eos_token", value="<|im_start|>", file=TOKENIZER_CONFIG)], "special tokens", id="eos"),
        pytest.param([Change(TEMPLATE, "splice", (), [0, "", "x"])], "rendering", id="template"),
        pytest.param(
            [_set("extra_special_tokens", value=["quartz"], file=TOKENIZER_CONFIG)], "auto ids", id="more tokens"
        ),
    ],
)
def test_a_known_difference_is_found(base: Base, changes: list[Change], what: str) -> None:
    assert what in _effects(base, *changes)


def test_swapped_competing_merges_are_found_by_a_text(base: Base) -> None:
    merges = base.model.docs[TOKENIZER]["model"]["merges"]
    at = next(n for n, merge in enumerate(merges) if n > 500 and merge[0] == "in")
    rival = next(n for n, merge in enumerate(merges) if n != at and merge[1] == "in")
    assert "ids" in _effects(base, Change(TOKENIZER, "swap", MERGES, [at, rival]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [slow_unless(name, *sorted(REWRITINGS)[::3]) for name in sorted(REWRITINGS)])
def test_different_spelling_of_the_same_file_has_no_effect(base: Base, name: str) -> None:
    made = REWRITINGS[name](base.model, random.Random(1))
    if made is None:
        return  # not every rewriting applies to every model
    assert effects(base.view, View(made, base.written(made))) == []


def test_a_bare_model_without_template_and_configs_is_compared(base: Base) -> None:
    bare = Model(base.model.name, {TOKENIZER: base.model.docs[TOKENIZER], TOKENIZER_CONFIG: {}})
    found = {effect.what for effect in effects(base.view, View(bare, base.written(bare)))}
    assert found >= {"stop ids", "special tokens", "rendering"}
