"""Lists of merges that are proven to do the same, held against `tokenizers` on random tables and texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import tokenizers

from tokentape.audit._skew.parts import lacking_merges, makes_whole_vocabulary, same_merges

Merge = tuple[str, str]
TEXTS = ["".join(chars) for n in range(1, 8) for chars in product("ab", repeat=n)]


def drawn(rng: random.Random) -> list[Merge]:
    tokens, merges = ["a", "b"], []
    for _ in range(rng.randrange(3, 9)):
        pair = rng.choice(tokens), rng.choice(tokens)
        if pair not in merges and len("".join(pair)) < 6:
            merges.append(pair)
            tokens.append("".join(pair))
    rng.shuffle(merges)
    return merges


def encoded(merges: Sequence[Merge], vocab: Sequence[str], *, ignore_merges: bool = False) -> list[list[int]]:
    ids = {token: n for n, token in enumerate(vocab)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, list(merges), ignore_merges=ignore_merges))
    return [encoding.ids for encoding in made.encode_batch(TEXTS)]


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
        elif lacking_merges(merges, fewer):
            other += 1
            assert not equal, (merges, fewer)
    assert same > 7
    assert other > 7


def test_a_vocabulary_that_merging_makes_does_not_depend_on_ignore_merges() -> None:
    rng, whole = random.Random(7), 0
    for _ in range(120):
        merges = drawn(rng)
        vocab = sorted({"a", "b", *("".join(merge) for merge in merges)})
        if makes_whole_vocabulary({"vocab": {token: n for n, token in enumerate(vocab)}}, merges):
            whole += 1
            assert encoded(merges, vocab) == encoded(merges, vocab, ignore_merges=True), merges
    assert 20 < whole < 120
