"""Write a list of merges in few characters, and say in which merges two lists differ.

With the vocabulary, a merge is the id that it makes and the place where it is cut.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from tokentape.audit._skew.merge_tables import Merge
from tokentape.audit._tokendiff.alignment import anchors

_SHOWN = 3
_MOST = 2**26


def packed_merges(vocab: Mapping[str, int], merges: Sequence[Merge]) -> str | None:
    """Return merges as text; None if one makes no token of the vocabulary, or is not of two pieces."""
    ids = [vocab.get("".join(merge)) if len(merge) == 2 else None for merge in merges]
    if None in ids or not ids:
        return None
    steps, cuts = np.diff(np.array(ids, "<i4"), prepend=np.int32(0)), np.array([len(one) for one, _ in merges], "<u2")
    return base64.b64encode(zlib.compress(steps.tobytes() + cuts.tobytes(), 9)).decode()


def unpacked_merges(packed: str, vocab: Mapping[str, int]) -> list[Merge]:
    """Return the merges of `packed_merges`. Raises `ValueError` if they are of another vocabulary, or damaged."""
    try:
        read = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), _MOST)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    many = len(read) // 6
    ids, cuts = np.cumsum(np.frombuffer(read, "<i4", many)), np.frombuffer(read, "<u2", many, many * 4)
    pieces = {number: piece for piece, number in vocab.items()}
    try:
        tokens = [pieces[number] for number in ids.tolist()]
    except KeyError as error:
        raise ValueError(f"no piece has the id {error}") from None
    return [(token[:cut], token[cut:]) for token, cut in zip(tokens, cuts.tolist(), strict=True)]


def merges_apart(was: Sequence[Merge], now: Sequence[Merge]) -> str:
    """Return in words which merges are gone, are new, and have moved, as few as possible of them."""
    kept = {was[at] for at, _ in anchors(was, now)}
    before, after = set(was), set(now)
    found = {
        "gone": [merge for merge in was if merge not in after],
        "new": [merge for merge in now if merge not in before],
        "moved": [merge for merge in now if merge in before and merge not in kept],
    }
    return "; ".join(f"{len(some)} {how}: {_named(some)}" for how, some in found.items() if some)


def _named(merges: Sequence[Merge]) -> str:
    named = ", ".join(repr(" ".join(merge)) for merge in merges[:_SHOWN])
    return f"{named}, ..." if len(merges) > _SHOWN else named
