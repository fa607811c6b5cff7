"""Sampling supports: which ids truncation by top-k, top-p or min-p kept for one token, in few bytes.

A first byte says what follows: runs of ids with their distances as variable-length numbers, a bitmap, or only how many
ids there are, where that is more than was to be recorded. No bytes at all: nothing is known.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SUPPORTS = "supports"
"""The name of the payload that has them."""

_TOO_MANY, _RUNS, _BITMAP = b"\x00", b"\x01", b"\x02"


def pack(ids: npt.ArrayLike, most: int) -> bytes:
    """Return the kept ids of a token as bytes, or only their number if they are more than `most`.

    >>> [len(pack(ids, 4096)) for ids in ([7], [3, 90, 11000], range(5000, 6000), range(0, 8000, 2))]
    [2, 6, 5, 1002]
    """
    ids = np.unique(np.asarray(ids, np.int64))
    if not ids.size or ids[0] < 0:
        raise ValueError("a support has at least one id, and no negative one")
    if ids.size > most:
        return _TOO_MANY + number(ids.size)
    edges = np.flatnonzero(np.diff(ids) > 1)
    firsts, lasts = ids[np.concatenate([[0], edges + 1])], ids[np.concatenate([edges, [-1]])]
    base = int(ids[0]) >> 3
    bitmap = np.zeros(((int(ids[-1]) >> 3) - base + 1) * 8, bool) if len(firsts) > 1 else None
    runs = bytearray(_RUNS)
    after = 0
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        runs += number((first - after) << 1 | (last > first))
        if last > first:
            runs += number(last - first)
        after = last
        if bitmap is not None and len(runs) > len(bitmap) // 8 + 5:
            bitmap[ids - base * 8] = True
            return _BITMAP + number(base) + np.packbits(bitmap, bitorder="little").tobytes()
    return bytes(runs)


def is_known(support: bytes) -> bool:
    """Return whether the kept ids of a token are there."""
    return support[:1] not in (b"", _TOO_MANY)


def kept_ids(support: bytes) -> npt.NDArray[np.int32] | None:
    """Return the kept ids of a token in ascending order; None where they are not known or were too many.

    Raises ValueError for bytes that `pack` did not make.
    """
    if not is_known(support):
        return None
    if support[:1] == _BITMAP:
        base, offset = read_number(support, 1)
        bits = np.unpackbits(np.frombuffer(support, np.uint8, offset=offset), bitorder="little")
        return (np.flatnonzero(bits) + base * 8).astype(np.int32)
    if support[:1] != _RUNS:
        raise ValueError(f"a support of an unknown kind: {support[0]}")
    runs, offset, after = [], 1, 0
    while offset < len(support):
        coded, offset = read_number(support, offset)
        length = 0
        if coded & 1:
            length, offset = read_number(support, offset)
        first = after + (coded >> 1)
        after = first + length
        runs.append(np.arange(first, after + 1, dtype=np.int32))
    return np.concatenate(runs)


def too_many(support: bytes) -> int | None:
    """Return how many ids were kept where they were too many to be recorded."""
    return read_number(support, 1)[0] if support[:1] == _TOO_MANY else None


def number(value: int) -> bytes:
    """Return a number of at least 0 in as few bytes as it needs, seven bits in each, lowest first (LEB128)."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def read_number(data: bytes, offset: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it. Raises ValueError if the data ends before."""
    value = shift = 0
    while offset < len(data):
        byte = data[offset]
        value, shift, offset = value | (byte & 0x7F) << shift, shift + 7, offset + 1
        if byte < 0x80:
            return value, offset
    raise ValueError("the data ends within a number")
