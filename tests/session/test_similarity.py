"""Texts compared by hashes of their runs, against plain sets of the runs themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokentape._session.similarity import TextIndex, probes, shingles, similar

LETTERS = "ab \x00\x01é你\ud83d😀"
TEXTS = st.one_of(
    st.text(LETTERS, max_size=40),
    st.lists(st.sampled_from(["the file has ", "no such test", "你好" * 6, "x"]), max_size=30).map("".join),
)


def runs(text: str) -> list[str]:
    return [text[at : at + 12] for at in range(max(len(text) - 11, 1))]


@given(TEXTS, TEXTS)
def test_texts_that_share_a_third_of_their_runs_are_similar(left: str, right: str) -> None:
    ours, theirs = set(runs(left)), set(runs(right))
    assert similar(shingles(left), shingles(right)) == (3 * len(ours & theirs) >= len(ours | theirs))


@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS)
def test_index_counts_the_runs_shared_with_another_text(texts: list[str], other: str) -> None:
    found = TextIndex({number: probes(text) for number, text in enumerate(texts)}).found_in(shingles(other))
    for number, text in enumerate(texts):
        assert found[number] == sum(run in runs(other) for run in runs(text)[:: max(len(text) // 128, 1)])
