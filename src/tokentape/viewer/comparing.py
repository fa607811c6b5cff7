"""What a trainer would have had instead: the record beside its own text tokenized again, or rendered again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokentape.audit.compare.comparator import Difference, compare
from tokentape.audit.compare.kinds import KINDS
from tokentape.audit.drift.classes import ARTIFACTS
from tokentape.audit.drift.rerender import through_messages
from tokentape.audit.pairing import Drift, pair_ids, retokenized
from tokentape.chat.renderer import Renderer
from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.store.served_model import ServedModel
from tokentape.types import Trajectory
from tokentape.viewer.binary import pack
from tokentape.viewer.source import SessionView, Source
from tokentape.viewer.texts import token_texts

RETOKENIZED = "retokenized"
RERENDERED = "rerendered"
AGAINST = (RETOKENIZED, RERENDERED)
"""With what a trajectory is compared: its text encoded again, or its messages through the template again."""

_TO_READERS = {
    "cut": "the other side ends earlier",
    "missing": "text that the other side lacks",
    "extra": "text that only the other side has",
}
"""Kinds whose own words take the side of a checker."""

_MEANINGS = {
    **{kind: _TO_READERS.get(kind, meaning) for kind, meaning in KINDS.items()},
    **{name: one.meaning for name, one in ARTIFACTS.items()},
}


@dataclass(frozen=True, slots=True)
class Reader:
    """What ids are read with; parts of it may be missing."""

    tokenizer: Tokenizer | None = None
    renderer: Renderer | None = None
    """To render messages again; of the same template that the record was made with."""
    why_none: str = ""
    """Why there is no tokenizer."""


def reader_of(served: ServedModel | None, folder: Path | None = None) -> Reader:
    """What the ids of a record are read with: the model that was served last if that is still there, or `folder`'s.

    A renderer is used only if it is bit for bit the one that the record was made with.
    """
    if folder is None:
        if served is None:
            return Reader(why_none="this record doesn't say which model was served")
        folder = Path(served.folder)
        if not (folder / "tokenizer.json").is_file():
            return Reader(why_none=f"the tokenizer is no longer in {folder}")
        tokenizer = Tokenizer.load(folder)
        if tokenizer.sha256 != served.tokenizer_sha256:
            return Reader(why_none=f"the tokenizer in {folder} has changed since")
    else:
        tokenizer = Tokenizer.load(folder)
    try:
        renderer = Renderer.load(folder)
    except TokenizerUnusable:
        return Reader(tokenizer)
    return Reader(tokenizer, renderer if served is not None and renderer.fingerprint == served.fingerprint else None)


def against(source: Source, reader: Reader) -> list[str]:
    """Which of `AGAINST` there can be."""
    if reader.tokenizer is None:
        return []
    return list(AGAINST) if source.keeps_messages and reader.renderer is not None else [RETOKENIZED]


def drift_of(reader: Reader, view: SessionView) -> dict[str, Any] | None:
    """How many trained tokens of a session retokenizing would change, and in which way; None without a tokenizer."""
    if reader.tokenizer is None:
        return None
    found = Drift()
    try:
        for one in view.trajectories:
            again = retokenized(reader.tokenizer, one.token_ids)
            found = found.added(one.loss_mask, pair_ids(one.token_ids, again, reader.tokenizer))
    except InvalidRequest:
        # An id that this tokenizer doesn't have: the record is another's.
        return None
    return {"tokens": found.tokens, "changed_tokens": found.changed_tokens, "classes": dict(found.classes)}


def comparison(reader: Reader, view: SessionView, shown: Trajectory, side: str) -> bytes:
    """A trajectory beside what `side` (of `AGAINST`) makes of it, as packed arrays.

    `segments` int32 [4 n] are ranges (start, end, other_start, other_end) that together cover both sides in order.
    `differs` int32 [n] is 0 where both sides have the same ids, else 1 + index of the header's `differences`: each with
    its class, what that means, and whether it is an error. `other_*` are the ids and texts of the other side.

    Raises `InvalidRequest` if there is nothing to compare with, and `TemplateRefused`.
    """
    tokenizer = reader.tokenizer
    if tokenizer is None:
        raise InvalidRequest("there is no tokenizer to compare with: " + reader.why_none)
    if side == RERENDERED:
        if view.stored is None or reader.renderer is None:
            raise InvalidRequest("there are no messages or no template to render again here", "with")
        path = view.stored.tree().path(shown.leaf)
        other = through_messages(reader.renderer, path, view.stored.setups[path[-1].setup])
    else:
        other = retokenized(tokenizer, shown.token_ids)
    found = compare(shown.token_ids, other, tokenizer, provenance=shown.provenance).differences
    changed = np.zeros(len(shown.token_ids), np.bool_)
    for one in found:
        changed[one.expected_start : one.expected_end] = True
    segments, differs = _segments(found, len(shown.token_ids), len(other))
    texts = token_texts(tokenizer, other.tolist())
    return pack(
        {
            "with": side,
            "changed_tokens": int(changed.sum()),
            "changed_trained_tokens": int((changed & shown.loss_mask).sum()),
            "differences": [_told(one) for one in found],
        },
        {
            "segments": np.array(segments, np.int32).reshape(-1),
            "differs": np.array(differs, np.int32),
            "other_ids": other,
            "other_ends": texts.ends,
            "other_text": texts.bytes,
            "other_marks": texts.marks,
        },
    )


def _told(one: Difference) -> dict[str, Any]:
    """A difference in words: one of ids by where the boundary moved, any other by its kind."""
    name = one.artifact or one.kind
    label = ARTIFACTS[one.artifact].kind if one.artifact is not None else one.kind
    return {"class": label, "name": name, "meaning": _MEANINGS[name], "error": one.severity == "error"}


def _segments(
    found: Sequence[Difference], tokens: int, others: int
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    segments: list[tuple[int, int, int, int]] = []
    differs: list[int] = []
    at, other_at = 0, 0
    for n, one in enumerate(found, 1):
        if one.expected_start > at:
            segments.append((at, one.expected_start, other_at, one.recorded_start))
            differs.append(0)
        segments.append((one.expected_start, one.expected_end, one.recorded_start, one.recorded_end))
        differs.append(n)
        at, other_at = one.expected_end, one.recorded_end
    if at < tokens:
        segments.append((at, tokens, other_at, others))
        differs.append(0)
    return segments, differs
