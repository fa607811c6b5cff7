"""The drift meter over many files: row groups are measured by actors, and what they found is merged in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokentape.audit.drift.meter import DriftMeter, DriftTally
from tokentape.audit.drift.report import DriftReport
from tokentape.audit.id_rows import Columns, iter_rows, parquet_rows
from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.ray.work import in_order

USUAL = Columns()
"""Columns are looked for by their usual names."""


@dataclass(frozen=True, slots=True)
class DriftFile:
    """A file, or one row group of a Parquet file."""

    path: Path
    row_group: int | None = None


def drift(
    paths: str | Path | Iterable[str | Path],
    tokenizer: str | Path,
    *,
    columns: Columns = USUAL,
    actors: int | None = None,
    cpus: float = 1.0,
) -> DriftReport:
    """Measure drift in files of ids, on all machines of a Ray cluster: what `measure_drift` says of all their rows.

    Args:
        paths: files as `iter_rows` takes them, and folders of Parquet files; to be read on every machine.
        tokenizer: model folder, to be read on every machine.
        columns: which columns of somebody else's files mean what.
        actors: at most so many processes; as many as there are CPUs if None.
        cpus: of each.

    Raises:
        InvalidRequest: there are no such files, they hold no ids, or ids of another model.
        TokenizerUnusable: the folder holds no tokenizer.

    Example:
        >>> drift("exports/", "models/Qwen3-8B").tokens.share      # doctest: +SKIP
        0.0031

    """
    loaded = Tokenizer.load(tokenizer)
    meter = DriftMeter(loaded)
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    opened = partial(_measuring, Path(tokenizer).resolve(), loaded.sha256, columns)
    for part in in_order(list(_pieces(named)), opened, actors=actors, cpus=cpus):
        meter.merge(part)
    return meter.report()


def _measuring(folder: Path, sha256: str, columns: Columns) -> Callable[[DriftFile], DriftTally]:
    tokenizer = Tokenizer.load(folder)
    if tokenizer.sha256 != sha256:
        raise InvalidRequest(f"{folder} holds another tokenizer on one of the machines; expected {sha256}", "tokenizer")
    meter = DriftMeter(tokenizer, partial=True)

    def measure(piece: DriftFile) -> DriftTally:
        if piece.row_group is None:
            rows = iter_rows(piece.path, columns)
        else:
            rows = parquet_rows(piece.path, columns, piece.row_group)
        for row in rows:
            meter.add(row)
        return meter.part()

    return measure


def _pieces(paths: Iterable[str | Path]) -> Iterator[DriftFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in _files(map(Path, paths)):
        if path.suffix != ".parquet":
            yield DriftFile(path)
            continue
        try:
            groups = pq.read_metadata(path).num_row_groups
        except pa.ArrowInvalid:
            raise InvalidRequest(f"{path} is not a Parquet file") from None
        yield from (DriftFile(path, number) for number in range(groups))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        path = path.resolve()
        if path.is_file():
            yield path
            continue
        found = sorted(path.rglob("*.parquet"))
        if not found:
            raise InvalidRequest(f"no Parquet files at {path}; name files of ids, or folders of such files", "paths")
        yield from found
