"""The oracle finds planted faults, and none without them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.chat.conftest import slow_unless
from tests.generator.compose import compose
from tests.generator.conversations import conversations
from tests.generator.examine import Result, examine
from tests.generator.options import Case, draw, only
from tests.generator.oracle import Reference, appends, end_of_reply
from tests.generator.planted import (
    EXPECTED,
    AlwaysLocal,
    EncodesEverything,
    LosesCalls,
    LosesSampledIds,
    OneWrongToken,
    OtherPrompt,
)
from tests.generator.product import Product
from tests.generator.vocabularies import write_model

pytestmark = pytest.mark.usefixtures("quick_proofs")

PLAIN = only(draw(1, 0), [])
NEWLINES_MERGE = {"false append-only"}
"""Of the plainest case: see known_failures.json."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(PLAIN, compose(PLAIN), tmp_path_factory.mktemp("plain"))


@cache
def sound(case: Case) -> Result:
    """The findings for the unmodified product."""
    return examine(case, 12)


def test_simplest_case_has_no_findings() -> None:
    result = sound(PLAIN)
    assert result.kinds <= NEWLINES_MERGE
    assert result.counts["prompts"] > 8
    assert result.counts["strategy local"] > 8


OFTEN = (AlwaysLocal, OneWrongToken, OtherPrompt, EncodesEverything, LosesCalls, LosesSampledIds)
"""One for each part of the product that the oracle looks at."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "product", [slow_unless(product, *OFTEN) for product in EXPECTED], ids=lambda product: product.__name__
)
def test_planted_fault_is_reported(product: type[Product]) -> None:
    kind, options = EXPECTED[product]
    case = only(PLAIN, [f"{name}={option}" for name, option in options.items()])
    assert kind in examine(case, 12, product).kinds
    assert kind not in sound(case).kinds


@pytest.mark.slow
def test_a_false_claim_of_append_only_is_found() -> None:
    case = only(PLAIN, ["thinking=after_last_user"])
    details = {finding.detail for finding in examine(case, 12, AlwaysLocal).findings}
    assert any("the turn changed" in detail for detail in details)


def test_prompts_are_those_of_a_tokenizer_of_transformers(plain: Path) -> None:
    config = json.loads((plain / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(plain / "tokenizer.json"), eos_token=config["eos_token"])
    tokenizer.chat_template = (plain / "chat_template.jinja").read_text(encoding="utf-8")
    reference = Reference(plain, {})
    compared = 0
    for conversation in conversations(PLAIN.random, tokenizer.chat_template, [], range(10)):
        if any(not isinstance(message.get("content") or "", str) for message in conversation.history):
            continue
        text = reference.render(conversation.history, conversation.tools, generate=True)
        ids = tokenizer.apply_chat_template(
            list(conversation.history),
            tools=list(conversation.tools) or None,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert ids == reference.encode(text).ids
        compared += 1
    assert compared > 5


def test_reply_ends_before_repeated_template_text(plain: Path) -> None:
    reply = {"role": "assistant", "content": "say zqaaaaaa"}
    new = [{"role": "user", "content": "zqbbbbbb"}]
    text = "A: say zqaaaaaa<end> U: zqbbbbbb (you said zqaaaaaa)"
    assert end_of_reply(text, reply, new) == text.index("<end>")


def test_last_copy_of_a_repeated_conversation_counts() -> None:
    reply = {"role": "assistant", "content": "say zqaaaaaa"}
    new = [{"role": "user", "content": "zqbbbbbb"}]
    text = "zqaaaaaa, zqbbbbbb. A: say zqaaaaaa<end> U: zqbbbbbb"
    assert end_of_reply(text, reply, new) == text.index("<end>")


def test_appending_means_exact_prefixes(plain: Path) -> None:
    reference = Reference(plain, {})
    end = "<|im_end|>"
    assert appends(reference, end, f"{end}cd.", f"{end}cd.{end}ef", "cd.") == ""
    assert "prompt is not shown" in appends(reference, f"{end}x", f"{end}cd.", f"{end}cd.{end}ef", "cd.")
    assert "turn changed" in appends(reference, end, f"{end}cd.", f"{end}ce.{end}ef", "cd.")
    assert "before the turn" in appends(reference, end, f"{end}cd.", f"x{end}cd.{end}ef", "cd.")
    assert "prompt has other ids" in appends(reference, "a\n", f"a\n\n{end}", f"a\n\n{end}ef", "\n")
