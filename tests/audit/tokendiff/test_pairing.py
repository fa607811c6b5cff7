"""Two sequences of ids side by side: on strings whose boundaries are known, and on any sequence of ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import load_tokenizer
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.audit._tokendiff.retokenizing import pair_ids, retokenized
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(renderer: Renderer) -> Tokenizer:
    return renderer.tokenizer


def split(tokenizer: Tokenizer, *pieces: str) -> np.ndarray:
    """Pieces encoded one by one."""
    return tokenizer.array([token_id for piece in pieces for token_id in tokenizer.encode_plain(piece)])


def ids_of_pieces(tokenizer: Tokenizer, pieces: list[bytes]) -> np.ndarray:
    """The id of each piece, which has to be a token."""
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return tokenizer.array([by_bytes[piece] for piece in pieces])


def check_class(tokenizer: Tokenizer, left_pieces: list[bytes], right_pieces: list[bytes], kind: str) -> None:
    left = ids_of_pieces(tokenizer, [b"x", *left_pieces, b"x"])
    right = ids_of_pieces(tokenizer, [b"x", *right_pieces, b"x"])
    found = pair_ids(left, right, tokenizer)
    assert found.channel == "id drift"
    assert [(change.start, change.end, change.kind) for change in found.changes] == [(1, len(left) - 1, kind)]
    assert found.partner.tolist() == [0, *[-1] * len(left_pieces), len(right) - 1]
    assert found.first == 1


@pytest.mark.parametrize(
    ("left", "right", "kind"),
    [
        ([b"t", b"h"], [b"th"], "word"),
        ([b" the"], [b" ", b"th", b"e"], "whitespace"),
        ([b"\n\n"], [b"\n", b"\n"], "whitespace"),
        ([b'":'], [b'"', b":"], "punctuation"),
        ([bytes([byte]) for byte in b"<|im_end|>"], [b"<|im_end|>"], "control"),
    ],
)
def test_a_change_of_ids_has_the_class_of_its_boundary(
    tokenizer: Tokenizer, left: list[bytes], right: list[bytes], kind: str
) -> None:
    check_class(tokenizer, left, right, kind)


def test_boundaries_within_numbers_and_characters_have_classes_too() -> None:
    check_class(load_tokenizer("llama3"), [b"12", b"3"], [b"123"], "digits")
    check_class(load_tokenizer("llama3"), [b"\xc3", b"\xa9"], ["é".encode()], "bytes")


def test_another_id_of_the_same_bytes_is_a_change() -> None:
    """SentencePiece vocabularies have byte tokens in addition to the letters that they spell."""
    tokenizer = load_tokenizer("mistral_v3_spm")
    letter = tokenizer.encode_after_control("A").ids
    (byte,) = (i for i in range(tokenizer.vocab_size) if [i] != letter and tokenizer.token_bytes(i) == b"A")
    found = pair_ids(tokenizer.array(letter), tokenizer.array([byte]), tokenizer)
    assert (found.channel, [change.kind for change in found.changes]) == ("id drift", ["word"])


def test_different_text_keeps_the_common_prefix_and_suffix(tokenizer: Tokenizer) -> None:
    found = pair_ids(split(tokenizer, "A", " b", " end"), split(tokenizer, "A", " c", " c", " end"), tokenizer)
    assert (found.channel, [change.kind for change in found.changes]) == ("text drift", ["text"])
    assert found.partner.tolist() == [0, -1, 3]


def test_whitespace_changes_are_distinguished_from_text_changes(tokenizer: Tokenizer) -> None:
    found = pair_ids(split(tokenizer, "A", "\n", "b"), split(tokenizer, "A", " ", "b"), tokenizer)
    assert (found.channel, [change.kind for change in found.changes]) == ("text drift", ["spacing"])


def test_truncated_sequence_is_not_drift(tokenizer: Tokenizer) -> None:
    ids = split(tokenizer, "one two three")
    found = pair_ids(ids, ids[:2], tokenizer)
    assert found.channel == "numeric"
    assert found.partner.tolist() == [0, 1] + [-1] * (len(ids) - 2)


@given(st.lists(st.integers(0, 3999), max_size=30))
def test_after_retokenizing_each_partner_is_the_same_id_over_the_same_bytes(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    recorded = tokenizer.array(ids)
    again = retokenized(tokenizer, recorded)
    found = pair_ids(recorded, again, tokenizer)

    def placed(sequence: np.ndarray) -> list[tuple[int, int]]:
        at, places = 0, []
        for token_id in sequence.tolist():
            places.append((at, token_id))
            at += len(tokenizer.token_bytes(token_id))
        return places

    left, right = placed(recorded), placed(again)
    if found.channel == "id drift":
        expected = {place: n for n, place in enumerate(right)}
        assert found.partner.tolist() == [expected.get(place, -1) for place in left]
        assert {change.kind for change in found.changes} <= {artifact.kind for artifact in ARTIFACTS.values()}
        covered = [n for change in found.changes for n in range(change.start, change.end)]
        assert covered == np.flatnonzero(found.partner < 0).tolist()
