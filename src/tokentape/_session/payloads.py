"""Cut per-token arrays that engines return, such as routed experts, to one turn, and convert them to bytes.

Rows of unequal length, such as sampling supports, are stored in an object array of `bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape._supports import number, read_number
from tokentape.types import TurnPayload

ROW_DTYPES = frozenset({"|O", "|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<f2", "<f4", "<f8"})
"""The dtypes that rows may have, as numpy writes them for little-endian elements."""

RAGGED = "ragged 1"
"""The dtype recorded for rows of unequal length. Each row follows its length, encoded with `_supports.number`."""


def turn_payload(
    session_id: str, turn: int, name: str, context: int, start: int, rows: npt.NDArray[Any]
) -> TurnPayload | None:
    """Return the rows from an engine's reply that are recorded with a turn; None if no rows are.

    The context's rows are left out because earlier turns contain them, except for the context's last token (see
    `TurnPayload.start`). `context` is the number of tokens in the parent's context and completion; `start` is the
    offset of the first row's token in prompt + completion.

    >>> turn_payload("s", 1, "experts", context=4, start=0, rows=np.arange(6, dtype=np.uint8)).rows
    array([3, 4, 5], dtype=uint8)
    """
    left_out = max(max(context - 1, 0) - start, 0)
    if left_out >= len(rows):
        return None
    return TurnPayload(session_id, turn, name, start + left_out - context, rows[left_out:])


def blank_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return rows of zeros, or of empty bytes if `dtype` is object."""
    return np.full(shape, b"" if dtype.hasobject else 0, dtype)


def narrowest(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integer rows in the smallest dtype that fits them all, and other rows unchanged.

    >>> narrowest(np.array([[3, 127]], np.int32)).dtype
    dtype('uint8')
    """
    if rows.dtype.kind not in "iu" or not rows.size:
        return rows
    low, high = int(rows.min()), int(rows.max())
    dtype = np.min_scalar_type(high if low >= 0 else min(low, -high - 1))
    return rows.astype(dtype, copy=False) if dtype.itemsize <= 4 else rows


def rows_as_bytes(rows: npt.NDArray[Any]) -> tuple[str, bytes]:
    """Return the dtype string of `rows` (or `RAGGED`) and their bytes, both little-endian."""
    if rows.dtype == object:
        return RAGGED, b"".join(number(len(row)) + row for row in rows)
    little = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
    return little.dtype.str, little.tobytes()


def rows_from_bytes(dtype: str, shape: Sequence[int], data: bytes) -> npt.NDArray[Any]:
    """Undo `rows_as_bytes`. Raises ValueError if `dtype` is not in `ROW_DTYPES` or `data` does not have this shape."""
    if dtype == RAGGED:
        return _ragged(shape, data)
    if dtype not in ROW_DTYPES:
        raise ValueError(f"rows can't consist of {dtype!r}")
    rows = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)


def _ragged(shape: Sequence[int], data: bytes) -> npt.NDArray[Any]:
    (count,) = shape
    rows = np.full(count, b"", object)
    offset = 0
    for row in range(count):
        length, offset = read_number(data, offset)
        rows[row] = data[offset : offset + length]
        offset += length
    if offset != len(data):
        raise ValueError(f"the payload's rows add up to {offset} bytes, but its data has {len(data)}")
    rows.flags.writeable = False
    return rows
