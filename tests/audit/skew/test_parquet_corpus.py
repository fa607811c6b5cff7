"""Parquet files as a corpus: the same documents as JSON lines of the same records, row group by row group."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.audit.skew.cases import TINY, base, healthy
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.corpus import compare_corpus, corpus_files, documents_of, ranges_of
from tokentape.errors import InvalidRequest

RECORDS = [
    {"text": f"record {n} cafe\u0301", "id": n, "messages": [{"role": "user", "content": f"question {n}"}]}
    for n in range(5)
] + [{"text": None, "id": 5, "messages": None}]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=2)
    return path


def test_parquet_documents_equal_those_of_json_lines(parquet: Path, tmp_path: Path) -> None:
    lines = tmp_path / "c.jsonl"
    lines.write_text("\n".join(map(json.dumps, RECORDS)))
    ranges = list(ranges_of([parquet]))
    assert len(ranges) == 3
    (whole,) = ranges_of([lines])
    assert [text for text_range in ranges for text in documents_of(text_range)] == list(documents_of(whole))
    assert corpus_files([tmp_path]) == [lines, parquet]


def test_parquet_corpus_is_compared_and_explained(parquet: Path) -> None:
    sick = base(TINY).side(spec={**base(TINY).spec, "normalizer": None})
    report = audit(healthy(TINY), sick, corpus=[parquet])
    assert report.corpus is not None
    assert (report.corpus.documents, report.corpus.differing) == (10, 5)
    assert [finding.kind for finding in report.findings] == ["normalizer"]


def test_parquet_bytes_are_the_sum_of_its_row_groups(parquet: Path) -> None:
    statistics, differing = compare_corpus(healthy(TINY), healthy(TINY), [parquet], workers=1)
    assert (statistics.documents, statistics.differing, differing) == (10, 0, [])
    assert statistics.bytes == sum(text_range.end - text_range.start for text_range in ranges_of([parquet]))


def test_file_that_only_has_the_parquet_suffix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    path.write_text("text")
    with pytest.raises(InvalidRequest, match="is not a Parquet file"):
        list(ranges_of([path]))


def test_records_without_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"number": [1, 2]}), path)
    assert [text for text_range in ranges_of([path]) for text in documents_of(text_range)] == []
    with pytest.raises(InvalidRequest, match="contains no text"):
        compare_corpus(healthy(TINY), healthy(TINY), [path], workers=1)
