"""Sections of long texts: the ids are those of the whole text, and a section is encoded once."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.conftest import KINDS, REAL_FAMILIES, load_tokenizer, slow_unless
from tests.chat.test_added_tokens import spec_with, tokenizer_of
from tests.searching import examples
from tokentape.chat import _sections, _tokenizer
from tokentape.chat._last_used import LastUsed
from tokentape.chat._tokenizer import Encoded, Tokenizer


def whole(tokenizer: Tokenizer, marked: str) -> Encoded:
    """Return the twin's ids of a text in a single call."""
    twin = tokenizer._twin(tokenizer._free_block(marked))
    text = twin.named(marked)
    encoding = twin.encoder.encode(text, add_special_tokens=False)
    return Encoded(tokenizer.array(encoding.ids), np.array(encoding.offsets, np.int64).reshape(-1, 2), text)


def assert_like_whole(tokenizer: Tokenizer, marked: str) -> None:
    expected, actual = whole(tokenizer, marked), tokenizer.encode_marked(marked)
    assert (actual.ids, actual.text) == (expected.ids, expected.text)
    assert actual.spans.tolist() == expected.spans.tolist()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also cuts texts of three characters."""
    monkeypatch.setattr(_sections, "LONG", 3)
    monkeypatch.setattr(_tokenizer, "LONG", 3)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("family", [*KINDS, *map(slow_unless, REAL_FAMILIES)])
def test_text_in_sections_has_the_ids_of_the_whole(family: str) -> None:
    tokenizer = load_tokenizer(family)
    marks = [control.mark for control in tokenizer.controls[:12]]
    pieces = st.one_of(st.sampled_from(marks), st.text("ab \n\t\u2581e\u0301<b>9", max_size=8), st.text(max_size=3))

    @settings(max_examples=examples(300))
    @given(st.lists(pieces, max_size=12).map("".join))
    def check(marked: str) -> None:
        assert_like_whole(tokenizer, marked)

    check()


@pytest.mark.parametrize("method", ["encode_marked", "encode_plain"])
def test_other_threads_run_while_a_long_text_is_encoded(method: str) -> None:
    encode = getattr(load_tokenizer("qwen3"), method)
    wakes = [time.perf_counter()]
    ended = threading.Event()

    def wake() -> None:
        while not ended.wait(0.001):
            wakes.append(time.perf_counter())

    thread = threading.Thread(target=wake)
    thread.start()
    began = time.perf_counter()
    encode("a" * 1_000_000)
    seconds = time.perf_counter() - began
    ended.set()
    thread.join()
    assert max(np.diff([*wakes, time.perf_counter()])) < seconds / 2


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_a_text_is_not_cut_at_a_token_that_takes_white_space(flag: str) -> None:
    tokenizer = tokenizer_of(spec_with({"content": "<|box|>", flag: True}))
    assert_like_whole(tokenizer, tokenizer.mark_controls("one two  <|box|>  three four  <|im_end|> five"))


def test_a_section_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(spec_with())
    encoded: list[int] = []
    encode = _sections.Sections._encoded

    def counted(self: Any, texts: list[str]) -> Any:
        encoded.extend(map(len, texts))
        return encode(self, texts)

    monkeypatch.setattr(_sections.Sections, "_encoded", counted)
    system, questions = "You are careful. " * 500, ("one?", "two, then?")
    for question in questions:
        assert_like_whole(
            tokenizer, tokenizer.mark_controls(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}")
        )
    assert sum(encoded) < 1.1 * len(system)


def test_least_recently_used_values_are_evicted_first() -> None:
    kept: LastUsed[str, str] = LastUsed(6, len)
    for key in ("abc", "def"):
        kept.put(key, key)
    assert kept.get("abc") == "abc"
    kept.put("ghi", "ghi")
    assert (kept.get("abc"), kept.get("def"), kept.get("ghi")) == ("abc", None, "ghi")


def test_a_value_that_is_too_large_is_returned_and_not_kept() -> None:
    kept: LastUsed[str, str] = LastUsed(2, len)
    kept.put("b", "is")
    assert kept.put("a", "large") == "large"
    assert (kept.get("a"), kept.get("b")) == (None, "is")


def test_the_value_used_last_is_at_the_end() -> None:
    kept: LastUsed[str, str] = LastUsed(9, len)
    for key in "abc":
        kept.put(key, key)
    kept.get("a")
    assert kept.values() == ["b", "c", "a"]
