"""Lists of merges are read back as they were written, and what differs between two is named."""

from __future__ import annotations

import json

import pytest

from tests.chat.conftest import SMALL
from tokentape.audit._lock.comparing import merges_apart
from tokentape.audit._lock.lockfile import packed_merges, unpacked_merges


def test_merges_come_back() -> None:
    model = json.loads((SMALL / "qwen3" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    packed = packed_merges(model["vocab"], merges)
    assert packed is not None
    assert unpacked_merges(packed, model["vocab"]) == merges
    with pytest.raises(ValueError, match="corrupt merges, or merges of a different vocabulary"):
        unpacked_merges(packed, {"a": 10**6})


def test_merges_that_make_no_piece_are_not_packed() -> None:
    assert packed_merges({"a": 0, "b": 1}, [("a", "b")]) is None


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("ab bc cd", ""),
        ("ab cd", "1 gone: 'b c'"),
        ("ab bc xy cd", "1 new: 'x y'"),
        ("cd ab bc", "1 moved: 'c d'"),
        ("", "3 gone: 'a b', 'b c', 'c d'"),
    ],
)
def test_differences_are_named(now: str, expected: str) -> None:
    was = [("a", "b"), ("b", "c"), ("c", "d")]
    assert merges_apart(was, [(merge[0], merge[1]) for merge in now.split()]) == expected
