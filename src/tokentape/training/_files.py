"""Files of samples: Parquet or JSON lines of trajectories with their final mask and one more column, `group`.

They can also be read as trajectories. `tokentape.samples_version` in a Parquet file's metadata, and `samples_version`
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
"""The version changes if a field is changed or removed, not if one is added."""


def write_samples(samples: Iterable[Sample], path: str | Path) -> int:
    """Write samples to a file, as JSON lines if it is named `.jsonl`, else as Parquet. Return their number."""
    return write_file(samples, path, SAMPLES)


def read_samples(path: str | Path) -> Iterator[Sample]:
    """Yield the samples of a file, bit for bit. Raises `InvalidRequest` for another format or version."""
    return cast("Iterator[Sample]", iter_file(path, SAMPLES))


def to_dataset(samples: Iterable[Sample]) -> datasets.Dataset:
    """Return a Hugging Face dataset in memory, with one row per sample. Needs `datasets`."""
    import datasets

    return datasets.Dataset(datasets.table.InMemoryTable(trajectories_table(list(samples), layout=SAMPLES)))
