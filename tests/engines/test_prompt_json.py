"""Prompts written as JSON round-trip at any length."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tokentape.engines._vllm import prompt_json


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("vocab_size", [1, 10, 1001, 151_669, 1 << 21, (1 << 21) + 1])
def test_prompt_ids_round_trip(vocab_size: int, compact: bool) -> None:
    chance = np.random.default_rng(0)
    for length in (1, 256, 257, 5000, 300):
        ids = chance.integers(0, vocab_size, length, dtype=np.int32)
        ids[0], ids[-1] = 0, vocab_size - 1
        assert json.loads(prompt_json(ids, vocab_size, compact=compact)) == ids.tolist()


def test_ids_are_written_as_their_digits() -> None:
    ids = np.arange(20_000, dtype=np.int32)
    assert json.loads(prompt_json(ids, 20_000)) == ids.tolist()


def test_compact_form_equals_the_server_s_form() -> None:
    ids = np.arange(1000, dtype=np.int32)
    assert prompt_json(ids, 1000, compact=True) == json.dumps(ids.tolist(), separators=(",", ":")).encode()
