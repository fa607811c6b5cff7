"""Placeholders and image parts, without a model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape.chat._media import image_parts, repeat_placeholders
from tokentape.chat._template import plain_message
from tokentape.errors import TemplateRefused
from tokentape.types import Provenance

PLACEHOLDER = 7
CODES = [Provenance.TEMPLATE, Provenance.USER, Provenance.ASSISTANT]


@given(
    st.lists(st.tuples(st.integers(5, 9), st.sampled_from(CODES))),
    st.data(),
)
def test_only_placeholders_of_the_template_are_repeated(
    tokens: list[tuple[int, Provenance]], data: st.DataObject
) -> None:
    written = [token == (PLACEHOLDER, Provenance.TEMPLATE) for token in tokens]
    counts = [data.draw(st.integers(1, 5)) for _ in range(sum(written))]
    expected, rest = [], list(counts)
    for token, is_placeholder in zip(tokens, written, strict=True):
        expected += [(PLACEHOLDER, Provenance.MEDIA)] * rest.pop(0) if is_placeholder else [token]
    ids = np.array([token_id for token_id, _ in tokens], np.int32)
    codes = np.array([code for _, code in tokens], np.uint8)
    actual_ids, actual_codes = repeat_placeholders(ids, codes, PLACEHOLDER, counts)
    assert list(zip(actual_ids.tolist(), actual_codes.tolist(), strict=True)) == expected
    assert actual_ids.dtype == np.int32
    assert actual_codes.dtype == np.uint8


def test_template_without_a_placeholder_is_refused() -> None:
    ids, codes = np.array([1, 2], np.int32), np.full(2, Provenance.TEMPLATE, np.uint8)
    with pytest.raises(TemplateRefused, match="wrote 0 image placeholders for 1 images"):
        repeat_placeholders(ids, codes, PLACEHOLDER, [3])


def test_templates_get_only_the_type_of_an_image_part() -> None:
    image = {"type": "image", "sha256": "ab", "tokens": 3, "settings": "cd"}
    content = [{"type": "text", "text": "a"}, "b", image, image, {"type": "text", "text": ""}]
    message = {"role": "user", "content": content}
    assert image_parts([message]) == [image, image]
    assert plain_message(message)["content"] == [{"type": "text", "text": "ab"}, {"type": "image"}, {"type": "image"}]
