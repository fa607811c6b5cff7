"""Alignments, against a reference that looks at every byte, and of real tokenizers pairwise."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import FAMILIES, REAL_FAMILIES, load_tokenizer
from tokentape.errors import InvalidRequest
from tokentape.training._align import Alignment, NamedPair, Piece, align, pieces

TEXTS = [
    "Hello, world! Unbelievable 1234567890\n\n\tindent  two  spaces ",
    "def f(x):\n    return x != y  # ünïcödé\n",
    "Привет, как дела? 你好，世界！ こんにちは 🫠👩‍👩‍👧‍👦 नमस्ते",
    "   leading and trailing   ",
    "x",
    "",
]


def reference(left: list[Piece], right: list[Piece]) -> tuple[list[int], list[int], list[int]]:
    """Compute spans by comparing each boundary with each other: quadratic and obvious."""

    def ends(side: list[Piece]) -> list[int]:
        at, boundary = 0, []
        for piece in side:
            at += len(piece) if isinstance(piece, bytes) else 0
            boundary.append(at)
        return boundary

    def boundaries(side: list[Piece]) -> set[int]:
        return {end for piece, end in zip(side, ends(side), strict=True) if isinstance(piece, bytes)}

    common = sorted((boundaries(left) & boundaries(right)) - {0})

    def index(side: list[Piece]) -> list[int]:
        boundaries = []
        for piece, end in zip(side, ends(side), strict=True):
            if isinstance(piece, str) or not common:
                boundaries.append(-1)
                continue
            start = end - len(piece)
            later = [n for n, boundary in enumerate(common) if boundary > start]
            boundaries.append(later[0] if later else len(common) - 1)
        return boundaries

    return index(left), index(right), common


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[Piece], list[Piece]]:
    """Two cuts of the same bytes, special and empty tokens among them."""
    text = draw(st.binary(max_size=24))

    def side() -> list[Piece]:
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
        bounds = [0, *cuts, len(text)]
        pieces: list[Piece] = [text[a:b] for a, b in pairwise(bounds)]
        for name in draw(st.lists(st.sampled_from(["", "eos", "bos"]), max_size=3)):
            pieces.insert(draw(st.integers(0, len(pieces))), name)
        return pieces

    return side(), side()


@given(sides())
def test_spans_match_the_slow_reference(both: tuple[list[Piece], list[Piece]]) -> None:
    left, right = both
    alignment = align(left, right)
    assert (alignment.left.tolist(), alignment.right.tolist(), alignment.ends.tolist()) == reference(left, right)


@given(sides())
def test_each_span_spells_the_same_bytes_on_both_sides(both: tuple[list[Piece], list[Piece]]) -> None:
    left, right = both
    alignment = align(left, right)
    start = 0
    text = b"".join(piece for piece in left if isinstance(piece, bytes))
    for n, end in enumerate(alignment.ends.tolist()):
        for side, index in ((left, alignment.left), (right, alignment.right)):
            spelled = [side[at] for at in np.flatnonzero(index == n)]
            assert b"".join(piece for piece in spelled if isinstance(piece, bytes)) == text[start:end]
        start = end
    assert start == len(text)


@given(sides(), st.data())
def test_span_sums_cover_all_but_special_tokens(both: tuple[list[Piece], list[Piece]], data: st.DataObject) -> None:
    left, right = both
    alignment = align(left, right)
    values = data.draw(st.lists(st.integers(-1000, 0), min_size=len(left), max_size=len(left)))
    if len(alignment.ends):
        kept = sum(value for value, piece in zip(values, left, strict=True) if isinstance(piece, bytes))
        assert alignment.left_sums(values).sum() == kept


@given(sides())
def test_paired_tokens_have_equal_names_and_offsets(both: tuple[list[Piece], list[Piece]]) -> None:
    def place(side: list[Piece], at: int) -> int:
        return sum(len(piece) for piece in side[:at] if isinstance(piece, bytes))

    left, right = both
    pairs = align(left, right).pairs
    assert all(left[pair.left] == right[pair.right] == pair.name != "" for pair in pairs)
    assert all(place(left, pair.left) == place(right, pair.right) for pair in pairs)
    assert len({pair.left for pair in pairs}) == len({pair.right for pair in pairs}) == len(pairs)


def test_special_tokens_are_paired_by_name_and_outside_spans() -> None:
    alignment = align(["bos", b"a", "eos", ""], [b"a", "eos"])
    assert (alignment.left.tolist(), alignment.right.tolist()) == ([-1, 0, -1, -1], [0, -1])
    assert alignment.pairs == (NamedPair("eos", 2, 1),)


def test_a_special_token_within_a_span_interrupts_it() -> None:
    alignment = align([b"He", "", b"llo", b"!"], [b"Hello", b"!"])
    assert alignment.interrupted.tolist() == [True, False]
    assert alignment.chunk_mask().tolist() == [False, True]


def test_chunk_mask_selects_short_fully_trained_spans() -> None:
    alignment = align([b"a", b"b", b"c", b"d", b"e"], [b"ab", b"c", b"de"])
    assert alignment.chunk_mask([1, 0, 1, 1, 1]).tolist() == [False, True, True]
    assert alignment.chunk_mask(right_mask=[1, 0, 1]).tolist() == [True, False, True]
    assert alignment.chunk_mask(max_tokens=1).tolist() == [False, True, False]


def test_different_bytes_are_refused_with_their_offset() -> None:
    with pytest.raises(InvalidRequest, match="from byte 2 on"):
        align([b"abc"], [b"ab", b"d"])
    with pytest.raises(InvalidRequest, match="byte 3 on"):
        align([b"abc"], [b"abcd"])


def test_values_of_wrong_length_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="one value per token"):
        align([b"ab"], [b"a", b"b"]).left_sums([1.0, 2.0])


def aligned(left: str, right: str, text: str) -> Alignment:
    sides = []
    for family in (left, right):
        tokenizer = load_tokenizer(family)
        sides.append(pieces(tokenizer, tokenizer.encode_marked(text).ids))
        assert b"".join(p for p in sides[-1] if isinstance(p, bytes)) == text.encode()
    return align(*sides)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        *combinations(FAMILIES, 2),
        *(pytest.param(*two, marks=pytest.mark.slow) for two in combinations(REAL_FAMILIES, 2)),
    ],
)
def test_tokenizers_of_every_kind_align_over_all_bytes(left: str, right: str) -> None:
    for text in TEXTS:
        alignment = aligned(left, right, text)
        assert (alignment.ends[-1] if len(alignment.ends) else 0) == len(text.encode())
        assert (alignment.left >= 0).all()
        assert (alignment.right >= 0).all()


def test_character_split_differently_on_both_sides_is_a_single_span() -> None:
    assert align([b"\xf0", b"\x9f\xab\xa0"], [b"\xf0\x9f", b"\xab\xa0"]).ends.tolist() == [4]


def test_leading_space_of_the_text_is_kept_on_request() -> None:
    tokenizer = load_tokenizer("mistral_v3_spm")
    ids = tokenizer.encode_marked(" x").ids
    assert ids == tokenizer.encode_marked("x").ids
    assert pieces(tokenizer, ids) == [b"x"]
    assert pieces(tokenizer, ids, keep_space=True) == [b" x"]


def test_partial_characters_align() -> None:
    left = load_tokenizer("qwen3")
    alignment = align(pieces(left, left.encode_plain("\U0001fae0")[:-1]), [b"\xf0", b"\x9f\xab"])
    assert alignment.ends.tolist() == [3]


def test_control_tokens_get_the_passed_names() -> None:
    qwen, llama = load_tokenizer("qwen3"), load_tokenizer("llama3")
    left = pieces(qwen, qwen.encode_plain("Hi<|im_end|>"), {qwen.encode_plain("<|im_end|>")[0]: "end of turn"})
    right = pieces(llama, llama.encode_plain("Hi<|eot_id|>"), {llama.encode_plain("<|eot_id|>")[0]: "end of turn"})
    assert align(left, right).pairs == (NamedPair("end of turn", 1, 1),)
