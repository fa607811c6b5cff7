"""Prompts written as JSON: what a parser reads is what was given, whatever their length."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tokentape.engines._vllm import prompt_json


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("vocab_size", [1, 10, 1001, 151_669, 1 << 21, (1 << 21) + 1])
def test_every_id_is_read_as_it_was(vocab_size: int, compact: bool) -> None:
    chance = np.random.default_rng(0)
    for length in (1, 256, 257, 5000, 300):
        ids = chance.integers(0, vocab_size, length, dtype=np.int32)
        ids[0], ids[-1] = 0, vocab_size - 1
        assert json.loads(prompt_json(ids, vocab_size, compact=compact)) == ids.tolist()


def test_each_id_of_a_vocabulary_has_its_own_digits() -> None:
    ids = np.arange(20_000, dtype=np.int32)
    assert json.loads(prompt_json(ids, 20_000)) == ids.tolist()


def test_compact_is_as_a_server_writes_it_again() -> None:
    ids = np.arange(1000, dtype=np.int32)
    assert prompt_json(ids, 1000, compact=True) == json.dumps(ids.tolist(), separators=(",", ":")).encode()
