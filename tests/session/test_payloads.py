from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape._session.payloads import narrowest, rows_as_bytes, rows_from_bytes, turn_payload


@given(context=st.integers(0, 8), own=st.integers(1, 6), start=st.integers(0, 14), count=st.integers(0, 14))
def test_turn_keeps_rows_of_its_tokens_and_the_last_of_its_parent(
    context: int, own: int, start: int, count: int
) -> None:
    """Against the rows named by the offset of their token."""
    rows = np.arange(start, min(start + count, context + own), dtype=np.int32)
    kept = turn_payload("s", 1, "offsets", context, start, rows)
    expected = [offset for offset in rows.tolist() if offset >= max(context - 1, 0)]
    if kept is None:
        assert expected == []
    else:
        assert kept.rows.tolist() == expected
        assert kept.start == expected[0] - context


@pytest.mark.parametrize("dtype", ["bool", "int8", ">i2", "<u4", "float16", ">f4"])
def test_rows_come_back_from_their_bytes(dtype: str) -> None:
    rows = np.arange(12).reshape(3, 2, 2).astype(dtype)
    name, data = rows_as_bytes(rows)
    back = rows_from_bytes(name, rows.shape, data)
    np.testing.assert_array_equal(back, rows)
    assert back.dtype.isnative


@given(st.lists(st.integers(-(2**40), 2**40), max_size=3), st.integers(0, 40))
def test_narrow_rows_hold_the_same_numbers(numbers: list[int], shift: int) -> None:
    rows = np.array([number >> shift for number in numbers], np.int64)
    packed = narrowest(rows)
    assert packed.astype(np.int64).tolist() == rows.tolist()
    if numbers and rows.min() >= 0 and rows.max() < 256:
        assert packed.dtype == np.uint8


def test_rows_of_floats_are_left_alone() -> None:
    rows = np.array([1.0, 2.0], np.float16)
    assert narrowest(rows) is rows


@pytest.mark.parametrize(("dtype", "shape"), [("|O", [1]), ("<U2", [1]), ("|u1", [3]), ("nonsense", [8])])
def test_bytes_of_the_wrong_row_format_are_refused(dtype: str, shape: list[int]) -> None:
    with pytest.raises(ValueError, match=r"."):
        rows_from_bytes(dtype, shape, bytes(8))
