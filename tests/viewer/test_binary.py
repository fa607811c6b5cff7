"""Arrays on their way to a browser."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.viewer.packed import header, unpack
from tokentape.viewer._views import pack

any_array = st.sampled_from([np.uint8, np.int32, np.float32, np.bool_]).flatmap(
    lambda dtype: arrays(dtype, st.integers(0, 40))
)


@given(st.dictionaries(st.text(max_size=8), any_array, max_size=5), st.dictionaries(st.text(), st.text(), max_size=3))
def test_arrays_round_trip_bit_for_bit_and_are_aligned(drawn_arrays: dict[str, Any], meta: dict[str, str]) -> None:
    meta.pop("arrays", None)
    packed = pack(meta, drawn_arrays)
    arrays = unpack(packed)
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in drawn_arrays.items()
    }
    parsed_header = header(packed)
    assert {name: value for name, value in parsed_header.items() if name != "arrays"} == meta
    assert all(array["offset"] % 8 == 0 for array in parsed_header["arrays"].values())
    assert len(packed) % 8 == 0


def test_numbers_are_packed_little_endian() -> None:
    packed = pack({}, {"ids": np.array([1, 256], ">i4")})
    assert packed.endswith(bytes([1, 0, 0, 0, 0, 1, 0, 0]))


def test_array_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        pack({}, {"values": np.zeros(2)})


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        pack({"reward": float("nan")}, {})


def test_the_header_is_plain_json() -> None:
    packed = pack({"name": "ü"}, {"a": np.zeros(3, np.uint8)})
    size = int.from_bytes(packed[4:8], "little")
    assert json.loads(packed[8 : 8 + size]) == {
        "name": "ü",
        "arrays": {"a": {"dtype": "u1", "offset": 0, "length": 3}},
    }
