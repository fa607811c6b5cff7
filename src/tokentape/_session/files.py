"""Read and write files of trajectories: JSON lines if the name ends with `.jsonl`, else Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokentape._durable import durable_file
from tokentape._session.arrow import iter_parquet, write_parquet
from tokentape._session.fields import TRAJECTORIES, Layout
from tokentape._session.jsonl import read_jsonl, write_jsonl
from tokentape.types import Trajectory


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """Return the trajectories in a file written by `tokentape export` or `write_trajectories`, bit for bit.

    The arrays of a Parquet file are read-only. Raises `InvalidRequest` if the file is corrupt, does not contain
    trajectories, or has a schema version that this release does not read, and `OSError` if it can't be opened.

    >>> for trajectory in tokentape.read_trajectories("trajectories.parquet"):      # doctest: +SKIP
    ...     trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs
    """
    return list(iter_file(path))


def write_trajectories(trajectories: Iterable[Trajectory], path: str | Path) -> int:
    """Write trajectories with their columns and payloads to a file, and return their number.

    For Parquet all of them are in memory, because a file's columns are fixed before its first row. JSON lines are
    written one by one.
    """
    return write_file(trajectories, path)


def iter_file(path: str | Path, layout: Layout = TRAJECTORIES) -> Iterator[Trajectory]:
    """Yield the rows in a file with this layout. Raises the errors of `read_trajectories`."""
    return read_jsonl(path, layout) if Path(path).suffix == ".jsonl" else iter_parquet(path, layout=layout)


def write_file(trajectories: Iterable[Trajectory], path: str | Path, layout: Layout = TRAJECTORIES) -> int:
    """Write a file with this layout, and return the number of rows. If it raises, no file appears."""
    with durable_file(Path(path)) as file:
        if Path(path).suffix == ".jsonl":
            return write_jsonl(trajectories, file, layout)
        return write_parquet(list(trajectories), file, layout=layout)
