"""Arrays as bytes for a browser: one reply with a JSON header and then little-endian arrays.

    "TTV1", uint32 length of the header, the header (JSON, UTF-8), padding to a multiple of 8, the arrays

The header is an object; its member `arrays` has per name `dtype` (`u1`, `i4`, `f4`), `offset` in bytes from the end
of the padding, a multiple of 8, and `length` in elements. So each is a typed array over the reply's own bytes: 200,000
tokens take 3.6 MB and no parsing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"TTV1"
MEDIA_TYPE = "application/octet-stream"

_ALIGNED = 8
_KINDS = {"u1": "|u1", "i4": "<i4", "f4": "<f4"}


def pack(meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return `meta` and `arrays` (uint8, bool, int32 or float32, one-dimensional) as one reply."""
    layout: dict[str, Any] = {}
    pieces: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        kind = {"b": "u1", "u": "u1", "i": "i4", "f": "f4"}[array.dtype.kind]
        if array.dtype.itemsize not in (1, 4) or (kind == "u1") != (array.dtype.itemsize == 1):
            raise ValueError(f"array {name!r} is of {array.dtype}, none of the types that are sent")
        data = np.ascontiguousarray(array, _KINDS[kind]).tobytes()
        layout[name] = {"dtype": kind, "offset": offset, "length": array.size}
        pieces += [data, bytes(-len(data) % _ALIGNED)]
        offset += len(data) + -len(data) % _ALIGNED
    header = json.dumps({**meta, "arrays": layout}, allow_nan=False).encode()
    head = MAGIC + len(header).to_bytes(4, "little") + header
    return b"".join([head, bytes(-len(head) % _ALIGNED), *pieces])
