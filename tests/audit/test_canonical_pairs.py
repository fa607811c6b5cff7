"""The meter, which encodes again, against the other way to tell canonical ids: looking at neighbours.

A byte-level BPE sequence is canonical if each two neighbouring tokens of a pre-token are what their joined bytes encode
to (github/rust-gems, crate `bpe`). That shares neither code nor idea with encoding the whole text.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.conftest import REAL_FAMILIES, load_tokenizer, model_path, slow_unless
from tests.searching import examples
from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._id_rows import IdRow, Span
from tokentape.chat._tokenizer import Tokenizer

BYTE_LEVEL = ("qwen3", "llama3", "deepseek_v3", "gpt_oss", "glm4_5", "nemotron3")
FAMILIES = [*BYTE_LEVEL, *(slow_unless(name) for name in REAL_FAMILIES if name.removeprefix("real/") in BYTE_LEVEL)]


class Pairs:
    """Canonicality by pairs, for a tokenizer.json with byte-level BPE."""

    def __init__(self, family: str) -> None:
        spec = json.loads((model_path(family) / "tokenizer.json").read_bytes())
        self.whole_words = spec["model"].get("ignore_merges", False)
        self.vocab = spec["model"]["vocab"]
        bare = {**spec, "added_tokens": [], "post_processor": None, "normalizer": None}
        # The pair of an unreachable word's halves is canonical within a longer word.
        bare["model"] = {**spec["model"], "ignore_merges": False}
        self.real = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self.bare = tokenizers.Tokenizer.from_str(json.dumps(bare))

    def canonical(self, ids: list[int], pieces: list[bytes]) -> bool:
        text = b"".join(pieces).decode()
        normalizer = self.real.normalizer
        if normalizer is not None and normalizer.normalize_str(text) != text:
            return False
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        at = start = 0
        for word, _ in self.real.pre_tokenizer.pre_tokenize_str(text):
            start += len(word)  # one character per byte
            inside = []
            while at < len(ids) and ends[at] <= start:
                inside.append(ids[at])
                at += 1
            if not inside or ends[at - 1] != start or not self.is_canonical_word(word, inside):
                return False
        return at == len(ids)

    def is_canonical_word(self, word: str, ids: list[int]) -> bool:
        if self.whole_words and word in self.vocab:
            return ids == [self.vocab[word]]
        alone = all(self.merged((token_id,)) for token_id in ids)
        return alone and all(self.merged(pair) for pair in pairwise(ids))

    def merged(self, ids: tuple[int, ...]) -> bool:
        joined = "".join(self.bare.id_to_token(token_id) for token_id in ids)
        return [token.id for token in self.bare.model.tokenize(joined)] == list(ids)


@cache
def pairs(family: str) -> Pairs:
    return Pairs(family)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(40))
@given(st.data())
def test_the_meter_and_the_pairs_agree(family: str, data: st.DataObject) -> None:
    tokenizer = load_tokenizer(family)
    text = data.draw(st.text(st.sampled_from("aeirstn  \n'.,ABC019{}\":éж漢字🙂_"), max_size=24))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=3)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ids = [token_id for part in parts for token_id in tokenizer.encode_marked(part).ids]
    drifted = bool(
        measure_drift([IdRow("a", np.array(ids, np.int32), (Span(0, len(ids)),))], tokenizer).completions.changed
    )
    assert drifted != pairs(family).canonical(ids, [tokenizer.token_bytes(own_id) for own_id in ids])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pairs_find_a_single_split(family: str) -> None:
    tokenizer = load_tokenizer(family)
    whole = tokenizer.encode_plain("They were unbelievable rights.")
    assert canonical(family, tokenizer, whole)
    at = next(n for n, token_id in enumerate(whole) if len(tokenizer.token_bytes(token_id)) > 4)
    piece = tokenizer.token_bytes(whole[at]).decode()
    halves = tokenizer.encode_plain(piece[:3]) + tokenizer.encode_plain(piece[3:])
    split = whole[:at] + halves + whole[at + 1 :]
    assert not canonical(family, tokenizer, split)


def canonical(family: str, tokenizer: Tokenizer, ids: list[int]) -> bool:
    return pairs(family).canonical(ids, [tokenizer.token_bytes(token_id) for token_id in ids])
