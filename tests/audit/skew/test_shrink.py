"""Shrinking keeps the failing part and removes the rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokentape.audit._skew.backends import SkewChat
from tokentape.audit._skew.probing import smallest, smallest_conversation, smallest_text


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sets(st.integers(0, 9), min_size=1, max_size=3))
def test_smallest_part_fails_and_needs_all_its_elements(parts: list[int], culprits: set[int]) -> None:
    def fails(some: object) -> bool:
        return culprits <= set(some)  # type: ignore[call-overload]

    if not fails(parts):
        return
    found = list(smallest(parts, fails))
    assert fails(found)
    assert not any(fails(found[:at] + found[at + 1 :]) for at in range(len(found)))


def test_long_text_is_shrunk_with_few_checks() -> None:
    questions = 0

    def differs(text: str) -> bool:
        nonlocal questions
        questions += 1
        return "e\u0301" in text

    assert smallest_text("line of text\n" * 2000 + "cafe\u0301 here\n" + "more\n" * 2000, differs) == "e\u0301"
    assert questions < 120


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
    found = smallest_conversation(conversation, lambda chat: "&" in str(chat.messages))
    assert found == SkewChat(({"role": "user", "content": "&"},), (), generate=False)


def test_a_tool_is_shrunk_to_what_shows_it() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "it's", "parameters": {"a": [1, 2, "é"]}}}
    found = smallest_conversation(
        SkewChat(({"role": "user", "content": "hi"},), (tool, {"type": "other"})), lambda chat: "é" in str(chat.tools)
    )
    assert found.tools == ({"type": "function", "function": {"name": "f", "parameters": {"a": ["é"]}}},)
