from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape._supports import is_known, kept_ids, pack, too_many

VOCABULARY = 150_000
scattered = st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60)
dense = st.tuples(st.integers(0, VOCABULARY), st.sets(st.integers(0, 300), min_size=1)).map(
    lambda drawn: {drawn[0] + offset for offset in drawn[1]}
)


@given(scattered | dense)
def test_ids_are_returned_in_order(ids: set[int]) -> None:
    support = pack(list(ids), 10**6)
    found = kept_ids(support)
    assert found is not None
    assert found.dtype == np.int32
    assert found.tolist() == sorted(ids)
    assert is_known(support)
    # Never more than a bitmap from the first id to the last, nor than five bytes per id.
    assert len(support) <= min(5 * len(ids) + 1, (max(ids) - min(ids)) // 8 + 12)


@pytest.mark.parametrize("kept", [101, VOCABULARY])
def test_large_supports_keep_only_their_size(kept: int) -> None:
    support = pack(np.arange(kept), 100)
    assert (too_many(support), kept_ids(support), is_known(support)) == (kept, None, False)
    assert len(support) <= 4


def test_empty_bytes_mean_unknown_support() -> None:
    assert (kept_ids(b""), is_known(b""), too_many(b"")) == (None, False, None)


@pytest.mark.parametrize("support", [b"\x03\x01", b"\x01\x80", b"\x02\xff", b"\x01\x03"])
def test_other_bytes_are_refused(support: bytes) -> None:
    with pytest.raises(ValueError, match=r"unknown format|ends within"):
        kept_ids(support)


@pytest.mark.parametrize("ids", [[], [-1, 4]])
def test_a_support_has_ids(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one id"):
        pack(ids, 10)
