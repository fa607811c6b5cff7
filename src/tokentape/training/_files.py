"""Samples as files: Parquet and JSON lines of trajectories with the mask decided and one more column, `group`.

Whatever reads trajectories reads them too. `tokentape.samples_version` in a Parquet file's metadata, `samples_version`
in a line, is the version of the fields that only samples have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokentape._session.arrow import trajectories_table
from tokentape._session.fields import FileField, Layout
from tokentape._session.files import iter_file, write_file
from tokentape.training._samples import Sample

if TYPE_CHECKING:
    import datasets

SAMPLES = Layout(Sample, (FileField("group", "string", nullable=True),), "samples_version", 1)
"""Fields may be added under the same version; one that changes or goes away raises it."""


def write_samples(samples: Iterable[Sample], path: str | Path) -> int:
    """Write samples to a file, JSON lines if it is named `.jsonl`, else Parquet. Return how many."""
    return write_file(samples, path, SAMPLES)


def read_samples(path: str | Path) -> Iterator[Sample]:
    """Yield the samples of such a file, bit for bit. Raises `InvalidRequest` for another file or version."""
    return cast("Iterator[Sample]", iter_file(path, SAMPLES))


def to_dataset(samples: Iterable[Sample]) -> datasets.Dataset:
    """Return a Hugging Face dataset in memory, a row per sample. Needs `datasets`."""
    import datasets

    return datasets.Dataset(datasets.table.InMemoryTable(trajectories_table(list(samples), layout=SAMPLES)))
