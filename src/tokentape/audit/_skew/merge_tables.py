"""Prove that lists of merges of a tokenizer.json encode every text equally.

A merge can apply in a text only if it is also the last step of encoding its own result, because the steps that make its
two pieces are the same in a text as alone. So two merge lists are equivalent if only merges that never apply differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

Merge: TypeAlias = tuple[str, ...]


def merges_of(model: Mapping[str, Any]) -> list[Merge]:
    """Return the merges of a tokenizer.json's model, which stores each as a string or as a list."""
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges") or ()]


def same_merges(ours: Sequence[Merge], theirs: Sequence[Merge]) -> bool:
    """Return True if both lists are proven to encode every text equally.

    They do if they apply the same merges, if merges that share a piece are in the same order in both, and if no merge
    comes before one that makes its pieces: then each merge is applied everywhere before the next one.
    """
    applied = applied_merges(tuple(ours)), applied_merges(tuple(theirs))
    if applied[0] == applied[1]:
        return True
    of_pieces = [_merges_of_pieces(merges) for merges in applied]
    return of_pieces[0] == of_pieces[1] and all(
        "".join(later) != piece or "".join(earlier) == piece
        for piece, merges in of_pieces[0].items()
        for earlier, later in pairwise(merges)
    )


def _merges_of_pieces(merges: Iterable[Merge]) -> dict[str, list[Merge]]:
    """Return the merges that make or use each piece, in their order."""
    of_pieces: dict[str, list[Merge]] = {}
    for merge in merges:
        for piece in {*merge, "".join(merge)}:
            of_pieces.setdefault(piece, []).append(merge)
    return of_pieces


_BYTES_SPELLED = re.compile("(<0x[0-9A-F]{2}>)+")
"""Tokens of byte fallback. Their merges apply to characters that the vocabulary lacks, not to this spelling."""


@lru_cache(4)
def applied_merges(merges: tuple[Merge, ...]) -> list[Merge]:
    """Return the merges in a list that at least one text can use, by rank and without duplicates."""
    # `tokenizers` gives a merge that is listed twice its last place.
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    ordered = sorted(ranks, key=ranks.__getitem__)
    return [merge for merge in ordered if any(map(_BYTES_SPELLED.fullmatch, merge)) or _applied(merge, ranks)]


def makes_whole_vocabulary(model: Mapping[str, Any], merges: Sequence[Merge]) -> bool:
    """Return True if merging the text of each token gives that token, so that `ignore_merges` has no effect."""
    if not isinstance(model["vocab"], Mapping):
        return False
    long = {token for token in model["vocab"] if len(token) > 1}
    # Looking up merge results is fast, and decides most cases.
    return long <= {"".join(merge) for merge in merges} and long <= {*map("".join, applied_merges(tuple(merges)))}


def _applied(merge: Merge, ranks: Mapping[Merge, int]) -> bool:
    """Return True if a merge is the last step of encoding its own result (see the module docstring)."""
    parts = list("".join(merge))
    while len(parts) > 2:
        pairs = [ranks.get(pair, inf) for pair in pairwise(parts)]
        first = min(pairs)
        if first == inf:
            return False
        index = pairs.index(first)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return tuple(parts) == merge
