"""Lists of merges that are proven to do the same, held against `tokenizers` on random tables and texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import tokenizers

from tokentape.audit._skew.merge_tables import makes_whole_vocabulary, same_merges

Merge = tuple[str, str]
TEXTS = ["".join(chars) for n in range(1, 8) for chars in product("ab", repeat=n)]
LONG = ["".join(chars) for chars in product("abcd", repeat=5)]


def drawn(rng: random.Random, letters: str = "ab") -> list[Merge]:
    tokens, merges = [*letters], []
    for _ in range(rng.randrange(3, 9)):
        pair = rng.choice(tokens), rng.choice(tokens)
        if pair not in merges and len("".join(pair)) < 6:
            merges.append(pair)
            tokens.append("".join(pair))
    rng.shuffle(merges)
    return merges


def encoded(
    merges: Sequence[Merge], vocab: Sequence[str], *, ignore_merges: bool = False, texts: Sequence[str] = TEXTS
) -> list[list[int]]:
    ids = {token: n for n, token in enumerate(vocab)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, list(merges), ignore_merges=ignore_merges))
    return [encoding.ids for encoding in made.encode_batch(list(texts))]


def test_equal_merge_lists_encode_equally_and_shorter_ones_do_not() -> None:
    rng, same, other = random.Random(18), 0, 0
    for _ in range(120):
        merges = drawn(rng)
        fewer = [merge for merge in merges if rng.random() > 0.2]
        vocab = sorted({"a", "b", *("".join(merge) for merge in merges)})
        equal = encoded(merges, vocab) == encoded(fewer, vocab)
        if same_merges(merges, fewer):
            same += len(fewer) < len(merges)
            assert equal, (merges, fewer)
        other += not equal
    assert same > 7
    assert other > 7


def test_merges_that_change_places_encode_equally_if_they_are_called_the_same() -> None:
    rng, same, other = random.Random(24), 0, 0
    for _ in range(160):
        merges = drawn(rng, "abcd")
        moved = rng.sample(merges, len(merges)) if rng.random() < 0.3 else merges.copy()
        at = rng.randrange(len(moved))
        # A merge listed twice, or two neighbors that change places.
        moved[at : at + 2] = [*moved[at : at + 2][::-1], *moved[at : at + rng.randrange(2)]]
        vocab = sorted({*"abcd", *("".join(merge) for merge in merges)})
        equal = encoded(merges, vocab, texts=LONG) == encoded(moved, vocab, texts=LONG)
        if moved != merges and same_merges(merges, moved):
            same += 1
            assert equal, (merges, moved)
        other += not equal
    assert same > 20
    assert other > 20


def test_a_merge_listed_twice_has_its_last_place() -> None:
    merges = [("a", "b"), ("b", "c"), ("a", "b"), ("a", "bc")]
    assert encoded(merges, ["a", "b", "c", "ab", "bc", "abc"], texts=["abc"]) == [[5]]
    assert same_merges(merges, merges[1:])
    assert not same_merges(merges, merges[:-1])


def test_a_vocabulary_that_merging_makes_does_not_depend_on_ignore_merges() -> None:
    rng, whole = random.Random(7), 0
    for _ in range(120):
        merges = drawn(rng)
        vocab = sorted({"a", "b", *("".join(merge) for merge in merges)})
        if makes_whole_vocabulary({"vocab": {token: n for n, token in enumerate(vocab)}}, merges):
            whole += 1
            assert encoded(merges, vocab) == encoded(merges, vocab, ignore_merges=True), merges
    assert 20 < whole < 120


def test_a_merge_of_byte_tokens_has_an_effect() -> None:
    pair, vocab = ("<0xC3>", "<0xA9>"), {"<0xC3>": 0, "<0xA9>": 1, "<0xC3><0xA9>": 2}
    for merges in ([], [pair]):
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, byte_fallback=True))
        assert made.encode("é").ids == ([2] if merges else [0, 1])
    assert not same_merges([], [pair])
