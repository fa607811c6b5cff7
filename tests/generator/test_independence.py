"""What follows a reply is called independent of the history only if no history changes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generator.compose import compose
from tests.generator.conversations import Conversation, conversations
from tests.generator.independence import answered, dependence, histories_with
from tests.generator.options import draw, only
from tests.generator.oracle import Reference
from tests.generator.vocabularies import write_model


def of_case(folder: Path, *causes: str) -> tuple[Reference, list[Conversation], str]:
    """A case's template as transformers renders it, conversations continued by a user message, and its word."""
    case = only(draw(1, 0), list(causes))
    template = compose(case)
    made = conversations(case.random, template.source, [], range(40))
    with_content = [
        conversation
        for conversation in made
        if not conversation.reply.get("tool_calls") and [m["role"] for m in conversation.new] == ["user"]
    ]
    return Reference(write_model(case, template, folder), {}), with_content, case.word


def test_tail_of_a_plain_template_is_independent_of_the_history(tmp_path: Path) -> None:
    reference, conversations, _ = of_case(tmp_path)
    assert dependence(reference, conversations, [conversation.history for conversation in conversations]) == ""


@pytest.mark.parametrize("cause", ["numbering=messages", "count=prompt_when_long", "tools=last_user"])
def test_a_template_that_counts_or_repeats_depends_on_the_history(cause: str, tmp_path: Path) -> None:
    reference, conversations, _ = of_case(tmp_path, cause)
    assert dependence(reference, conversations, [conversation.history for conversation in conversations])


def test_missing_constant_is_tried_in_every_role(tmp_path: Path) -> None:
    reference, conversations, word = of_case(tmp_path, "switch=system", "thinking=kept")
    silent = [conversation for conversation in conversations if word not in str(conversation)]
    histories = [conversation.history for conversation in silent]
    assert dependence(reference, silent, histories) == ""
    assert "another tail" in str(dependence(reference, silent, [*histories, *histories_with([word])]))


def test_a_few_renderings_prove_nothing(tmp_path: Path) -> None:
    reference, conversations, _ = of_case(tmp_path)
    assert dependence(reference, conversations[:1], []) is None


def test_a_call_without_its_result_is_not_answered(tmp_path: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    result, user = {"role": "tool", "tool_call_id": "a", "content": ""}, {"role": "user", "content": ""}
    for new, expected in (((result, result), True), ((result, result, user), True), ((result, user), False)):
        assert answered(Conversation(0, (), (), calling, new, (), "")) is expected
