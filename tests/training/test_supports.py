"""Supports in the shapes of trainers, read from their own classes; see docs/how-to/replay-truncation.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.test_trainers import sampled, two_turns
from tokentape._supports import SUPPORTS, pack
from tokentape.errors import InvalidRequest
from tokentape.training import exports, packed, padded, renormalized_logprobs
from tokentape.training._samples import Sample
from tokentape.types import TokenRows

CUT = sampled("processed", top_p=0.9)
WHOLE = sampled("processed")


def with_supports(first: Any, second: Any) -> Sample:
    """Four tokens, of which the second and the last are trained; their supports have two ids and one."""
    sample = two_turns(first, second)
    rows = np.full(4, b"", object)
    rows[1], rows[3] = pack([int(sample.token_ids[1]), 90], 9), pack([int(sample.token_ids[3])], 9)
    return replace(sample, payloads={SUPPORTS: TokenRows(rows, np.array([False, True, False, True]))})


def test_slime_gets_ids_and_offsets_with_empty_rows_for_untrained_tokens() -> None:
    sample = with_supports(CUT, CUT)
    _, first, _, last = sample.token_ids.tolist()
    made = exports.slime_sample(sample, 0, 0)
    assert made["rollout_top_p_token_ids"] == [first, 90, last]
    assert made["rollout_top_p_token_offsets"] == [0, 2, 2, 3]
    assert len(made["rollout_top_p_token_offsets"]) == made["response_length"] + 1


def test_miles_gets_its_class_with_a_support_for_each_token() -> None:
    sample = with_supports(CUT, CUT)
    _, first, between, last = sample.token_ids.tolist()
    made = exports.slime_sample(sample, 0, 0, sampling_mask=dict)
    assert made["rollout_sampling_mask"] == {"ids": [first, 90, between, last], "offsets": [0, 2, 3, 4]}


@pytest.mark.parametrize("sampling_mask", [None, dict], ids=["slime", "miles"])
def test_truncated_and_other_trained_turns_in_a_sample_are_refused(sampling_mask: Any) -> None:
    with pytest.raises(InvalidRequest, match="all turns or none"):
        exports.slime_sample(with_supports(CUT, WHOLE), 0, 0, sampling_mask=sampling_mask)


def test_prime_rl_gets_a_count_per_token() -> None:
    sample = with_supports(CUT, WHOLE)
    made = exports.prime_rl_training_sample(sample, "maths")["sampling_mask"]
    assert np.frombuffer(made["counts"], np.int32).tolist() == [0, 2, 0, 0]
    assert np.frombuffer(made["ids"], np.int32).tolist() == [sample.token_ids[1], 90]


def test_skyrl_gets_rows_as_wide_as_the_largest_support_with_the_sampled_id_first() -> None:
    sample = with_supports(CUT, CUT)
    (rows,) = exports.skyrl_generator_output([sample])["rollout_sample_support"]
    _, first, _, last = sample.token_ids.tolist()
    assert rows.tolist() == [[first, 90], [-1, -1], [last, -1]]
    assert rows.dtype == np.int32


@pytest.mark.parametrize("meaning", [WHOLE, sampled("scaled", top_p=0.9)])
def test_logprobs_over_the_vocabulary_have_no_supports(meaning: Any) -> None:
    """A trainer that replays them computes others than these."""
    sample = with_supports(meaning, meaning)
    assert "rollout_top_p_token_ids" not in exports.slime_sample(sample, 0, 0)
    assert "sampling_mask" not in exports.prime_rl_training_sample(sample, "maths")
    assert "rollout_sample_support" not in exports.skyrl_generator_output([sample])


@pytest.mark.parametrize("mode", ["scaled", "raw"])
@pytest.mark.parametrize("collate", [padded, packed])
def test_a_batch_never_has_supports_beside_logprobs_over_the_vocabulary(collate: Any, mode: str) -> None:
    sample = with_supports(CUT, sampled(mode, top_p=0.9))
    with pytest.raises(InvalidRequest, match=r"turn \d of session .* has supports, and logprobs over the whole vocab"):
        collate([sample], pad_id=0, vocab_size=4000)
    assert collate([sample], pad_id=0, vocab_size=4000, check_logprobs=False).payloads[SUPPORTS].known.sum() == 2
    fitting = collate([with_supports(CUT, CUT)], pad_id=0, vocab_size=4000)
    assert fitting.payloads[SUPPORTS].known.sum() == 2


def test_too_large_support_is_not_taken_for_the_vocabulary() -> None:
    rows = np.array([pack([1, 2], 9), pack([1, 2], 1)], object)
    with pytest.raises(InvalidRequest, match="only the size of a support is recorded"):
        renormalized_logprobs(torch.zeros(2, 5), torch.tensor([1, 1]), rows)


def test_a_trainer_that_takes_no_supports_refuses_truncated_logprobs() -> None:
    with pytest.raises(InvalidRequest, match="after truncation"):
        exports.verl_agent_loop_output(with_supports(CUT, CUT))
