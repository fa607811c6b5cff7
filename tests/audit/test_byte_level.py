"""Probabilities of bytes against sums over every token sequence, on models small enough to write them all down."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape.audit._byte_level import Bounds, Spellings, TransformersModel, bytes_logprob, canonical_only, price
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest

PIECES: Mapping[int, bytes] = {0: b"a", 1: b"b", 2: b"ab", 3: b"ba", 4: b"aba", 5: b"bb", 6: b"ab"}
"""Two ids spell `ab`."""
STOP, NOTHING = 7, 8
SPELLINGS = Spellings(PIECES)
TEXTS = st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=7).map(b"".join)


class Drawn:
    """A different distribution after every prefix, drawn from a hash of it."""

    def __init__(self, ids: int = 9) -> None:
        self._ids = ids

    def next_logprobs(self, prefixes: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        rows = []
        for prefix in prefixes:
            seed = hashlib.sha256(bytes(prefix)).digest()
            weights = np.random.default_rng(list(seed)).exponential(size=self._ids)
            rows.append(np.log(weights / weights.sum()))
        return np.array(rows)

    def logprobs_of(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        rows = self.next_logprobs([ids[:at] for at in range(len(ids))])
        return rows[np.arange(len(ids)), list(ids)]


MODEL = Drawn()


def spelled(ids: Sequence[int]) -> bytes:
    return b"".join(PIECES[token_id] for token_id in ids)


def every_sequence(most: int) -> list[tuple[int, ...]]:
    return [ids for length in range(1, most + 1) for ids in itertools.product(PIECES, repeat=length)]


SEQUENCES = every_sequence(5)


def probability(sequences: Sequence[Sequence[int]]) -> float:
    return sum(math.exp(MODEL.logprobs_of(ids).sum()) for ids in sequences)


def covers(text: bytes) -> list[tuple[int, ...]]:
    return [ids for ids in SEQUENCES if spelled(ids).startswith(text) and len(spelled(ids[:-1])) < len(text)]


@pytest.mark.parametrize("text", [b"a", b"b", b"ab", b"aba", b"abab", b"babba"])
def test_prefix_probability_is_the_sum_over_cover_encodings(text: bytes) -> None:
    found = bytes_logprob(MODEL, text, SPELLINGS)
    assert found.exact
    assert found.lower == found.upper
    assert found.spellings == len(covers(text))
    assert math.exp(found.lower) == pytest.approx(probability(covers(text)), rel=1e-12)


@pytest.mark.parametrize("text", [b"a", b"b", b"ab", b"aba", b"abab", b"babba"])
def test_text_probability_is_the_sum_over_its_spellings(text: bytes) -> None:
    found = bytes_logprob(MODEL, text, SPELLINGS, stop_ids=[STOP])
    exact = [(*ids, STOP) for ids in SEQUENCES if spelled(ids) == text]
    assert found.exact
    assert found.spellings == len(exact)
    assert math.exp(found.lower) == pytest.approx(probability(exact), rel=1e-12)


@given(TEXTS)
def test_prefix_probability_is_that_of_continuing_or_stopping(text: bytes) -> None:
    """P(x…) is P(xa…) + P(xb…) + P(x and then a token that is not text), at every length."""
    whole = bytes_logprob(MODEL, text, SPELLINGS).lower
    longer = [bytes_logprob(MODEL, text + byte, SPELLINGS).lower for byte in (b"a", b"b")]
    ended = bytes_logprob(MODEL, text, SPELLINGS, stop_ids=[STOP, NOTHING]).lower
    assert np.logaddexp.reduce([*longer, ended]) == pytest.approx(whole, abs=1e-9)


@given(TEXTS, st.integers(1, 12), st.booleans())
def test_limited_search_bounds_the_sum_on_both_sides(text: bytes, most: int, ends: bool) -> None:
    stop_ids = [STOP] if ends else []
    exact = bytes_logprob(MODEL, text, SPELLINGS, stop_ids=stop_ids)
    cut = bytes_logprob(MODEL, text, SPELLINGS, stop_ids=stop_ids, max_evaluations=most)
    assert cut.evaluations <= most
    assert cut.lower <= exact.lower + 1e-12
    assert cut.upper >= exact.lower - 1e-12
    assert cut.exact == (cut.evaluations == exact.evaluations)


@given(TEXTS)
def test_a_tolerance_ends_the_search_with_bounds_as_close(text: bytes) -> None:
    found = bytes_logprob(MODEL, text, SPELLINGS, tolerance=0.5)
    assert found.upper - found.lower <= 0.5
    assert found.evaluations <= bytes_logprob(MODEL, text, SPELLINGS).evaluations


@given(TEXTS)
def test_only_allowed_spellings_count(text: bytes) -> None:
    def short(ids: Sequence[int]) -> bool:
        return all(len(PIECES[token_id]) == 1 for token_id in ids)

    found = bytes_logprob(MODEL, text, SPELLINGS, stop_ids=[STOP], allowed=short)
    assert found.spellings == 1
    ids = [b"ab".index(byte) for byte in text]
    assert found.lower == pytest.approx(MODEL.logprobs_of([*ids, STOP]).sum())


def test_bytes_that_no_token_spells_have_no_probability() -> None:
    found = bytes_logprob(MODEL, b"ax", SPELLINGS)
    assert found == Bounds(-math.inf, -math.inf, True, 0, 2)


def test_no_bytes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected at least one byte"):
        bytes_logprob(MODEL, b"", SPELLINGS)


@pytest.fixture(scope="module")
def tiny(model_dir: Path, renderer: Renderer) -> TransformersModel:
    return TransformersModel.load(model_dir, renderer.tokenizer.encode_plain("What do pears cost?"))


@pytest.fixture(scope="module")
def tokenizer(renderer: Renderer) -> Tokenizer:
    return renderer.tokenizer


def test_a_real_model_sums_over_the_spellings_of_a_short_text(tiny: TransformersModel, tokenizer: Tokenizer) -> None:
    spellings = Spellings.of(tokenizer)
    text = b" one"
    found = bytes_logprob(tiny, text, spellings, stop_ids=tokenizer.eos_ids, tolerance=0)

    def all_spellings(rest: bytes) -> list[tuple[int, ...]]:
        if not rest:
            return [()]
        return [
            (token_id, *more) for token_id, length in spellings.within(rest) for more in all_spellings(rest[length:])
        ]

    sums = [tiny.logprobs_of([*ids, stop]).sum() for ids in all_spellings(text) for stop in tokenizer.eos_ids]
    assert found.exact
    assert found.lower == pytest.approx(np.logaddexp.reduce(sums), abs=1e-4)


def test_prefixes_in_a_batch_give_what_each_gives_alone(tiny: TransformersModel, tokenizer: Tokenizer) -> None:
    prefixes = [[], *([*tokenizer.encode_plain(text)] for text in (" a", " b", " one two", " x y z"))]
    together = tiny.next_logprobs(prefixes)
    for prefix, row in zip(prefixes, together, strict=True):
        assert np.abs(row - tiny.next_logprobs([prefix])[0]).max() < 1e-4
        assert np.exp(row).sum() == pytest.approx(1)
    ids = [*prefixes[3], 5]
    along = [tiny.next_logprobs([ids[:at]])[0][token_id] for at, token_id in enumerate(ids)]
    assert tiny.logprobs_of(ids) == pytest.approx(along, abs=1e-4)


def test_drift_is_priced(tiny: TransformersModel, tokenizer: Tokenizer) -> None:
    spellings = Spellings.of(tokenizer)
    canonical = tokenizer.encode_plain(" the pears")
    (stop, *_) = sorted(tokenizer.eos_ids)
    cut = [token_id for char in " the pears" for token_id in tokenizer.encode_plain(char)]
    assert cut != canonical
    kept = price(tiny, [*canonical, stop], tokenizer, spellings, stop_ids=tokenizer.eos_ids, max_evaluations=64)
    drifted = price(tiny, [*cut, stop], tokenizer, spellings, stop_ids=tokenizer.eos_ids, max_evaluations=64)
    assert kept.drift == 0
    assert drifted.drift is not None
    assert drifted.drift == pytest.approx(kept.sampled - drifted.sampled)
    assert drifted.canonical == kept.canonical
    assert max(kept.sampled, drifted.sampled) <= kept.text.upper
    assert kept.text == drifted.text


def test_canonical_spellings_are_few_and_no_more_probable_than_all(
    tiny: TransformersModel, tokenizer: Tokenizer
) -> None:
    spellings = Spellings.of(tokenizer)
    text = b" the pears cost 12"
    every = bytes_logprob(tiny, text, spellings, max_evaluations=100)
    few = bytes_logprob(tiny, text, spellings, allowed=canonical_only(tokenizer), tolerance=0)
    assert few.exact
    assert few.lower <= every.upper
    ids = tokenizer.encode_plain(text.decode())
    assert few.lower >= tiny.logprobs_of(ids).sum() - 1e-4


def test_control_tokens_have_no_price(tiny: TransformersModel, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="control token"):
        price(tiny, [tokenizer.controls[0].id, 70], tokenizer, Spellings.of(tokenizer))


def test_an_empty_context_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="context is empty"):
        TransformersModel(None, [])
