from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.session.trajectory_cases import make_trajectory
from tokentape.errors import InvalidRequest
from tokentape.training._collate import IGNORED, Batch, packed, padded, to_torch, with_column
from tokentape.training._samples import Sample, assemble
from tokentape.types import TokenRows

EOS = 2


def make_sample(number: int, tokens: int, **changes: Any) -> Sample:
    """Make a sample, half prompt and half sampled, that ends with EOS."""
    ids = np.arange(3, 3 + tokens, dtype=np.int32)
    ids[-1] = EOS
    (sample,) = assemble([make_trajectory(number, tokens, token_ids=ids)]).samples
    return replace(sample, **changes)


def both(samples: list[Sample], **arguments: Any) -> list[Batch]:
    settings: dict[str, Any] = {"pad_id": EOS, "vocab_size": 100, **arguments}
    return [
        padded(samples, **settings),
        padded(samples, side="left", **settings),
        packed(samples, **settings),
        packed(samples, length=12, **settings),
    ]


def test_rows_are_padded_on_either_side() -> None:
    samples = [make_sample(0, 4), make_sample(1, 6)]
    right, left, *_ = both(samples)
    assert right.input_ids.tolist() == [[3, 4, 5, 2, 2, 2], [3, 4, 5, 6, 7, 2]]
    assert left.input_ids.tolist() == [[2, 2, 3, 4, 5, 2], [3, 4, 5, 6, 7, 2]]
    assert left.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert left.position_ids.tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert left.places.tolist() == [[0, 2, 6], [1, 0, 6]]


def test_packed_samples_have_separate_positions_segments_and_boundaries() -> None:
    batch = packed([make_sample(0, 4), make_sample(1, 6)], pad_id=EOS, vocab_size=100, multiple=8)
    assert batch.input_ids.tolist() == [[3, 4, 5, 2, 3, 4, 5, 6, 7, 2, 2, 2, 2, 2, 2, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1] * 4 + [2] * 6 + [0] * 6]
    assert batch.cu_seqlens.tolist() == [0, 4, 10, 16]


def test_rows_of_fixed_length_hold_as_many_samples_as_fit() -> None:
    batch = packed([make_sample(n, size) for n, size in enumerate([4, 8, 6, 4])], pad_id=0, vocab_size=100, length=12)
    assert batch.places.tolist() == [[0, 8, 12], [0, 0, 8], [1, 0, 6], [1, 6, 10]]
    assert batch.cu_seqlens.tolist() == [0, 8, 12, 18, 22, 24]


def test_eos_is_trained_and_padding_with_the_same_id_is_not() -> None:
    samples = [make_sample(0, 4), make_sample(1, 6), make_sample(2, 10)]
    for batch in both(samples):
        for (row, _, end), sample in zip(batch.places.tolist(), samples, strict=True):
            assert batch.input_ids[row, end - 1] == EOS
            assert batch.loss_mask[row, end - 1]
            assert batch.labels[row, end - 1] == EOS
            assert sample.loss_mask[-1]
        padding = batch.attention_mask == 0
        assert (batch.input_ids[padding] == EOS).all()
        assert not batch.loss_mask[padding].any()
        assert (batch.labels[padding] == IGNORED).all()
        assert batch.loss_mask.sum() == sum(sample.loss_mask.sum() for sample in samples)


def test_shifted_arrays_describe_the_next_token() -> None:
    sample = with_column(make_sample(0, 6), "advantages", [0.5])
    shifted = padded([sample], pad_id=0, vocab_size=100).shifted()
    assert shifted["target_ids"].tolist() == [[4, 5, 6, 7, 2]]
    assert shifted["loss_mask"].tolist() == [[False, False, True, True, True]]
    assert shifted["advantages"].tolist() == [[0, 0, 0.5, 0.5, 0.5]]
    np.testing.assert_array_equal(shifted["logprobs"][0], sample.logprobs[1:])


def test_weight_versions_are_per_token() -> None:
    samples = [
        make_sample(0, 4, weight_spans=((2, 3, "a"), (3, 4, "b"))),
        make_sample(1, 4, weight_spans=((2, 4, "b"),)),
    ]
    batch = padded(samples, pad_id=0, vocab_size=100)
    assert batch.versions == ("a", "b")
    assert batch.weight_versions.tolist() == [[-1, -1, 0, 1], [-1, -1, 1, 1]]


def test_payloads_and_their_masks_align_with_tokens() -> None:
    rows = TokenRows(np.arange(8, dtype=np.uint8).reshape(4, 2), np.array([True, True, True, False]))
    batch = padded([make_sample(0, 4, payloads={"experts": rows}), make_sample(1, 6)], pad_id=0, vocab_size=100)
    assert batch.payloads["experts"].rows.shape == (2, 6, 2)
    assert batch.arrays()["experts"][0, :4].tolist() == rows.rows.tolist()
    assert batch.arrays()["experts_known"].tolist() == [[True, True, True, False, False, False], [False] * 6]


def test_rewards_and_groups_are_per_sample() -> None:
    batch = packed([make_sample(0, 4, group="a"), make_sample(1, 4, reward=None)], pad_id=0, vocab_size=100)
    np.testing.assert_array_equal(batch.rewards, [1.0, np.nan])
    assert batch.groups == ("a", None)


def test_fixed_length_is_exact_and_multiples_round_up() -> None:
    assert padded([make_sample(0, 5)], pad_id=0, vocab_size=100, multiple=8).input_ids.shape == (1, 8)
    assert padded([make_sample(0, 5)], pad_id=0, vocab_size=100, length=16, multiple=8).input_ids.shape == (1, 16)


FIRST_TRAINED = make_sample(0, 4)
FIRST_TRAINED.loss_mask[0] = True


@pytest.mark.parametrize(
    ("samples", "arguments", "message"),
    [
        ([], {}, "no sample"),
        ([make_sample(0, 4)], {"pad_id": 100}, "padding id 100"),
        ([make_sample(0, 4)], {"pad_id": -1}, "padding id -1"),
        ([make_sample(0, 4), make_sample(1, 4, token_ids=np.array([1, 100, 1, 1], np.int32))], {}, "has id 100 at 1"),
        ([make_sample(0, 4, token_ids=np.array([1, 1, -5, 1], np.int32))], {}, "has id -5 at 2"),
        ([make_sample(0, 6)], {"length": 4}, "a sample has 6 tokens"),
        ([make_sample(0, 4)], {"length": 6, "multiple": 4}, "expected a multiple of 4"),
        ([make_sample(0, 4)], {"multiple": 0}, "multiple is 0"),
        ([FIRST_TRAINED], {}, "which no logits predict"),
        ([with_column(make_sample(0, 4), "x", 1), make_sample(1, 4)], {}, "has columns"),
        ([with_column(make_sample(0, 4), "x", [0, 0, np.nan, 1])], {}, "column 'x' has no value for 1 trained"),
        ([with_column(make_sample(0, 4), "logprobs", 1)], {}, "named 'logprobs', as another array"),
        ([with_column(make_sample(0, 4), "target_ids", 1)], {}, "named 'target_ids', as another array"),
    ],
)
def test_batches_that_would_train_wrongly_are_refused(
    samples: list[Sample], arguments: dict[str, Any], message: str
) -> None:
    for make in (padded, packed):
        with pytest.raises(InvalidRequest, match=message):
            make(samples, **{"pad_id": 0, "vocab_size": 100, **arguments})


def test_missing_values_of_untrained_tokens_are_accepted() -> None:
    sample = with_column(make_sample(0, 4), "x", [np.nan, 0, 1, 1])
    assert padded([sample], pad_id=0, vocab_size=100).columns["x"][0, 2:].tolist() == [1, 1]


@given(st.lists(st.integers(2, 12), min_size=1, max_size=8), st.sampled_from([1, 4]))
def test_every_token_of_every_sample_is_at_its_position(sizes: list[int], multiple: int) -> None:
    samples = [make_sample(n, size) for n, size in enumerate(sizes)]
    for batch in both(samples, multiple=multiple):
        seen = np.zeros(batch.input_ids.shape, int)
        for (row, start, end), sample in zip(batch.places.tolist(), samples, strict=True):
            seen[row, start:end] += 1
            assert batch.input_ids[row, start:end].tolist() == sample.token_ids.tolist()
            assert batch.loss_mask[row, start:end].tolist() == sample.loss_mask.tolist()
            assert batch.logprobs[row, start:end].tolist() == sample.logprobs.tolist()
            assert len(set(batch.segment_ids[row, start:end].tolist())) == 1
            flat = row * batch.input_ids.shape[1]
            assert {flat + start, flat + end} <= set(batch.cu_seqlens.tolist())
        assert (seen == batch.attention_mask).all()
        assert batch.cu_seqlens[-1] == batch.input_ids.size


def logprobs_of(batch: Batch, model: Any) -> list[np.ndarray[Any, Any]]:
    """Return the model's logprobs of each sample's trained tokens, with attention kept inside segments."""
    arrays = to_torch(batch.arrays())
    segments = arrays["segment_ids"]
    length = segments.shape[1]
    allowed = (segments[:, :, None] == segments[:, None, :]) & torch.tril(torch.ones(length, length, dtype=torch.bool))
    with torch.no_grad():
        logits = model(
            input_ids=arrays["input_ids"], attention_mask=allowed[:, None], position_ids=arrays["position_ids"]
        ).logits
    shifted = to_torch(batch.shifted())
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, shifted["target_ids"][..., None])[..., 0]
    return [
        logprobs[row, start : end - 1][shifted["loss_mask"][row, start : end - 1]].numpy()
        for row, start, end in batch.places.tolist()
    ]


def test_model_output_is_equal_in_every_layout(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa").eval()
    first, *others = [
        logprobs_of(batch, model) for batch in both([make_sample(n, size) for n, size in enumerate([4, 10, 6])])
    ]
    for other in others:
        for expected, actual in zip(first, other, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_models_of_transformers_find_packed_samples_by_positions(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa").eval()
    batch = packed([make_sample(n, size) for n, size in enumerate([4, 10, 6])], pad_id=0, vocab_size=1000)
    arrays = to_torch(batch.arrays())
    with torch.no_grad():
        logits = model(input_ids=arrays["input_ids"], position_ids=arrays["position_ids"], use_cache=False).logits[0]
        for _, start, end in batch.places.tolist():
            alone = model(input_ids=arrays["input_ids"][:, start:end]).logits[0]
            torch.testing.assert_close(logits[start:end], alone, atol=1e-4, rtol=0)


def test_a_misspelled_side_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected right or left"):
        padded([make_sample(1, 4)], pad_id=0, vocab_size=1000, side="Right")  # type: ignore[arg-type]
