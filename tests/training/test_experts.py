"""Routed experts in the exports, as each trainer reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.training.test_exports import two_branches
from tokentape.errors import InvalidRequest
from tokentape.training import Sample, exports
from tokentape.training._trainer_rows import trainer_rows
from tokentape.types import TokenRows

LAYERS, TOP_K = 3, 2


def routed(sample: Sample, *, flat: bool = False, unknown: int | None = None) -> Sample:
    """Return the sample with different experts for each token, layer and slot, and none for its last token."""
    tokens = len(sample.token_ids)
    rows = np.arange(tokens * LAYERS * TOP_K, dtype=np.uint8).reshape(tokens, LAYERS, TOP_K)
    known = np.arange(tokens) < tokens - 1
    rows[-1] = 0
    if unknown is not None:
        known[unknown] = False
    return replace(sample, payloads={"routed_experts": TokenRows(rows.reshape(tokens, -1) if flat else rows, known)})


@pytest.fixture
def samples() -> list[Sample]:
    return [routed(sample) for sample in two_branches()]


def expected(sample: Sample) -> Any:
    """Return all rows except the last token's."""
    return np.arange((len(sample.token_ids) - 1) * LAYERS * TOP_K).reshape(-1, LAYERS, TOP_K)


def test_verl_gets_rows_up_to_the_end_of_a_response_that_is_cut(samples: list[Sample]) -> None:
    for sample in samples:
        np.testing.assert_array_equal(exports.verl_agent_loop_output(sample)["routed_experts"], expected(sample))
        cut = exports.verl_agent_loop_output(sample, response_length=2)
        assert len(cut["routed_experts"]) == len(cut["prompt_ids"]) + len(cut["response_ids"])


def test_slime_gets_a_row_for_each_token_except_the_last(samples: list[Sample]) -> None:
    for sample in samples:
        np.testing.assert_array_equal(exports.slime_sample(sample, 0, 0)["rollout_routed_experts"], expected(sample))


def test_rows_of_sglang_are_split_by_the_number_of_layers() -> None:
    sample = routed(two_branches()[0], flat=True)
    assert exports.slime_sample(sample, 0, 0)["rollout_routed_experts"].shape[1:] == (LAYERS * TOP_K,)
    rows = exports.slime_sample(sample, 0, 0, expert_layers=LAYERS)["rollout_routed_experts"]
    np.testing.assert_array_equal(rows, expected(sample))


def test_skyrl_gets_an_array_for_each_sample(samples: list[Sample]) -> None:
    indices = exports.skyrl_generator_output(samples)["rollout_expert_indices"]
    for sample, rows in zip(samples, indices, strict=True):
        np.testing.assert_array_equal(rows, expected(sample))


def test_skyrl_refuses_a_batch_where_only_some_samples_have_experts(samples: list[Sample]) -> None:
    with pytest.raises(InvalidRequest, match="1 of 2 samples have routed experts"):
        exports.skyrl_generator_output([samples[0], replace(samples[1], payloads={})])


def test_prime_rl_gets_bytes_with_a_row_for_every_token(samples: list[Sample]) -> None:
    for sample in samples:
        with_advantages = replace(sample, columns={"advantages": np.ones(len(sample.token_ids), np.float32)})
        experts = exports.prime_rl_training_sample(with_advantages, "maths")["routed_experts"]
        rows = np.frombuffer(experts["data"], experts["dtype"]).reshape(experts["shape"])
        np.testing.assert_array_equal(rows[:-1], expected(sample))
        assert len(rows) == len(sample.token_ids)


def test_nemo_rl_gets_each_message_s_rows_and_routes_the_last_token_itself(samples: list[Sample]) -> None:
    for sample in samples:
        log = exports.nemo_rl_datum(sample, 0, tensors=False)["message_log"]
        assert [len(message["routed_experts"]) for message in log] == [len(message["token_ids"]) for message in log]
        rows = np.concatenate([message["routed_experts"] for message in log])
        np.testing.assert_array_equal(rows[:-1], expected(sample))
        assert (rows[-1] == -1).all()


@pytest.mark.parametrize("trainer", ["verl", "slime", "skyrl", "nemo-rl"])
def test_files_have_the_rows_as_lists(trainer: str, samples: list[Sample]) -> None:
    line = json.dumps(trainer_rows(trainer, samples)[0], default=lambda array: array.tolist())
    assert f"[{', '.join(map(str, range(TOP_K)))}]" in line


def test_a_token_without_experts_within_a_sample_is_refused() -> None:
    sample = routed(two_branches()[0], unknown=1)
    with pytest.raises(InvalidRequest, match=f"experts for {len(sample.token_ids) - 2} of {len(sample.token_ids) - 1}"):
        exports.slime_sample(sample, 0, 0)


def test_without_recorded_experts_exports_have_no_experts_field() -> None:
    for trainer in ("verl", "slime", "skyrl", "nemo-rl"):
        assert not any("expert" in name for row in trainer_rows(trainer, two_branches()) for name in row)
