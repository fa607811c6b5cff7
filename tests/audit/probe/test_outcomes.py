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


def test_the_same_ids_are_no_edit(tokenizer: Tokenizer) -> None:
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
    one = trial(before, target, after)
    found = outcome(one, ids_of(tokenizer, before.rstrip(), *pieces, after), tokenizer)
    assert (found.kind, found.artifact) == ("phantom", artifact)


@pytest.mark.parametrize(
    ("between", "artifact"), [("\n", "whitespace-substitution"), ("  ", "whitespace-substitution")]
)
def test_other_white_space_counts_only_if_it_is_normalised(tokenizer: Tokenizer, between: str, artifact: str) -> None:
    one = trial("The bridge was closed. ", "However", " the ferry was running.")
    said = f"The bridge was closed.{between}However the ferry was running."
    found = outcome(one, ids_of(tokenizer, said), tokenizer)
    assert (found.kind, found.artifact) == ("spacing", artifact)


def test_the_last_time_that_the_sentence_stands_there_counts(tokenizer: Tokenizer) -> None:
    said = f"The text is: {RIGHTS.text}\n\nMine: The new law protects the jobs of people who work at night."
    assert outcome(RIGHTS, ids_of(tokenizer, said), tokenizer).kind == "replaced"


@pytest.mark.parametrize("said", ["", "I can't do that.", "The law protects the lives of people."])
def test_a_sentence_that_did_not_come_back_is_no_edit(tokenizer: Tokenizer, said: str) -> None:
    assert outcome(RIGHTS, ids_of(tokenizer, said), tokenizer).kind == "other"


def test_other_cuts_elsewhere_in_the_sentence_are_no_phantom_edit(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "The new law", " prot", "ects the", " rights", " of people who work at night.")
    found = outcome(RIGHTS, ids, tokenizer)
    assert (found.kind, found.canonical) == ("unchanged", False)


def test_bytes_that_are_no_text_are_not_canonical(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode_plain("🫠")[:1]
    assert outcome(RIGHTS, half, tokenizer).canonical is False


@pytest.mark.parametrize("family", ["mistral_v3_spm"])
def test_a_tokenizer_of_another_kind_is_read_alike(family: str) -> None:
    other = load_tokenizer(family)
    assert outcome(RIGHTS, other.encode_plain(RIGHTS.text), other).kind == "unchanged"


@given(st.data())
def test_any_other_spelling_of_the_word_is_a_phantom_edit_and_nothing_else_is(
    renderer: Renderer, data: st.DataObject
) -> None:
    """Against tokens told apart by where they begin and end, on sentences that are cut at random."""
    tokenizer = renderer.tokenizer
    before, target, after = data.draw(st.sampled_from(read_texts()))
    given_ids = tokenizer.encode_plain(before + target + after)
    said: list[int] = []
    rest = (before + target + after).encode()
    spellings = _spellings(tokenizer)
    while rest:
        token_id, length = data.draw(st.sampled_from(list(spellings.within(rest))))
        said.append(token_id)
        rest = rest[length:]
    found = outcome(trial(before, target, after), said, tokenizer)
    word = len(before.rstrip().encode()), len((before + target).encode())
    same = _touching(given_ids, tokenizer, *word) == _touching(said, tokenizer, *word)
    assert found.kind == ("unchanged" if same else "phantom")
    assert (found.artifact in ARTIFACTS) == (not same)
    assert found.canonical == (said == given_ids)


@cache
def _spellings(tokenizer: Tokenizer) -> Spellings:
    return Spellings.of(tokenizer)


def _touching(ids: list[int], tokenizer: Tokenizer, start: int, end: int) -> set[tuple[int, int]]:
    """Each token with a byte in the range, as where it begins and its id."""
    begins = accumulate((len(tokenizer.token_bytes(token_id)) for token_id in ids), initial=0)
    tokens = zip(begins, ids, strict=False)
    return {(at, one) for at, one in tokens if at < end and at + len(tokenizer.token_bytes(one)) > start}
