from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape._session.matching import history_keys, message_key

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def calling(arguments: Any, **message: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **message}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"role": "assistant", "content": "x", "reasoning_content": "hm"}, {"role": "assistant", "content": "x"}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None}, {"role": "assistant"}),
        ({"role": "user", "content": [{"text": "a"}, {"text": "b"}]}, {"role": "user", "content": "ab"}),
        ({"role": "assistant", "content": "\n\nx \n"}, {"role": "assistant", "content": "x"}),
        (calling('{"a": 1, "b": 2}'), calling('{"b":2,"a":1}')),
        (calling('{"a": 1}'), calling({"a": 1})),
        (calling('{"a": 1.0}'), calling('{"a": 1}')),
        (calling('{"a": NaN}'), calling('{"a":NaN}')),
        (calling("[" * 20000), calling("[" * 20000)),
        (calling("{}", refusal=None, annotations=[]), calling("{}")),
    ],
)  # fmt: skip
def test_equal_messages_have_the_same_key(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert message_key(left) == message_key(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "bob"}),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "tool", "content": "a", "tool_call_id": "2"}),
        (calling('{"a": 1}'), calling('{"a": 2}')),
        (calling('{"a": 1}'), calling('{"a": true}')),
        (calling('{"a": NaN}'), calling('{"a": null}')),
        (calling('{"a": Infinity}'), calling('{"a": -Infinity}')),
        (calling('{"a": 1e999}'), calling('{"a": null}')),
        (calling('{"a": 1'), calling('{"a":1')),
        (calling("{}"), {"role": "assistant", "content": None}),
        ({"role": "user", "content": "\u00e9"}, {"role": "user", "content": "e\u0301"}),
    ],
)
def test_different_messages_have_different_keys(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert message_key(left) != message_key(right)


@given(arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_re_serialised_arguments_are_the_same(arguments: dict[str, Any]) -> None:
    spaced = json.dumps(arguments, indent=1, ensure_ascii=False)
    compact = json.dumps(arguments, separators=(",", ":"), sort_keys=True)
    assert message_key(calling(spaced)) == message_key(calling(compact)) == message_key(calling(arguments))


def test_no_text_as_arguments_is_an_empty_object() -> None:
    assert message_key(calling("")) == message_key(calling("{}")) != message_key(calling('""'))


def test_history_key_extends_that_of_a_prefix() -> None:
    messages = [{"role": "user", "content": str(n)} for n in range(4)]
    whole = history_keys("setup", messages)
    assert history_keys("setup", messages[2:], start=whole[1]) == whole[2:]
    assert history_keys("other", messages) != whole


def test_images_are_distinguished_by_bytes_and_position() -> None:
    def seen(*content: str) -> bytes:
        parts = [
            {"type": "image", "sha256": part[1:], "tokens": len(part), "settings": part}
            if part.startswith("#")
            else {"type": "text", "text": part}
            for part in content
        ]
        return message_key({"role": "user", "content": parts})

    assert seen("a", "b", "#1") == seen("ab", "#1")
    keys = [seen("a"), seen("a", "#1"), seen("a", "#2"), seen("#1", "a"), seen("a", "#1", "#1")]
    assert len(set(keys)) == len(keys)
    measured_again = {"type": "image", "sha256": "1", "tokens": 99, "settings": "other"}
    assert message_key({"role": "user", "content": [measured_again]}) == seen("#1")
