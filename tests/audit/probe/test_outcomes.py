"""What is read off a completion's ids, on a real tokenizer; the examples of classes are those that the paper names."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import load_tokenizer
from tokentape.audit._byte_level import Spellings
from tokentape.audit._probe.trials import Trial, outcome, read_texts
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("qwen3")


def trial(before: str, target: str, after: str) -> Trial:
    return Trial("t", before, target, after, "another word", 0)


RIGHTS = trial("The new law protects the ", "rights", " of people who work at night.")


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Ids of texts that are tokenized each by itself."""
    return [token_id for piece in pieces for token_id in tokenizer.encode_plain(piece)]


def test_another_word_is_a_replacement(tokenizer: Tokenizer) -> None:
    found = outcome(RIGHTS, ids_of(tokenizer, "The new law protects the lives of people who work at night."), tokenizer)
    assert (found.kind, found.artifact, found.canonical) == ("replaced", None, True)


def test_same_ids_are_not_an_edit(tokenizer: Tokenizer) -> None:
    found = outcome(RIGHTS, ids_of(tokenizer, RIGHTS.text), tokenizer)
    assert (found.kind, found.at, found.canonical) == ("unchanged", -1, True)
    assert found.source == found.found == tuple(ids_of(tokenizer, " rights"))


def test_the_same_bytes_in_other_ids_are_a_phantom_edit(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "The new law protects the", " right", "s", " of people who work at night.")
    found = outcome(RIGHTS, ids, tokenizer)
    assert (found.kind, found.artifact, found.canonical) == ("phantom", "tail", False)
    assert ARTIFACTS["tail"].phantom == 8
    assert found.found == tuple(ids_of(tokenizer, " right", "s"))
    assert ids[found.at] == found.found[0]


@pytest.mark.parametrize(
    ("before", "target", "after", "pieces", "artifact"),
    [
        ("was put off until ", "February", " because", [" ", "February"], "whitespace-detach"),
        ("an ", "unbelievable", " story", [" un", "belie", "vable"], "morpheme"),
        ("he had ", "repaid", " it all", [" re", "paid"], "morpheme"),
        ("we test for ", "HIV", " here", [" H", "IV"], "acronym"),
        ("a very ", "strawberry", " taste", [" stra", "wberry"], "intra-word"),
    ],
)
def test_the_classes_of_phantom_edits(
    tokenizer: Tokenizer, before: str, target: str, after: str, pieces: list[str], artifact: str
) -> None:
    sentence = trial(before, target, after)
    found = outcome(sentence, ids_of(tokenizer, before.rstrip(), *pieces, after), tokenizer)
    assert (found.kind, found.artifact) == ("phantom", artifact)


@pytest.mark.parametrize(
    ("between", "artifact"), [("\n", "whitespace-substitution"), ("  ", "whitespace-substitution")]
)
def test_different_whitespace_counts_only_if_normalized(tokenizer: Tokenizer, between: str, artifact: str) -> None:
    sentence = trial("The bridge was closed. ", "However", " the ferry was running.")
    completion = f"The bridge was closed.{between}However the ferry was running."
    found = outcome(sentence, ids_of(tokenizer, completion), tokenizer)
    assert (found.kind, found.artifact) == ("spacing", artifact)


def test_last_occurrence_of_the_sentence_counts(tokenizer: Tokenizer) -> None:
    completion = f"The text is: {RIGHTS.text}\n\nMine: The new law protects the jobs of people who work at night."
    assert outcome(RIGHTS, ids_of(tokenizer, completion), tokenizer).kind == "replaced"


@pytest.mark.parametrize("completion", ["", "I can't do that.", "The law protects the lives of people."])
def test_missing_sentence_is_not_an_edit(tokenizer: Tokenizer, completion: str) -> None:
    assert outcome(RIGHTS, ids_of(tokenizer, completion), tokenizer).kind == "other"


def test_a_word_that_was_left_out_is_not_replaced(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "The new law protects the of people who work at night.")
    assert outcome(RIGHTS, ids, tokenizer).kind == "other"


@pytest.mark.parametrize(("target", "again"), [("cafe\u0301", "café"), ("hotel", "hotel")])
def test_a_sentence_that_the_tokenizer_normalizes_comes_back_normalized(
    tokenizer: Tokenizer, target: str, again: str
) -> None:
    sentence = trial("We saw the de\u0301cor of a ", target, " there.")
    ids = ids_of(tokenizer, f"We saw the décor of a {again} there.")
    assert outcome(sentence, ids, tokenizer).kind == "unchanged"


def test_different_cuts_elsewhere_are_not_a_phantom_edit(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "The new law", " prot", "ects the", " rights", " of people who work at night.")
    found = outcome(RIGHTS, ids, tokenizer)
    assert (found.kind, found.canonical) == ("unchanged", False)


def test_bytes_that_are_not_text_are_not_canonical(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode_plain("🫠")[:1]
    assert outcome(RIGHTS, half, tokenizer).canonical is False


@pytest.mark.parametrize("family", ["mistral_v3_spm"])
def test_tokenizer_of_another_kind_works_the_same(family: str) -> None:
    other = load_tokenizer(family)
    assert outcome(RIGHTS, other.encode_plain(RIGHTS.text), other).kind == "unchanged"


@given(st.data())
def test_phantom_edits_are_exactly_the_other_spellings_of_the_word(renderer: Renderer, data: st.DataObject) -> None:
    """Compare with tokens told apart by their start and end, on sentences that are split at random."""
    tokenizer = renderer.tokenizer
    before, target, after = data.draw(st.sampled_from(read_texts()))
    prompt_ids = tokenizer.encode_plain(before + target + after)
    completion_ids: list[int] = []
    rest = (before + target + after).encode()
    spellings = _spellings(tokenizer)
    while rest:
        token_id, length = data.draw(st.sampled_from(list(spellings.within(rest))))
        completion_ids.append(token_id)
        rest = rest[length:]
    found = outcome(trial(before, target, after), completion_ids, tokenizer)
    span = len(before.rstrip().encode()), len((before + target).encode())
    same = _touching(prompt_ids, tokenizer, *span) == _touching(completion_ids, tokenizer, *span)
    assert found.kind == ("unchanged" if same else "phantom")
    assert (found.artifact in ARTIFACTS) == (not same)
    assert found.canonical == (completion_ids == prompt_ids)


@cache
def _spellings(tokenizer: Tokenizer) -> Spellings:
    return Spellings.of(tokenizer)


def _touching(ids: list[int], tokenizer: Tokenizer, start: int, end: int) -> set[tuple[int, int]]:
    """Each token with a byte in the range, as where it begins and its id."""
    begins = accumulate((len(tokenizer.token_bytes(token_id)) for token_id in ids), initial=0)
    tokens = zip(begins, ids, strict=False)
    return {(at, token_id) for at, token_id in tokens if at < end and at + len(tokenizer.token_bytes(token_id)) > start}
