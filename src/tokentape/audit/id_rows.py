"""Sequences of ids from wherever they lie: a record, a file of trajectories, or anybody's Parquet or JSON.

What was sampled is told by spans: turns in our own formats; elsewhere a mask, a completion column beside a prompt
column, or the whole row. One row is in memory at a time, of Parquet a small batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.errors import InvalidRequest
from tokentape.session.arrow import VERSION_KEY
from tokentape.store import Store, StoredSession
from tokentape.store.location import EXPECTED, is_record, open_record
from tokentape.types import Codes, Provenance, TokenIds, Trajectory

IDS_COLUMNS = ("token_ids", "input_ids", "completion_ids", "output_ids", "tokens", "ids")
"""Names that are looked for, in this order."""
MASK_COLUMNS = ("loss_mask", "completion_mask", "assistant_masks", "mask")
NAME_COLUMNS = ("session_id", "sample_id", "id", "uid")

_BATCH_ROWS = 64

_Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of somebody else's file mean what; None are looked for by their usual names."""

    ids: str | None = None
    mask: str | None = None
    """1 where a token was sampled. With a prompt column it belongs to the ids, not to the prompt."""
    prompt: str | None = None
    """Ids in front of `ids`, which were not sampled."""
    name: str | None = None
    by: tuple[str, ...] = ()
    """Further columns whose values the report is split by."""


@dataclass(frozen=True, slots=True)
class Span:
    """A completion within a row."""

    start: int
    end: int
    labels: Mapping[str, str] = field(default_factory=dict)
    """What it is counted under: `turn`, `temperature`, `weights`, names of columns."""


@dataclass(frozen=True, slots=True)
class IdRow:
    """One sequence of ids."""

    name: str
    """Names the row in its file: `SESSION:LEAF`, or what a column says, or its number from 1."""
    ids: TokenIds
    spans: tuple[Span, ...]
    """What was sampled, in order, each sampled token in one row only."""
    provenance: Codes | None = None
    line: int = 1
    """Its line in a file that has one row per line."""


def iter_rows(location: str | Path, columns: Columns = Columns()) -> Iterator[IdRow]:
    """Yield the sequences of a record, wherever it is, or of a file named `.parquet`, `.jsonl` or `.json`.

    Raises `InvalidRequest` for another file, for one without a column of ids, and for rows that are damaged; for a
    record as `open_record`.
    """
    if is_record(location):
        with open_record(location, read_only=True) as store:
            yield from store_rows(store)
        return
    path = Path(location)
    if path.suffix == ".parquet":
        yield from _parquet(path, columns)
    elif path.suffix == ".jsonl":
        yield from _lines(path, columns)
    elif path.suffix == ".json":
        yield _whole(path, columns)
    else:
        raise InvalidRequest(f"{path}: expected {EXPECTED} or a file named .parquet, .jsonl or .json")


def parquet_rows(path: str | Path, columns: Columns = Columns(), row_group: int | None = None) -> Iterator[IdRow]:
    """Yield the sequences of a Parquet file, or of one of its row groups. Raises as `iter_rows`."""
    return _parquet(Path(path), columns, row_group)


def store_rows(store: Store) -> Iterator[IdRow]:
    """Yield the sequences of a record, whose gateway may be running."""
    for stored in store.iter_sessions():
        yield from session_rows(stored)


def session_rows(stored: StoredSession) -> Iterator[IdRow]:
    """A row for each branch of a session; turns that branches share are sampled in the first of them."""
    temperatures = {turn.seq: turn.sampling.get("temperature") for turn in stored.turns}
    for one in stored.trajectories():
        yield trajectory_row(one, temperatures)


def trajectory_row(one: Trajectory, temperatures: Mapping[int, float | None] | None = None) -> IdRow:
    """The row of a trajectory. `temperatures` are by `seq` of turns."""
    spans = []
    for n, (start, end) in enumerate(zip(one.completion_starts.tolist(), one.completion_ends.tolist(), strict=True)):
        if not one.loss_mask[start:end].any():
            continue
        labels = {"turn": _turn_label(n), "weights": one.weight_versions[n]}
        if temperatures is not None:
            temperature = temperatures.get(one.turns[n])
            labels["temperature"] = "unknown" if temperature is None else f"{temperature:g}"
        spans.append(Span(start, end, labels))
    return IdRow(f"{one.session_id}:{one.leaf}", one.token_ids, tuple(spans), one.provenance)


def _turn_label(n: int) -> str:
    """Turns from 1, in classes that grow."""
    for last in (1, 2, 4, 8, 16, 32, 64):
        if n < last:
            first = last // 2 + 1
            return str(last) if first >= last else f"{first}-{last}"
    return "65 on"


def _parquet(path: Path, columns: Columns, row_group: int | None = None) -> Iterator[IdRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid:
        raise InvalidRequest(f"{path} is not a Parquet file") from None
    with file:
        names = file.schema_arrow.names
        groups = None if row_group is None else [row_group]
        if VERSION_KEY in (file.schema_arrow.metadata or {}) and columns == Columns():
            wanted = [name for name in _OWN if name in names]
            for row in _batches(file, wanted, groups):
                yield _own_row(row, str(path))
            return
        chosen = _chosen(columns, names, str(path))
        given = (chosen.ids, chosen.mask, chosen.prompt, chosen.name, *chosen.by)
        wanted = [name for name in dict.fromkeys(given) if name]
        first = 1 + sum(file.metadata.row_group(n).num_rows for n in range(row_group or 0))
        for number, row in enumerate(_batches(file, wanted, groups), first):
            yield _foreign_row(row, chosen, number, f"{path}, row {number}")


_OWN = (
    "session_id",
    "leaf",
    "token_ids",
    "provenance",
    "loss_mask",
    "completion_starts",
    "completion_ends",
    "weight_versions",
)


def _batches(file: Any, names: Sequence[str], row_groups: Sequence[int] | None) -> Iterator[_Row]:
    """Rows with lists as arrays; those of all row groups if None are named."""
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(names), row_groups=row_groups):
        found = {name: batch.column(name) for name in batch.schema.names}
        for at in range(batch.num_rows):
            yield {name: _value(column[at]) for name, column in found.items()}


def _value(scalar: Any) -> Any:
    values = scalar.values if hasattr(scalar, "values") else None
    if values is None:
        return scalar.as_py()
    return values.to_pylist() if _is_text(values) else values.to_numpy(zero_copy_only=False)


def _is_text(values: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))


def _lines(path: Path, columns: Columns) -> Iterator[IdRow]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path} line {number}"
            yield replace(_json_row(_parsed(line, where), columns, number, where), line=number)


def _whole(path: Path, columns: Columns) -> IdRow:
    return _json_row(_parsed(path.read_bytes(), str(path)), columns, 1, str(path))


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from None


def _json_row(value: Any, columns: Columns, number: int, where: str) -> IdRow:
    if isinstance(value, list):
        ids = _ids(value, where)
        return IdRow(str(number), ids, (Span(0, len(ids)),))
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where}: expected an object or a list of ids, found {type(value).__name__}")
    if "schema_version" in value and columns == Columns():
        return _own_row(value, where)
    return _foreign_row(value, _chosen(columns, list(value), where), number, where)


def _own_row(row: _Row, where: str) -> IdRow:
    try:
        ids = _ids(row["token_ids"], where)
        mask = np.asarray(row["loss_mask"], np.bool_)
        starts, ends = (np.asarray(row[name]).tolist() for name in ("completion_starts", "completion_ends"))
        weights = row["weight_versions"]
        provenance = np.asarray(row["provenance"], np.uint8)
        for code in np.unique(provenance).tolist():
            Provenance(code)
        name = f"{row['session_id']}:{row['leaf']}"
        spans = [
            Span(start, end, {"turn": _turn_label(n), "weights": weights[n]})
            for n, (start, end) in enumerate(zip(starts, ends, strict=True))
            if mask[start:end].any()
        ]
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{where}: a trajectory is damaged ({type(error).__name__}: {error})") from None
    if not len(ids) == len(mask) == len(provenance):
        raise InvalidRequest(
            f"{where}: a trajectory is damaged: {len(ids)} token_ids, {len(mask)} in loss_mask, {len(provenance)} in "
            "provenance"
        )
    return IdRow(name, ids, tuple(spans), provenance)


def _chosen(columns: Columns, names: Sequence[str], where: str) -> Columns:
    """With the names of the columns that are there."""
    given = (columns.ids, columns.mask, columns.prompt, columns.name, *columns.by)
    absent = [name for name in given if name is not None and name not in names]
    if absent:
        raise InvalidRequest(f"{where}: no column {', '.join(absent)}; there are {', '.join(names)}")

    def first(named: str | None, usual: Sequence[str]) -> str | None:
        return named or next((name for name in usual if name in names), None)

    paired = "prompt_ids" in names and "completion_ids" in names
    ids = columns.ids or ("completion_ids" if paired else first(None, IDS_COLUMNS))
    if ids is None:
        raise InvalidRequest(
            f"{where}: no column of ids: looked for {', '.join(IDS_COLUMNS)}, found {', '.join(names)}; name it with "
            "--ids-column"
        )
    prompt = columns.prompt or ("prompt_ids" if paired and ids == "completion_ids" else None)
    return Columns(ids, first(columns.mask, MASK_COLUMNS), prompt, first(columns.name, NAME_COLUMNS), columns.by)


def _foreign_row(row: _Row, columns: Columns, number: int, where: str) -> IdRow:
    own = _ids(row.get(columns.ids or ""), where)
    prompt = _ids(row.get(columns.prompt), where) if columns.prompt else own[:0]
    ids = np.concatenate([prompt, own])
    labels = {name: str(row.get(name)) for name in columns.by}
    mask = row.get(columns.mask) if columns.mask else None
    if mask is None:
        spans = [(len(prompt), len(ids))]
    else:
        sampled = _mask(mask, f"{where}: {columns.mask}")
        if len(sampled) == len(own):
            sampled = np.concatenate([np.zeros(len(prompt), np.bool_), sampled])
        if len(sampled) != len(ids):
            raise InvalidRequest(f"{where}: {len(sampled)} values of {columns.mask} for {len(own)} ids")
        spans = _runs(sampled)
    name = row.get(columns.name) if columns.name else None
    provenance = None
    if mask is not None or len(prompt):
        provenance = np.full(len(ids), Provenance.TEMPLATE, np.uint8)
        for start, end in spans:
            provenance[start:end] = Provenance.SAMPLED
    found = tuple(
        Span(start, end, {**labels, **({"turn": _turn_label(n)} if mask is not None else {})})
        for n, (start, end) in enumerate(spans)
    )
    return IdRow(str(number) if name is None else str(name), ids, found, provenance)


def _ids(value: Any, where: str) -> TokenIds:
    try:
        wide = np.asarray(value)
        if wide.ndim == 1 and not len(wide):
            return np.empty(0, np.int32)
        if wide.ndim != 1 or wide.dtype.kind not in "iu" or wide.min() < 0 or wide.max() >= 2**31:
            raise ValueError
        return wide.astype(np.int32)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{where}: expected a list of token ids") from None


def _mask(value: Any, where: str) -> npt.NDArray[np.bool_]:
    try:
        found: npt.NDArray[np.bool_] = np.asarray(value, np.float64) > 0
    except (TypeError, ValueError):
        found = np.zeros((), np.bool_)
    if found.ndim != 1:
        raise InvalidRequest(f"{where}: expected a list of numbers, 1 where a token was sampled")
    return found


def _runs(which: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], which, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
