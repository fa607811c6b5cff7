"""Check the values that callers send as JSON, so that none is changed on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tokentape.errors import InvalidRequest

_EXPECTED = "expected None, True, False, text, a finite number, or a list or dictionary of these"
_LEAST, _MOST = -(2**63), 2**64 - 1


def json_object(value: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Return a mapping as plain values, with NumPy scalars as Python's and tuples as lists.

    Raises `InvalidRequest`, naming the key, for what JSON can't represent: other types, NaN, keys that are not text.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} is {_shown(value)}: expected a dictionary", param)
    plain: dict[str, Any] = _plain(value, param, param)
    return plain


def _plain(value: Any, where: str, param: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        out = {}
        for key, entry in value.items():
            if not isinstance(key, str):
                raise InvalidRequest(f"{where} has the key {_shown(key)}: expected text, such as {str(key)!r}", param)
            out[str.__str__(key)] = _plain(entry, f"{where}[{str.__str__(key)!r}]", param)
        return out
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{where}[{n}]", param) for n, entry in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
        return str.__str__(value)
    if isinstance(value, int) and _LEAST <= value <= _MOST:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    raise InvalidRequest(f"{where} is {_shown(value)}: {_EXPECTED}", param)


def _shown(value: Any) -> str:
    text = ascii(value)
    return f"{text if len(text) <= 60 else f'{text[:57]}...'} ({type(value).__name__})"
