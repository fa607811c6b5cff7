"""The images of a batch, rebuilt from a record."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (the extra `images`)")

from tests.media.tiny_vision import PATCH, picture
from tests.session.trajectory_cases import make_trajectory
from tokentape.engines._image_processor import QwenImageProcessor
from tokentape.errors import InvalidRequest
from tokentape.training._collate import media_arrays, packed, padded
from tokentape.training._samples import Sample, assemble
from tokentape.types import MediaSpan, Provenance

IMAGE = 90
PICTURES = [picture(1, 100, 60), picture(2, 60, 200), picture(3, 90, 90)]
TOKENS = [8, 14, 9]


@pytest.fixture(scope="module")
def processor() -> QwenImageProcessor:
    size = {"shortest_edge": 4 * PATCH**2, "longest_edge": 64 * PATCH**2}
    config = {"image_processor_type": "Qwen2VLImageProcessor", "size": size, "patch_size": PATCH}
    return QwenImageProcessor(config, IMAGE)


@pytest.fixture
def kept(processor: QwenImageProcessor) -> dict[str, bytes]:
    """Image bytes of a record, by hash."""
    return {hashlib.sha256(data).hexdigest(): data for data in [*PICTURES, processor.settings.data]}


def sample_with(processor: QwenImageProcessor, *pictures: int) -> Sample:
    """Make a sample with pictures, each after a text token, then four sampled tokens."""
    ids: list[int] = []
    spans = []
    for n in pictures:
        ids.append(5)
        sha256 = hashlib.sha256(PICTURES[n]).hexdigest()
        spans.append(MediaSpan(len(ids), TOKENS[n], sha256, processor.settings.sha256))
        ids += [IMAGE] * TOKENS[n]
    ids += [6] * (8 - len(ids) % 2)
    codes = np.where(np.array(ids) == IMAGE, Provenance.MEDIA, Provenance.USER).astype(np.uint8)
    size = 2 * len(ids)
    shown = make_trajectory(
        len(pictures),
        size,
        token_ids=np.array([*ids, *[7] * len(ids)], np.int32),
        provenance=np.concatenate([codes, np.full(len(ids), Provenance.SAMPLED, np.uint8)]),
        media=tuple(spans),
    )
    (sample,) = assemble([shown]).samples
    return sample


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_rows_pad_every_per_token_array_equally(
    processor: QwenImageProcessor, kept: dict[str, bytes], side: Any
) -> None:
    samples = [sample_with(processor, 0, 2), sample_with(processor), sample_with(processor, 1)]
    batch = padded(samples, pad_id=0, vocab_size=100, side=side)
    arrays = media_arrays(batch, kept.__getitem__)
    assert arrays["mm_token_type_ids"].shape == batch.input_ids.shape == batch.attention_mask.shape
    np.testing.assert_array_equal(arrays["mm_token_type_ids"] == 1, batch.input_ids == IMAGE)
    expected = processor.arrays([PICTURES[0], PICTURES[2], PICTURES[1]])
    np.testing.assert_array_equal(arrays["image_grid_thw"], expected["image_grid_thw"])
    np.testing.assert_array_equal(arrays["pixel_values"], expected["pixel_values"])


def test_a_batch_without_images_has_types_only(processor: QwenImageProcessor, kept: dict[str, bytes]) -> None:
    batch = padded([sample_with(processor)], pad_id=0, vocab_size=100)
    assert {name: array.sum() for name, array in media_arrays(batch, kept.__getitem__).items()} == {
        "mm_token_type_ids": 0
    }


def test_packed_rows_are_refused(processor: QwenImageProcessor, kept: dict[str, bytes]) -> None:
    batch = packed([sample_with(processor, 0), sample_with(processor, 1)], pad_id=0, vocab_size=100)
    with pytest.raises(InvalidRequest, match="padded"):
        media_arrays(batch, kept.__getitem__)


def test_image_with_a_changed_number_of_tokens_is_refused(
    processor: QwenImageProcessor, kept: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = padded([sample_with(processor, 0)], pad_id=0, vocab_size=100)
    monkeypatch.setattr(QwenImageProcessor, "lengths", lambda *_: [14])
    with pytest.raises(InvalidRequest, match="has 14 tokens, the record has 8"):
        media_arrays(batch, kept.__getitem__)


def test_bytes_with_another_hash_are_refused(processor: QwenImageProcessor, kept: dict[str, bytes]) -> None:
    batch = padded([sample_with(processor, 0)], pad_id=0, vocab_size=100)
    sha256 = hashlib.sha256(PICTURES[0]).hexdigest()
    kept[sha256] = picture(9, 100, 60)
    with pytest.raises(InvalidRequest, match=f"for {sha256}: pass the recorded ones"):
        media_arrays(batch, kept.__getitem__)
