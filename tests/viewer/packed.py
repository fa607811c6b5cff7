"""Packed arrays as a page reads them: `static/api.js` does the same."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np


def unpack(data: bytes) -> dict[str, Any]:
    """Return the arrays of a reply, by name."""
    base = 8 + -(-struct.unpack("<I", data[4:8])[0] // 8) * 8
    kinds = {"u1": np.uint8, "i4": np.dtype("<i4"), "f4": np.dtype("<f4")}
    return {
        name: np.frombuffer(data, kinds[array["dtype"]], array["length"], base + array["offset"])
        for name, array in header(data)["arrays"].items()
    }


def header(data: bytes) -> dict[str, Any]:
    """Return the header of a reply."""
    assert data[:4] == b"TTV1"
    parsed: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<I", data[4:8])[0]])
    return parsed
