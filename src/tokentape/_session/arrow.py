"""Write and read trajectories as Arrow tables and Parquet files.

Each trajectory is a row with the columns from `fields`. All per-token columns in a row, such as `loss_mask`, have the
same length. Columns `column_NAME` and `payload_NAME` exist if any trajectory has them, and are null in the other rows.
`loss_mask` is boolean: it takes a bit per token, and `datasets` returns it as a bool tensor that can multiply a loss.
The file's key-value metadata contains the version and the names of the provenance codes.

`pyarrow` (extra `parquet`) is imported on first use.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from tokentape._batches import batched
from tokentape._canonical import canonical_json
from tokentape._session.fields import COLUMN_PREFIX, PAYLOAD_PREFIX, TRAJECTORIES, FileField, Layout
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.types import Provenance, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

VERSION_KEY = b"tokentape.schema_version"

ROW_GROUP_TOKENS = 2**20
"""A row group ends after this many tokens, about 10 MB of arrays, so that readers can skip and stream."""

ROW_GROUP_ROWS = 1000
"""A row group has at most this many trajectories."""

Sink: TypeAlias = str | Path | IO[bytes]
"""A path or a binary file object to write to."""


def parquet_library(
    help_text: str = "pip install 'tokentape[parquet]', or write JSON lines, to a file named .jsonl",
) -> ModuleType:
    """Return `pyarrow.parquet`. Raises `UnsupportedParameter` if it is missing; `help_text` says how to install it."""
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise UnsupportedParameter(f"Parquet needs pyarrow, which is not installed; run: {help_text}") from None
    return cast(ModuleType, pq)


@dataclass(frozen=True, slots=True)
class ExtraNames:
    """The names of the columns and payloads that a file has in addition to the fields that every file has."""

    columns: tuple[str, ...] = ()
    payloads: tuple[str, ...] = ()


def extra_names(trajectories: Iterable[Trajectory]) -> ExtraNames:
    """Return the sorted names of all columns and payloads in `trajectories`."""
    columns: set[str] = set()
    payloads: set[str] = set()
    for trajectory in trajectories:
        columns |= trajectory.columns.keys()
        payloads |= trajectory.payloads.keys()
    return ExtraNames(tuple(sorted(columns)), tuple(sorted(payloads)))


def named_only(trajectory: Trajectory, extra: ExtraNames) -> Trajectory:
    """Return the trajectory without the columns and payloads that `extra` does not name."""
    if trajectory.columns.keys() <= {*extra.columns} and trajectory.payloads.keys() <= {*extra.payloads}:
        return trajectory
    return replace(
        trajectory,
        columns={name: values for name, values in trajectory.columns.items() if name in extra.columns},
        payloads={name: rows for name, rows in trajectory.payloads.items() if name in extra.payloads},
    )


@cache
def trajectory_schema(extra: ExtraNames = ExtraNames(), layout: Layout = TRAJECTORIES) -> pa.Schema:
    """Return the Arrow schema with the file's metadata. Only `reward` and extra columns and payloads can be null."""
    import pyarrow as pa

    def many(kind: pa.DataType, nullable: bool = False) -> pa.DataType:
        return pa.list_(pa.field("element", kind, nullable))

    def column(field: FileField) -> pa.Field:
        if isinstance(field.kind, tuple):
            members = [pa.field(name, pa.type_for_alias(kind), field.nullable) for name, kind in field.kind]
            return pa.field(field.name, many(pa.struct(members), field.nullable), nullable=False)
        kind = pa.string() if field.kind == "json" else pa.type_for_alias(field.kind)
        return pa.field(field.name, *((many(kind, field.nullable), False) if field.per else (kind, field.nullable)))

    payload = pa.struct(
        [
            pa.field("dtype", pa.string(), nullable=False),
            pa.field("shape", many(pa.int32()), nullable=False),
            pa.field("data", pa.binary(), nullable=False),
            pa.field("known", many(pa.bool_()), nullable=False),
        ]
    )
    return pa.schema(
        [
            *map(column, layout.fields),
            *(pa.field(COLUMN_PREFIX + name, many(pa.float32())) for name in extra.columns),
            *(pa.field(PAYLOAD_PREFIX + name, payload) for name in extra.payloads),
        ],
        metadata={
            **{f"tokentape.{name}".encode(): str(version) for name, version in layout.versions.items()},
            b"tokentape.provenance": json.dumps({code.name.lower(): int(code) for code in Provenance}),
        },
    )


def trajectories_table(
    trajectories: Sequence[Trajectory], extra: ExtraNames | None = None, layout: Layout = TRAJECTORIES
) -> pa.Table:
    """Return a table with the schema `trajectory_schema(extra)` and one row per trajectory, in the given order.

    `extra` names the columns and payloads to write; None writes all of them.
    """
    import pyarrow as pa

    schema = trajectory_schema(extra_names(trajectories) if extra is None else extra, layout)
    rows = [layout.values(trajectory) for trajectory in trajectories]

    def column(field: pa.Field) -> pa.Array:
        values = [row.get(field.name) for row in rows]
        if any(isinstance(value, np.ndarray) for value in values):
            return _lists(values, field.type)
        if field.name == "metadata":
            values = [canonical_json(value) for value in values]
        return pa.array(values, field.type)

    return pa.Table.from_arrays(list(map(column, schema)), schema=schema)


def _lists(rows: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build an Arrow list array from flat values: a Python object per token would take fifty times the memory."""
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum([0 if row is None else len(row) for row in rows])]).astype(np.int32)
    values = pa.array(np.concatenate([row for row in rows if row is not None]), kind.value_type)
    absent = pa.array([row is None for row in rows]) if any(row is None for row in rows) else None
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=absent)


def write_parquet(
    trajectories: Iterable[Trajectory], sink: Sink, extra: ExtraNames | None = None, layout: Layout = TRAJECTORIES
) -> int:
    """Write a Parquet file, row group by row group, and return the number of trajectories.

    Only one row group is in memory at a time, so `trajectories` may be a generator over any number of sessions. Pass
    `extra` with a generator, because a file's columns are fixed before its first row. For a sequence, the default None
    collects the names. The file is compressed with Zstandard. It has a page index and checksums.

    Raises `InvalidRequest` if a trajectory has a column or payload that `extra` doesn't name.
    """
    pq = parquet_library()
    if extra is None:
        extra = extra_names(trajectories) if isinstance(trajectories, Sequence) else ExtraNames()
    count = 0
    # Logprobs rarely repeat, so a dictionary would waste space. Split into byte streams, their high bytes compress.
    # Zstandard itself finds repeated token ids: without a dictionary, a file of English text takes 0.79 of the bytes.
    numbers = ("logprobs", COLUMN_PREFIX)
    paths = _column_paths(extra, layout)
    options = {
        "compression": "zstd",
        "use_dictionary": [path for path in paths if not path.startswith(("token_ids", *numbers, PAYLOAD_PREFIX))],
        "use_byte_stream_split": [path for path in paths if path.startswith(numbers)],
        "write_page_index": True,
        "write_page_checksum": True,
    }
    with pq.ParquetWriter(sink, trajectory_schema(extra, layout), **options) as writer:
        for group in batched(trajectories, ROW_GROUP_TOKENS, lambda row: len(row.token_ids), ROW_GROUP_ROWS):
            _check_named(group, extra)
            writer.write_table(trajectories_table(group, extra, layout))
            count += len(group)
    return count


def iter_parquet(
    source: str | Path, *, row_group: int | None = None, layout: Layout = TRAJECTORIES, bare: bool = False
) -> Iterator[Trajectory]:
    """Yield the trajectories in a file, or in one row group, bit for bit. The arrays are read-only.

    With `bare`, only the columns that every file has are read, without metadata, extra columns and payloads.

    Raises `InvalidRequest` if the file has no Tokentape schema version, or one that this release doesn't read.
    """
    with open_parquet(source) as file:
        metadata = file.schema_arrow.metadata or {}
        versions = {name: metadata.get(f"tokentape.{name}".encode(), b"").decode() or None for name in layout.versions}
        layout.check_versions(str(source), versions)
        groups = None if row_group is None else [row_group]
        needed = (
            [field.name for field in layout.fields if field.absent is None and field.kind != "json"] if bare else None
        )
        try:
            for batch in file.iter_batches(batch_size=ROW_GROUP_ROWS, row_groups=groups, columns=needed):
                yield from _trajectories_of(batch, layout, bare=bare)
        except InvalidRequest as error:
            raise InvalidRequest(f"{source}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"{source}: a column is corrupt or missing ({problem}); export it again") from None


def read_rows(source: Path, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows in any JSON lines (`.jsonl`) or Parquet file as dictionaries. From Parquet, read only `columns`.

    Raises `InvalidRequest` if the file has neither format, or if a line is not a JSON object.
    """
    if source.suffix != ".jsonl":
        with open_parquet(source) as file:
            for batch in file.iter_batches(columns=[name for name in file.schema_arrow.names if name in columns]):
                yield from batch.to_pylist()
        return
    with open(source, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidRequest(f"{source} line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise InvalidRequest(f"{source} line {number} is a {type(row).__name__}, expected an object")
            yield row


@contextmanager
def open_parquet(source: str | Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file, and verify the checksums of the pages that are read, if it has them.

    Raises `InvalidRequest` if the file is not Parquet, and from the `with` block, if what is read there is corrupt.
    """
    pq = parquet_library()
    from pyarrow import ArrowInvalid

    if Path(source).is_dir():
        raise InvalidRequest(f"{source} is a folder, expected a Parquet file")
    try:
        file = pq.ParquetFile(source, page_checksum_verification=True)
    except ArrowInvalid:
        raise InvalidRequest(f"{source} is not a Parquet file; JSON lines are read from a file named .jsonl") from None
    except OSError as error:
        raise _corrupt(source, error) from None
    with file:
        try:
            yield file
        except (ArrowInvalid, OSError) as error:
            raise _corrupt(source, error) from None


def _corrupt(source: str | Path, error: Exception) -> Exception:
    """Return an error of the operating system, which has a number, unchanged; for one of pyarrow, `InvalidRequest`."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return InvalidRequest(f"{source}: the file is corrupt ({str(error).strip()}); write it again")


def _check_named(trajectories: Sequence[Trajectory], extra: ExtraNames) -> None:
    names = extra_names(trajectories)
    unnamed = sorted({*names.columns} - {*extra.columns} | {*names.payloads} - {*extra.payloads})
    if unnamed:
        raise InvalidRequest(
            f"{', '.join(unnamed)}: a column or payload that is not in the file's schema; name it in `extra`, "
            "or pass the trajectories as a list"
        )


def _column_paths(extra: ExtraNames, layout: Layout) -> list[str]:
    """Return the columns' paths for Parquet's options, without columns that contain structs."""
    import pyarrow as pa

    return [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in trajectory_schema(extra, layout)
        if not pa.types.is_struct(field.type.value_type if pa.types.is_list(field.type) else field.type)
    ]


def _trajectories_of(batch: pa.RecordBatch, layout: Layout, *, bare: bool) -> Iterator[Trajectory]:
    columns = {name: batch.column(name) for name in batch.schema.names}
    arrays = {field.name for field in layout.fields if field.array}
    flat = {
        name: (column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False))
        for name, column in columns.items()
        if name in arrays or name.startswith(COLUMN_PREFIX)
    }
    for row in range(batch.num_rows):
        values: dict[str, Any] = {}
        for name, column in columns.items():
            if name not in flat:
                values[name] = column[row].as_py()
            elif column[row].is_valid:
                offsets, items = flat[name]
                values[name] = items[offsets[row] : offsets[row + 1]]
                values[name].flags.writeable = False
        yield layout.made({**values, "metadata": {} if bare else json.loads(values["metadata"])})
