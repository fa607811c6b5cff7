"""Find the images in messages, and repeat their placeholder ids.

A template writes one placeholder, a control token, for each image. In a model's context, the placeholder is repeated
once per token that the image processor makes from the image. This is done on ids, after rendering: a placeholder
spelled in a caller's text is then text, and sampled ids have their own provenance, so neither counts as an image.

An image in a message is the part `{"type": "image", "sha256": HASH, "tokens": N, "settings": HASH}`. The image's bytes
and the processor's settings are stored elsewhere under these hashes; they determine N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tokentape.errors import TemplateRefused
from tokentape.types import Codes, Media, Message, Provenance, TokenIds

IMAGE = "image"
"""The type of an image part."""


class ImageProcessor(Protocol):
    """The facts about a model's image processor that rendering needs."""

    @property
    def placeholder_id(self) -> int:
        """The id of the placeholder token."""
        ...

    @property
    def settings(self) -> Media:
        """All settings that change the model's input for an image, as canonical JSON."""
        ...

    def tokens(self, image: Media) -> int:
        """Return the number of placeholder ids for an image. Raises `InvalidRequest` if `image` is not an image."""
        ...


def image_parts(messages: Iterable[Message]) -> list[Mapping[str, Any]]:
    """Return the image parts of messages, in order."""
    return [
        part
        for message in messages
        if not isinstance(content := message.get("content"), str) and isinstance(content, Sequence)
        for part in content
        if isinstance(part, Mapping) and part.get("type") == IMAGE
    ]


def repeat_placeholders(
    ids: TokenIds, provenance: Codes, placeholder_id: int, counts: Sequence[int]
) -> tuple[TokenIds, Codes]:
    """Repeat the template's n-th placeholder `counts[n]` times, with the provenance MEDIA.

    Return the ids and their provenance. Raises `TemplateRefused` unless the template wrote `len(counts)` placeholders.
    """
    placeholders = np.flatnonzero((ids == placeholder_id) & (provenance == Provenance.TEMPLATE))
    if len(placeholders) != len(counts):
        raise TemplateRefused(
            f"the chat template wrote {len(placeholders)} image placeholders for {len(counts)} images: it does not "
            "accept images in these places. Send them in a user message, or use a template that accepts them."
        )
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[placeholders] = counts
    codes = provenance.copy()
    codes[placeholders] = Provenance.MEDIA
    return np.repeat(ids, repeats), np.repeat(codes, repeats)
