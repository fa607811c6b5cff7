"""Trajectories as Arrow tables and Parquet files: the versioned columns that trainers read.

One row per trajectory. The per-token columns `token_ids`, `provenance`, `loss_mask` and `logprobs` of a row are
equally long; `turns`, `completion_starts`, `completion_ends` and `weight_versions` have one entry per turn.
`loss_mask` is boolean: it says what it is, costs a bit per token, and `datasets` hands it out as a bool tensor that
multiplies a loss as it stands. Columns may be added under the same `SCHEMA_VERSION`; one that changes or goes away
raises it. The version and the names of the provenance codes are in the file's key-value metadata.

`pyarrow` is imported on first use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.errors import InvalidRequest
from tokentape.session.chain import canonical_json
from tokentape.types import Provenance, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1

VERSION_KEY = b"tokentape.schema_version"
PROVENANCE_KEY = b"tokentape.provenance"

ROW_GROUP_TOKENS = 2**20
"""A row group is closed once it holds this many tokens: about 10 MB of arrays, so that readers can skip and stream."""

ROW_GROUP_ROWS = 1000
"""And at the latest after this many trajectories."""

Sink: TypeAlias = str | Path | IO[bytes]
"""Where to write: a path, or a binary file object."""


@cache
def trajectory_schema() -> pa.Schema:
    """The columns, their types and the file metadata. `reward` alone can be null."""
    import pyarrow as pa

    def column(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, nullable=False)

    def many(kind: pa.DataType) -> pa.DataType:
        return pa.list_(column("element", kind))

    return pa.schema(
        [
            column("session_id", pa.string()),
            column("leaf", pa.int32()),
            column("token_ids", many(pa.int32())),
            column("provenance", many(pa.uint8())),
            column("loss_mask", many(pa.bool_())),
            column("logprobs", many(pa.float32())),
            column("turns", many(pa.int32())),
            column("completion_starts", many(pa.int32())),
            column("completion_ends", many(pa.int32())),
            column("weight_versions", many(pa.string())),
            pa.field("reward", pa.float64()),
            column("verdict", pa.string()),
            column("metadata", pa.string()),
        ],
        metadata={
            VERSION_KEY: str(SCHEMA_VERSION),
            PROVENANCE_KEY: json.dumps({code.name.lower(): int(code) for code in Provenance}),
        },
    )


def trajectories_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """A table of `trajectory_schema()` with one row per trajectory, in the given order."""
    import pyarrow as pa

    schema = trajectory_schema()

    def lists(name: str, rows: Sequence[npt.NDArray[Any]]) -> pa.Array:
        # Over the flat values: a Python object per token would cost fifty times the bytes of the token.
        kind = schema.field(name).type
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
        values = np.concatenate([np.empty(0, kind.value_type.to_pandas_dtype()), *rows])
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type), type=kind)

    def plain(name: str, rows: Iterable[Any]) -> pa.Array:
        return pa.array(rows, schema.field(name).type)

    return pa.Table.from_arrays(
        [
            plain("session_id", [t.session_id for t in trajectories]),
            plain("leaf", [t.leaf for t in trajectories]),
            lists("token_ids", [t.token_ids for t in trajectories]),
            lists("provenance", [t.provenance for t in trajectories]),
            lists("loss_mask", [t.loss_mask for t in trajectories]),
            lists("logprobs", [t.logprobs for t in trajectories]),
            lists("turns", [np.array(t.turns, np.int32) for t in trajectories]),
            lists("completion_starts", [t.completion_starts for t in trajectories]),
            lists("completion_ends", [t.completion_ends for t in trajectories]),
            plain("weight_versions", [t.weight_versions for t in trajectories]),
            plain("reward", [t.reward for t in trajectories]),
            plain("verdict", [t.verdict for t in trajectories]),
            plain("metadata", [canonical_json(t.metadata) for t in trajectories]),
        ],
        schema=schema,
    )


def write_parquet(trajectories: Iterable[Trajectory], sink: Sink) -> int:
    """Write a Parquet file, row group by row group, and return the number of trajectories.

    Holds one row group at a time, so `trajectories` may be a generator over any number of sessions. Compressed with
    Zstandard, with a page index.
    """
    import pyarrow.parquet as pq

    written = 0
    # Logprobs don't repeat, so a dictionary wastes room; split into byte streams their high bytes compress.
    options = {
        "compression": "zstd",
        "use_dictionary": [name for name in _column_paths() if not name.startswith("logprobs")],
        "use_byte_stream_split": ["logprobs.list.element"],
        "write_page_index": True,
    }
    with pq.ParquetWriter(sink, trajectory_schema(), **options) as writer:
        for group in _row_groups(trajectories):
            writer.write_table(trajectories_table(group))
            written += len(group)
    return written


def read_parquet(source: str | Path) -> list[Trajectory]:
    """The trajectories of a file that `write_parquet` wrote, bit for bit, all in memory; the arrays are read-only.

    Raises `InvalidRequest` for a file without Tokentape's version, or with one that this release doesn't read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source)
    except pa.ArrowInvalid:
        raise InvalidRequest(f"{source} is not a Parquet file") from None
    with file:
        found = (file.schema_arrow.metadata or {}).get(VERSION_KEY)
        if found is None:
            raise InvalidRequest(f"{source} is not a file of trajectories: it names no {VERSION_KEY.decode()}")
        if found != str(SCHEMA_VERSION).encode():
            raise InvalidRequest(
                f"{source} has schema version {found.decode()}, this release reads version {SCHEMA_VERSION}; "
                "read it with the release that wrote it, or export it again"
            )
        return list(chain.from_iterable(map(_trajectories_of, file.iter_batches(batch_size=ROW_GROUP_ROWS))))


def _row_groups(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    group: list[Trajectory] = []
    tokens = 0
    for trajectory in trajectories:
        group.append(trajectory)
        tokens += len(trajectory.token_ids)
        if tokens >= ROW_GROUP_TOKENS or len(group) >= ROW_GROUP_ROWS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _column_paths() -> list[str]:
    """Columns as Parquet addresses them."""
    import pyarrow as pa

    return [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in trajectory_schema()
    ]


def _trajectories_of(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    columns = {name: batch.column(name) for name in batch.schema.names}
    flat = {
        name: (column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False))
        for name, column in columns.items()
        if name in _ARRAYS
    }
    for row in range(batch.num_rows):
        arrays = {}
        for name, (offsets, values) in flat.items():
            arrays[name] = values[offsets[row] : offsets[row + 1]]
            arrays[name].flags.writeable = False
        scalars = {name: column[row].as_py() for name, column in columns.items() if name not in _ARRAYS}
        yield Trajectory(
            session_id=scalars["session_id"],
            leaf=scalars["leaf"],
            token_ids=arrays["token_ids"],
            provenance=arrays["provenance"],
            loss_mask=arrays["loss_mask"],
            logprobs=arrays["logprobs"],
            turns=tuple(scalars["turns"]),
            completion_starts=arrays["completion_starts"],
            completion_ends=arrays["completion_ends"],
            weight_versions=tuple(scalars["weight_versions"]),
            reward=scalars["reward"],
            verdict=scalars["verdict"],
            metadata=json.loads(scalars["metadata"]),
        )


_ARRAYS = frozenset({"token_ids", "provenance", "loss_mask", "logprobs", "completion_starts", "completion_ends"})
