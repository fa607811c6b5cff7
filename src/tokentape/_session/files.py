"""Files of trajectories: Parquet, or JSON lines for a name that ends with `.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokentape._session.arrow import iter_parquet, write_parquet
from tokentape._session.fields import TRAJECTORIES, Layout
from tokentape._session.jsonl import read_jsonl, write_jsonl
from tokentape.types import Trajectory


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """Return the trajectories of a file that `tokentape export` or `write_trajectories` wrote, bit for bit.

    The arrays are read-only. Raises `InvalidRequest` if the file is damaged, is something else, or has a schema version
    that this release does not read, and `OSError` if it can't be opened.

    >>> for trajectory in tokentape.read_trajectories("trajectories.parquet"):      # doctest: +SKIP
    ...     trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs
    """
    return list(iter_file(path))


def write_trajectories(trajectories: Iterable[Trajectory], path: str | Path) -> int:
    """Write trajectories with their columns and payloads to a file, and return how many there are."""
    return write_file(trajectories, path)


def iter_file(path: str | Path, layout: Layout = TRAJECTORIES) -> Iterator[Trajectory]:
    """Yield what a file of this layout holds. Raises as `read_trajectories`."""
    return read_jsonl(path, layout) if Path(path).suffix == ".jsonl" else iter_parquet(path, layout=layout)


def write_file(trajectories: Iterable[Trajectory], path: str | Path, layout: Layout = TRAJECTORIES) -> int:
    """Write a file of this layout, and return how many rows there are."""
    if Path(path).suffix == ".jsonl":
        return write_jsonl(trajectories, path, layout)
    return write_parquet(list(trajectories), path, layout=layout)
