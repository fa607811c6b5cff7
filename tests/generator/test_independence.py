"""What follows a reply is called independent of the history only if no history changes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generator.compose import compose
from tests.generator.conversations import Conversation, conversations
from tests.generator.independence import answered, dependence, histories_saying
from tests.generator.options import draw, only
from tests.generator.oracle import Reference
from tests.generator.vocabularies import write_model


def of_case(folder: Path, *causes: str) -> tuple[Reference, list[Conversation], str]:
    """A case's template as transformers renders it, conversations that a user's message goes on with, and its word."""
    case = only(draw(1, 0), list(causes))
    template = compose(case)
    made = conversations(case.random, template.source, [], range(40))
    spoken = [one for one in made if not one.reply.get("tool_calls") and [m["role"] for m in one.new] == ["user"]]
    return Reference(write_model(case, template, folder), {}), spoken, case.word


def test_nothing_before_the_reply_changes_what_a_plain_template_writes_after_it(tmp_path: Path) -> None:
    reference, spoken, _ = of_case(tmp_path)
    assert dependence(reference, spoken, [one.history for one in spoken]) == ""


@pytest.mark.parametrize("cause", ["numbering=messages", "count=prompt_when_long", "tools=last_user"])
def test_a_template_that_counts_or_repeats_depends_on_the_history(cause: str, tmp_path: Path) -> None:
    reference, spoken, _ = of_case(tmp_path, cause)
    assert dependence(reference, spoken, [one.history for one in spoken])


def test_a_word_that_no_conversation_says_is_said_by_everybody_in_turn(tmp_path: Path) -> None:
    reference, spoken, word = of_case(tmp_path, "switch=system", "thinking=kept")
    silent = [one for one in spoken if word not in str(one)]
    histories = [one.history for one in silent]
    assert dependence(reference, silent, histories) == ""
    assert "another tail" in str(dependence(reference, silent, [*histories, *histories_saying([word])]))


def test_a_few_renderings_prove_nothing(tmp_path: Path) -> None:
    reference, spoken, _ = of_case(tmp_path)
    assert dependence(reference, spoken[:1], []) is None


def test_a_call_without_its_result_is_not_answered(tmp_path: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    result, user = {"role": "tool", "tool_call_id": "a", "content": ""}, {"role": "user", "content": ""}
    for new, expected in (((result, result), True), ((result, result, user), True), ((result, user), False)):
        assert answered(Conversation(0, (), (), calling, new, (), "")) is expected
