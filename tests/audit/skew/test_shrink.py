"""Shrinking keeps what fails and leaves out what is not needed for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokentape.audit._skew.backends import SkewChat
from tokentape.audit._skew.probing import smallest, smallest_conversation, smallest_text


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sets(st.integers(0, 9), min_size=1, max_size=3))
def test_the_smallest_part_fails_and_no_element_of_it_can_be_left_out(parts: list[int], culprits: set[int]) -> None:
    def fails(some: object) -> bool:
        return culprits <= set(some)  # type: ignore[call-overload]

    if not fails(parts):
        return
    found = list(smallest(parts, fails))
    assert fails(found)
    assert not any(fails(found[:at] + found[at + 1 :]) for at in range(len(found)))


def test_a_long_text_is_shrunk_with_few_questions() -> None:
    asked = 0

    def differs(text: str) -> bool:
        nonlocal asked
        asked += 1
        return "e\u0301" in text

    assert smallest_text("line of text\n" * 2000 + "cafe\u0301 here\n" + "more\n" * 2000, differs) == "e\u0301"
    assert asked < 120


def test_a_conversation_loses_what_is_not_needed() -> None:
    conversation = SkewChat(
        (
            {"role": "system", "content": "You help."},
            {"role": "user", "content": "What is <x> & <y>?"},
            {"role": "assistant", "content": "It is.", "reasoning_content": "Hm."},
            {"role": "user", "content": "And?"},
        ),
        ({"type": "function", "function": {"name": "f"}},),
    )
    found = smallest_conversation(conversation, lambda one: "&" in str(one.messages))
    assert found == SkewChat(({"role": "user", "content": "&"},), (), generate=False)


def test_a_tool_is_shrunk_to_what_shows_it() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "it's", "parameters": {"a": [1, 2, "é"]}}}
    found = smallest_conversation(
        SkewChat(({"role": "user", "content": "hi"},), (tool, {"type": "other"})), lambda one: "é" in str(one.tools)
    )
    assert found.tools == ({"type": "function", "function": {"name": "f", "parameters": {"a": ["é"]}}},)
