"""Inputs of vision models besides token ids: the images of a batch, processed again from their bytes and settings.

    batch = padded(samples, pad_id=0, vocab_size=model.config.get_text_config().vocab_size)
    inputs = to_torch(media_arrays(batch, session.media))
    logits = model(input_ids, attention_mask=attention_mask, **inputs).logits

Don't pass `position_ids` to the model: it computes its own from these arrays, in more than one dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape.engines._image_processor import QwenImageProcessor
from tokentape.errors import InvalidRequest
from tokentape.training._collate import Batch

IMAGE_TYPE = 1
"""Value in `mm_token_type_ids` for a placeholder of an image; text and padding are 0."""


def media_arrays(batch: Batch, load: Callable[[str], bytes]) -> dict[str, npt.NDArray[Any]]:
    """Return the images of a batch, in the order of their placeholders in its rows.

    `load` returns the bytes of an image, or of the settings that it was processed with, by their SHA-256; for example
    `media` of a client's session. Needs the extra `images`.

    Returns `mm_token_type_ids`, int64 [rows, length], and if there are images `pixel_values`, float32 [patches of all
    images, values of a patch], and `image_grid_thw`, int64 [images, 3].

    Raises `InvalidRequest` for a row with several samples, because a vision model numbers positions per row, and if an
    image now has another number of tokens or another position than recorded, because the libraries have changed.
    """
    if len(np.unique(batch.places[:, 0])) < len(batch.places):
        raise InvalidRequest("images can't be packed: the model numbers the positions of whole rows; use `padded`")

    @cache
    def processor(settings: str) -> QwenImageProcessor:
        return QwenImageProcessor.from_settings(load(settings))

    @cache
    def processed(sha256: str, settings: str) -> dict[str, npt.NDArray[Any]]:
        return processor(settings).arrays([load(sha256)])

    types = np.zeros(batch.input_ids.shape, np.int64)
    images: list[dict[str, npt.NDArray[Any]]] = []
    for sample in np.argsort(batch.places[:, 0]).tolist():
        row, start, _ = batch.places[sample].tolist()
        for span in batch.media[sample]:
            here = slice(start + span.start, start + span.start + span.length)
            arrays = processed(span.sha256, span.settings)
            found = processor(span.settings).lengths(arrays["image_grid_thw"])[0]
            if found != span.length or (batch.input_ids[row, here] != processor(span.settings).placeholder_id).any():
                raise InvalidRequest(
                    f"image {span.sha256} has {found} tokens, the record has {span.length}: process it with the "
                    "versions of transformers and Pillow that its settings name"
                )
            types[row, here] = IMAGE_TYPE
            images.append(arrays)
    joined = {name: np.concatenate([one[name] for one in images]) for name in images[0]} if images else {}
    return {**joined, "mm_token_type_ids": types}
