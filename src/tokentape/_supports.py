"""Encode sampling supports: the ids that truncation by top-k, top-p or min-p kept for one token.

The first byte selects the format: runs of ids, with distances as variable-length numbers; a bitmap; or only the number
of ids, if there were too many to record. An empty support means that nothing is known.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SUPPORTS = "supports"
"""The name of the payload with the supports."""

_TOO_MANY, _RUNS, _BITMAP = b"\x00", b"\x01", b"\x02"


def pack(ids: npt.ArrayLike, most: int) -> bytes:
    """Encode the kept ids of a token, or only their number if there are more than `most`.

    >>> [len(pack(ids, 4096)) for ids in ([7], [3, 90, 11000], range(5000, 6000), range(0, 8000, 2))]
    [2, 6, 5, 1002]
    """
    ids = np.unique(np.asarray(ids, np.int64))
    if not ids.size or ids[0] < 0:
        raise ValueError("a support must have at least one id and no negative ids")
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
    """Return whether the kept ids of a token are recorded."""
    return support[:1] not in (b"", _TOO_MANY)


def kept_ids(support: bytes) -> npt.NDArray[np.int32] | None:
    """Return the kept ids of a token in ascending order; None if they are not known or were too many to record.

    Raises ValueError for bytes that `pack` did not write.
    """
    if not is_known(support):
        return None
    if support[:1] == _BITMAP:
        base, offset = read_number(support, 1)
        bits = np.unpackbits(np.frombuffer(support, np.uint8, offset=offset), bitorder="little")
        return (np.flatnonzero(bits) + base * 8).astype(np.int32)
    if support[:1] != _RUNS:
        raise ValueError(f"the support has the unknown format {support[0]}; expected bytes that `pack` wrote")
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
    """Return how many ids truncation kept at a position, if they were too many to record; otherwise None."""
    return read_number(support, 1)[0] if support[:1] == _TOO_MANY else None


def number(value: int) -> bytes:
    """Encode a nonnegative number as unsigned LEB128: seven bits per byte, lowest bits first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def read_number(data: bytes, offset: int) -> tuple[int, int]:
    """Decode the number at an offset. Return it and the offset after it. Raises ValueError if the data ends early."""
    value = shift = 0
    while offset < len(data):
        byte = data[offset]
        value, shift, offset = value | (byte & 0x7F) << shift, shift + 7, offset + 1
        if byte < 0x80:
            return value, offset
    raise ValueError("the data ends within a number")
