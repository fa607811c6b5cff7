"""Locate the images of recorded turns among the token ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tokentape.chat._media import image_parts
from tokentape.types import Codes, MediaSpan, Message, Provenance, Turn

_MEDIA = int(Provenance.MEDIA)


def media_spans(messages: Iterable[Message], provenance: Codes, start: int = 0) -> list[MediaSpan]:
    """Return the position of each image's placeholder ids, for the images in `messages`.

    `provenance` contains the codes of the ids that were added for these messages; `start` is the first id's offset in
    the context. Raises ValueError unless the number of placeholders is what the messages' images need.
    """
    parts = image_parts(messages)
    if not parts and _MEDIA not in provenance.tobytes():
        return []
    places = np.flatnonzero(provenance == Provenance.MEDIA).tolist()
    expected = sum(part["tokens"] for part in parts)
    if len(places) != expected:
        raise ValueError(f"{len(places)} placeholder ids, but the images in its messages need {expected}")
    spans, index = [], 0
    for part in parts:
        spans.append(MediaSpan(start + places[index], part["tokens"], part["sha256"], part["settings"]))
        index += part["tokens"]
    return spans


def path_media(path: Iterable[Turn]) -> list[MediaSpan]:
    """Return the images in the context of a root-to-leaf path, in order."""
    turns, spans, start = [*path], list[MediaSpan](), 0
    if not any(_MEDIA in turn.added_provenance.tobytes() for turn in turns) and not image_parts(
        message for turn in turns for message in turn.messages
    ):
        return []
    for turn in turns:
        spans += media_spans(turn.messages, turn.added_provenance, start)
        start += len(turn.added_ids) + len(turn.completion_ids)
    return spans
