"""Marked text from arriving ids: any chunking gives the same as single ids."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import KINDS, REAL_FAMILIES, load_tokenizer, slow_unless
from tokentape.chat._reader import Reader
from tokentape.chat._tokenizer import Tokenizer

TEXT = st.text(st.sampled_from("abc def\n\u00e9\u4e2d\U0001f642"), max_size=12)


def slowly(tokenizer: Tokenizer, ids: Sequence[int], stop_ids: frozenset[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text, and the tokens that wrote each of its characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, written_by = "", []
    for n, token_id in enumerate(ids):
        control = tokenizer.control_by_id(token_id)
        if token_id in stop_ids:
            arrived = decoder.decode(b"", final=True)
        elif control is not None:
            arrived = decoder.decode(b"", final=True) + control.mark
        else:
            arrived = decoder.decode(tokenizer.token_bytes(token_id))
        text += arrived
        written_by += [n] * len(arrived)
        if token_id in stop_ids:
            break
    else:
        text += decoder.decode(b"", final=True)
    return text, [(n, n + 1) for n in written_by]


@pytest.mark.parametrize("family", [*KINDS, *map(slow_unless, REAL_FAMILIES)])
@given(texts=st.lists(TEXT, max_size=4), data=st.data())
def test_arrivals_of_any_size_read_like_single_tokens(family: str, texts: list[str], data: st.DataObject) -> None:
    tokenizer = load_tokenizer(family)
    controls = [control.id for control in tokenizer.controls[:4]]
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.encode_plain(text), data.draw(st.sampled_from(controls))]
    # Also partial characters: sampled tokens need not be valid text.
    ids = [token_id for token_id in ids if data.draw(st.integers(0, 9))]
    stop_ids = frozenset(data.draw(st.sets(st.sampled_from([*controls, *ids]), max_size=1)))
    reader = Reader(tokenizer, stop_ids, ())
    at = 0
    while at < len(ids):
        size = data.draw(st.integers(1, len(ids)))
        reader.feed(ids[at : at + size])
        at += size
    assert len(reader._ends) == len(ids)
    reader.finish()
    text, written_by = slowly(tokenizer, ids, stop_ids)
    assert reader.text == text
    assert reader.ended == bool(stop_ids.intersection(ids))
    for n, tokens in enumerate(written_by):
        first, end = reader.tokens(n, n + 1)
        assert first <= tokens[0] < end


def test_nothing_after_a_stop_string_is_returned_for_any_chunking() -> None:
    tokenizer = load_tokenizer("qwen3")
    ids = tokenizer.encode_plain("one two STOP three")
    for size in (1, 2, len(ids)):
        reader = Reader(tokenizer, frozenset(), ("STOP",))
        for at in range(0, len(ids), size):
            reader.feed(ids[at : at + size])
        reader.finish()
        assert (reader.text, reader.stopped, reader.ended) == ("one two ", True, False)


def test_partial_character_is_returned_with_the_following_text() -> None:
    tokenizer = load_tokenizer("qwen3")
    half = tokenizer.encode_plain("\U00012345")[:-1]
    control = tokenizer.controls[0]
    assert half
    for following, expected in (([*tokenizer.encode_plain("a")], "\ufffda"), ([control.id], f"\ufffd{control.mark}")):
        reader = Reader(tokenizer, frozenset(), ())
        for token_id in [*half, *following, *tokenizer.encode_plain("b")]:
            reader.feed([token_id])
        assert reader.text == f"{expected}b"
