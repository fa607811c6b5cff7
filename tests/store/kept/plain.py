"""Records as plain JSON in which every bit counts, and current objects in the shape of older ones."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

TYPE = "(class)"
"""The key for the class of an object."""


def plain(value: Any) -> Any:
    """Return `value` as JSON. Arrays become dtype, shape, a SHA-256 of their bytes, and their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {TYPE: type(value).__name__, **{name: plain(getattr(value, name)) for name in names}}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        sha256 = hashlib.sha256(data.tobytes()).hexdigest()
        return {"dtype": data.dtype.str, "shape": list(data.shape), "sha256": sha256, "values": plain(data.tolist())}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def shaped_like(expected: Any, value: Any) -> Any:
    """Return `value` as JSON with the fields that `expected` has of each object: later versions may have more."""
    if isinstance(expected, dict) and TYPE in expected:
        return {
            TYPE: expected[TYPE],
            **{name: shaped_like(part, getattr(value, name)) for name, part in expected.items() if name != TYPE},
        }
    if isinstance(expected, dict) and isinstance(value, Mapping):
        return {str(key): shaped_like(expected.get(str(key)), item) for key, item in value.items()}
    if isinstance(expected, list) and isinstance(value, list | tuple) and len(expected) == len(value):
        return [shaped_like(*pair) for pair in zip(expected, value, strict=True)]
    return plain(value)


def differences(expected: Any, value: Any, at: str = "") -> list[str]:
    """Return where `value` differs from `expected`, a position per line; empty if every bit is the same."""
    return _differences(expected, shaped_like(expected, value), at)


def _differences(expected: Any, actual: Any, at: str) -> list[str]:
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        return [line for key in expected for line in _differences(expected[key], actual[key], f"{at}.{key}")]
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [line for n, pair in pairs for line in _differences(*pair, f"{at}[{n}]")]
    # As text: 1, 1.0 and True are different, and so are 0.0 and -0.0.
    ours, theirs = json.dumps(expected), json.dumps(actual)
    return [] if ours == theirs else [f"{at}: expected {ours[:200]}, found {theirs[:200]}"]
