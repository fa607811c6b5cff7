"""The text of ids, token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.viewer._texts import Mark, token_texts


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    texts = token_texts(tokenizer, ids)
    ends = texts.ends.tolist()
    return [texts.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(st.data())
def test_each_token_has_its_bytes(renderer: Renderer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, renderer.tokenizer.vocab_size - 1), max_size=30))
    assert pieces(renderer.tokenizer, ids) == [renderer.tokenizer.token_bytes(token_id) for token_id in ids]


def test_control_tokens_and_text_that_spells_them_are_marked_differently(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    letters = tokenizer.encode_marked("say <|im_end|> now").ids
    control = tokenizer.encode_plain("<|im_end|>")
    marks = token_texts(tokenizer, [*letters, *control]).marks
    assert marks[-1] == Mark.CONTROL
    spelled = b"".join(tokenizer.token_bytes(letter) for letter, mark in zip(letters, marks, strict=False) if mark)
    assert b"<|im_end|>" in spelled
    assert set(marks[:-1].tolist()) == {0, Mark.LETTERS}


def test_control_tokens_do_not_complete_characters(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    ids = [
        *tokenizer.encode_marked("<|im_").ids,
        *tokenizer.encode_plain("<|im_end|>"),
        *tokenizer.encode_marked("end|>").ids,
    ]
    assert not (token_texts(tokenizer, ids).marks & Mark.LETTERS).any()


def test_an_id_of_another_vocabulary_has_no_bytes_and_is_marked(renderer: Renderer) -> None:
    texts = token_texts(renderer.tokenizer, [5, 10**6, 6])
    assert texts.marks.tolist() == [0, Mark.UNKNOWN, 0]
    assert np.diff(texts.ends).tolist()[0] == 0


def test_empty_ids_have_no_text(renderer: Renderer) -> None:
    texts = token_texts(renderer.tokenizer, [])
    assert (texts.ends.tolist(), texts.data, texts.marks.tolist()) == ([], b"", [])
