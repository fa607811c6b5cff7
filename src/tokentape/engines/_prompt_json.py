"""Write a prompt's ids as JSON almost as fast as memory can be copied.

Formatting 100,000 integers would take milliseconds on every turn of a long session. So a table stores the text of each
id, padded with spaces to a fixed width, and a prompt is copied from it. JSON allows the white space.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from tokentape.types import TokenIds

_CELL = 8
"""Bytes per id in the table, including the comma: copying a machine word is faster than copying seven bytes."""

_MOST_IDS = 1 << 21
"""Largest vocabulary for which a table is made: its ids fit in a cell, and the table takes 16 MiB."""

_SHORT = 256
"""Prompts of at most this many ids are formatted directly."""


def prompt_json(ids: TokenIds, vocab_size: int, *, compact: bool = False) -> bytes:
    """Return a JSON array of the ids, int32 [tokens], all below `vocab_size`.

    With `compact` it has no white space, like the JSON that servers write.

    >>> prompt_json(np.array([3, 40, 999], dtype=np.int32), 1000)
    b'[3,40,999]'
    """
    ids = np.asarray(ids)
    if compact or vocab_size > _MOST_IDS or len(ids) <= _SHORT:
        return msgspec.json.encode(ids.tolist())
    # The first cell is for the opening bracket.
    cells = np.empty(len(ids) + 1, np.uint64)
    _table(vocab_size).take(ids, out=cells[1:], mode="clip")
    data = cells.view(np.uint8)
    data[_CELL - 1], data[-1] = b"[]"
    return data[_CELL - 1 :].tobytes()


@lru_cache(maxsize=4)
def _table(vocab_size: int) -> npt.NDArray[np.uint64]:
    """Return a table with a 64-bit word for each id: its digits, padding and a comma."""
    cells = np.full((vocab_size, _CELL), ord(" "), np.uint8)
    digits = np.arange(vocab_size).astype(f"S{_CELL - 1}").view(np.uint8).reshape(vocab_size, _CELL - 1)
    cells[:, :-1] = np.where(digits == 0, ord(" "), digits)
    cells[:, -1] = ord(",")
    return cells.view(np.uint64).reshape(-1)
