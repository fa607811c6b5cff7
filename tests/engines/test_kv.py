from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tokentape.engines._kv import NO_PREFIX, DecodeBatch, LayerTensors, Prefix, PrefixCache  # noqa: E402

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def array(ids: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(ids, dtype=np.int64)


def contexts(*lengths: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 300, length) for length in lengths]


def plain(model: Any, ids: np.ndarray[Any, Any]) -> Any:
    return model(torch.from_numpy(ids)[None]).logits[0, -1]


def layers(tokens: int) -> LayerTensors:
    return [(torch.zeros(1, tokens, 1), torch.zeros(1, tokens, 1))]


def test_batched_rows_compute_the_same_as_single_rows(model: Any) -> None:
    rows = contexts(5, 1, 30)
    batch = DecodeBatch(model)
    logits = batch.prefill(rows, [NO_PREFIX] * 3)
    for got, ids in zip(logits, rows, strict=True):
        torch.testing.assert_close(got, plain(model, ids), atol=2e-5, rtol=0)


def test_joining_and_leaving_rows_do_not_disturb_the_others(model: Any) -> None:
    rows = contexts(40, 3, 12, 20)
    batch = DecodeBatch(model)
    batch.prefill(rows[:2], [NO_PREFIX] * 2)
    batch.decode([7, 8])
    batch.prefill(rows[2:], [NO_PREFIX] * 2)
    batch.keep([1, 3])
    logits = batch.decode([9, 10])
    assert len(batch) == 2
    torch.testing.assert_close(logits[0], plain(model, np.append(rows[1], [8, 9])), atol=2e-5, rtol=0)
    torch.testing.assert_close(logits[1], plain(model, np.append(rows[3], [10])), atol=2e-5, rtol=0)


def test_columns_of_padding_are_dropped(model: Any) -> None:
    batch = DecodeBatch(model)
    batch.prefill(contexts(40, 3, 12), [NO_PREFIX] * 3)
    batch.keep([1, 2])
    assert batch._mask.shape == (2, 12)
    assert {layer.keys.shape[-2] for layer in batch._cache.layers} == {12}


def test_a_prefill_over_reused_prefixes_gives_the_same_logits(model: Any) -> None:
    rows = contexts(50, 6, 33, 20)
    known = DecodeBatch(model)
    known.prefill([rows[0][:45], rows[2][:10], rows[3][:19]], [NO_PREFIX] * 3)
    prefixes = [Prefix(45, known.row(0)), NO_PREFIX, Prefix(8, known.row(1)), Prefix(19, known.row(2))]
    batch = DecodeBatch(model)
    logits = batch.prefill(rows, prefixes)
    for got, ids in zip(logits, rows, strict=True):
        torch.testing.assert_close(got, plain(model, ids), atol=2e-5, rtol=0)
    after = batch.decode([1, 2, 3, 4])
    for row, ids in enumerate(rows):
        torch.testing.assert_close(after[row], plain(model, np.append(ids, row + 1)), atol=2e-5, rtol=0)


def test_a_reused_prefix_is_not_computed_again(model: Any) -> None:
    [row] = contexts(50)
    known = DecodeBatch(model)
    known.prefill([row[:45]], [NO_PREFIX])
    widths: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    DecodeBatch(model).prefill([row], [Prefix(45, known.row(0))])
    handle.remove()
    assert widths == [5]


@given(known=st.lists(IDS, max_size=6), context=IDS)
def test_longest_cached_prefix_is_used(known: list[list[int]], context: list[int]) -> None:
    cache = PrefixCache(1 << 20)
    for ids in known:
        cache.put(array(ids), layers(len(ids)))

    def common(ids: list[int]) -> int:
        return max(n for n in range(len(context)) if ids[:n] == context[:n])

    match = cache.longest(array(context))
    assert match.length == max(map(common, known), default=0)
    assert not match.length or match.layers[0][0].shape[1] >= match.length


def test_last_token_is_always_computed() -> None:
    cache = PrefixCache(1 << 20)
    cache.put(array([1, 2, 3]), layers(3))
    assert cache.longest(array([1, 2, 3])).length == 2


def test_least_recently_used_entry_is_evicted() -> None:
    cache = PrefixCache(max_bytes=2 * 3 * 8)
    for first in (1, 2):
        cache.put(array([first] * 3), layers(3))
    cache.longest(array([1, 1, 9]))
    cache.put(array([3] * 3), layers(3))
    assert [cache.longest(array([first] * 3)).length for first in (1, 2, 3)] == [2, 0, 2]


def test_too_large_entry_evicts_nothing() -> None:
    cache = PrefixCache(max_bytes=3 * 8)
    cache.put(array([1, 1, 1]), layers(3))
    cache.put(array([2] * 4), layers(4))
    assert [cache.longest(array([first] * 3)).length for first in (1, 2)] == [2, 0]


def test_longer_context_replaces_its_prefix() -> None:
    cache = PrefixCache(max_bytes=4 * 8)
    cache.put(array([1]), layers(1))
    cache.put(array([1, 2]), layers(2))
    cache.put(array([1]), layers(1))
    cache.put(array([5, 5]), layers(2))
    assert cache.longest(array([1, 2, 3])).length == 2
    assert cache.longest(array([5, 5, 3])).length == 2
