"""Initial embeddings: computed by hand, and in the tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.training import (
    Auxiliary,
    TrainingTokenizer,
    enlarge_model,
    mean_of_pieces,
    normal,
    pieces_of,
    token_adapt,
)
from tokentape.training._tokenizer import Pieces, enlarged

OLD = np.array([[1, 0], [0, 1], [-1, 0], [3, 4]], np.float32)


@pytest.fixture(scope="session")
def training(model_dir: Path) -> TrainingTokenizer:
    return TrainingTokenizer.load(model_dir, pad="<|pad|>").with_block("item", ["<|pear|>", "<|plum|>"])


def test_the_mean_is_over_the_old_tokens_of_the_text(model_dir: Path) -> None:
    serving = Tokenizer.load(model_dir)
    (batch,) = pieces_of(serving, ["unbelievable pears"])
    assert list(batch.ids) == serving.encode_plain("unbelievable pears")
    assert sum(batch.lengths) == len("unbelievable pears")
    assert mean_of_pieces(OLD, [Pieces((0, 3), (1, 1))]).tolist() == [[2, 2]]


def test_an_empty_text_is_refused(model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="new token is empty"):
        pieces_of(Tokenizer.load(model_dir), [""])


def test_similar_and_long_pieces_weigh_more() -> None:
    """Scores of the local estimate worked out by hand: (similarity + share of length) / 2, softmax over 0.5."""
    auxiliary = Auxiliary(np.array([[1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
    made = token_adapt(OLD, [Pieces((0, 1), (3, 1))], auxiliary, global_weight=0, temperature=0.5)
    scores = np.array([(1 + 0.75) / 2, (0 + 0.25) / 2]) / 0.5
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(made, [weights], rtol=1e-6)


def test_the_global_estimate_is_of_the_nearest_neighbours_in_the_auxiliary_space() -> None:
    auxiliary = Auxiliary(np.array([[0.0, 2.0]]), np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, -1.0], [0.0, 5.0]]))
    made = token_adapt(OLD, [Pieces((0,), (1,))], auxiliary, neighbours=1, global_weight=0.5)
    np.testing.assert_allclose(made, [(OLD[0] + OLD[3]) / 2])


def test_an_auxiliary_space_of_other_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected 1 and 4"):
        token_adapt(OLD, [Pieces((0,), (1,))], Auxiliary(OLD, OLD))


def test_estimates_lie_within_the_range_of_their_inputs() -> None:
    made = token_adapt(OLD, [Pieces((0, 1, 3), (1, 2, 3)), Pieces((2,), (1,))])
    assert (made >= OLD.min(axis=0) - 1e-6).all()
    assert (made <= OLD.max(axis=0) + 1e-6).all()
    assert made.dtype == np.float32


def test_a_draw_has_the_mean_and_deviation_of_the_old_rows() -> None:
    many = np.random.default_rng(1).normal([5, -5], [1, 3], (4000, 2)).astype(np.float32)
    drawn = normal(many, 4000)
    np.testing.assert_allclose(drawn.mean(axis=0), [5, -5], atol=0.3)
    np.testing.assert_allclose(drawn.std(axis=0), [1, 3], atol=0.3)
    assert (normal(many, 3, seed=1) != normal(many, 3, seed=2)).any()


def test_old_rows_stay_bit_for_bit_and_padding_is_zero(training: TrainingTokenizer) -> None:
    old = np.random.default_rng(0).normal(size=(4000, 8)).astype(np.float32)
    made = enlarged(old, training, {"item": old[[1, 2]]})
    assert made.shape == (training.vocab_size, 8)
    assert made[:4000].tobytes() == old.tobytes()
    assert made[training.block("item").first_id :][:2].tobytes() == old[1:3].tobytes()
    assert not made[~training.known].any()
    assert not made[training.pad_id].any()


def test_row_counts_that_do_not_match_the_blocks_are_refused(training: TrainingTokenizer) -> None:
    old = np.zeros((4000, 8), np.float32)
    with pytest.raises(InvalidRequest, match="but `rows` has none"):
        enlarged(old, training, {})
    with pytest.raises(InvalidRequest, match=r"must have shape \(2, 8\)"):
        enlarged(old, training, {"item": old[:3]})
    with pytest.raises(InvalidRequest, match="unknown blocks: other; expected only"):
        enlarged(old, training, {"item": old[:2], "other": old[:2]})
    with pytest.raises(InvalidRequest, match="tokenizer only 4032"):
        enlarged(np.zeros((5000, 8), np.float32), training, {"item": old[:2]})


def test_enlarged_model_keeps_the_logits_of_old_tokens(model_dir: Path, training: TrainingTokenizer) -> None:
    import torch

    from tokentape.engines._loading import load_model

    model = load_model(model_dir, dtype="float32", device="cpu")
    ids = torch.tensor([Tokenizer.load(model_dir).encode_plain("What do pears cost?")])
    with torch.no_grad():
        before = model(ids).logits
    old = model.get_input_embeddings().weight.detach().numpy().copy()
    enlarge_model(model, training, {"item": mean_of_pieces(old, [Pieces((1, 2), (1, 1))] * 2)})
    with torch.no_grad():
        after = model(ids).logits
    assert after.shape[-1] == training.vocab_size
    torch.testing.assert_close(after[..., : before.shape[-1]], before)
    assert model.config.pad_token_id == training.pad_id
