"""Drift measured in parts and merged is drift measured in one place, to the last digit."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.searching import examples
from tokentape.audit._drift import meter as drift
from tokentape.audit._drift.meter import DriftTally, RowMeter, measure_drift
from tokentape.audit._id_rows import IdRow, Span, iter_rows, parquet_rows
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer

PIECES = ("They", " co", "st", " 1", "2", ".", " ", "\n", "ca", "fé", "<END>")


@pytest.fixture(scope="session")
def tokenizer(renderer: Renderer) -> Tokenizer:
    return renderer.tokenizer


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[list[str]], list[str]]:
    """The completions of a row, in pieces that are encoded one by one, and the label of each."""
    completions = draw(st.lists(st.lists(st.sampled_from(PIECES), max_size=6), min_size=1, max_size=3))
    return completions, [draw(st.sampled_from("abcde")) for _ in completions]


def row_of(number: int, made: tuple[list[list[str]], list[str]], tokenizer: Tokenizer) -> IdRow:
    ids: list[int] = []
    spans = []
    for completion, label in zip(*made, strict=True):
        ids += tokenizer.encode_plain("So: ")
        start = len(ids)
        ids += [token_id for piece in completion for token_id in tokenizer.encode_plain(piece)]
        spans.append(Span(start, len(ids), {"by": label}))
    return IdRow(str(number), np.array(ids, np.int32), tuple(spans))


@given(made=st.lists(texts(), max_size=12), cuts=st.lists(st.integers(0, 12), max_size=3))
@settings(max_examples=examples(25))
def test_merging_parts_in_order_gives_the_whole_report(
    tokenizer: Tokenizer, made: list[tuple[list[list[str]], list[str]]], cuts: list[int]
) -> None:
    rows = [row_of(number, ids, tokenizer) for number, ids in enumerate(made)]
    ends = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    with pytest.MonkeyPatch.context() as patch:
        # Small enough for several batches and for values that are counted together.
        patch.setattr(drift, "BATCH_TOKENS", 100)
        patch.setattr(drift, "VALUES", 3)
        whole = measure_drift(rows, tokenizer)
        tally, worker = DriftTally(), RowMeter(tokenizer)
        for start, end in pairwise(ends):
            for part in pickle.loads(pickle.dumps(list(worker.measure(rows[start:end])))):
                tally.add(part)
        assert tally.report(tokenizer.sha256) == whole


def test_measuring_row_groups_equals_measuring_the_file(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "ids.parquet"
    table = pa.table({"input_ids": [[n, n + 1, n + 2] for n in range(7)], "mask": [[0, 1, 1]] * 7})
    pq.write_table(table, path, row_group_size=3)
    apart = [row for group in range(3) for row in parquet_rows(path, row_group=group)]
    whole = list(iter_rows(path))
    assert [row.name for row in apart] == [row.name for row in whole] == [str(n) for n in range(1, 8)]
    assert [(row.ids.tolist(), row.spans) for row in apart] == [(row.ids.tolist(), row.spans) for row in whole]
