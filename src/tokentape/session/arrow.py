"""Trajectories as Arrow tables and Parquet files: the versioned columns that trainers read.

One row per trajectory. The per-token columns `token_ids`, `provenance`, `loss_mask` and `logprobs` of a row are
equally long; `turns`, `completion_starts`, `completion_ends`, `weight_versions`, `turn_rewards`, `sampled_from` and
`logprobs_of` have one entry per turn, `media` one per image. Then come, if any trajectory has them, per-token numbers
of clients, each a list column `column_NAME`, and per-token arrays of engines, each a column `payload_NAME` of structs
{dtype, shape, data, known}: `np.frombuffer(data, dtype).reshape(shape)`. They are null in rows without them.
`loss_mask` is boolean: it says what it is, costs a bit per token, and `datasets` hands it out as a bool tensor that
multiplies a loss as it stands. Columns may be added under the same `SCHEMA_VERSION`; one that changes or goes away
raises it. The version and the names of the provenance codes are in the file's key-value metadata.

`pyarrow` is imported on first use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.canonical import canonical_json
from tokentape.errors import InvalidRequest
from tokentape.session.payloads import rows_as_bytes, rows_from_bytes
from tokentape.session.verdict import verdict_read
from tokentape.types import MediaSpan, Provenance, TokenDistribution, TokenRows, Trajectory

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


COLUMN_PREFIX = "column_"
PAYLOAD_PREFIX = "payload_"


@dataclass(frozen=True, slots=True)
class ExtraNames:
    """Which columns and payloads a table has besides those that every table has."""

    columns: tuple[str, ...] = ()
    payloads: tuple[str, ...] = ()


def extra_names(trajectories: Iterable[Trajectory]) -> ExtraNames:
    """The names of all columns and payloads that any of `trajectories` has, sorted."""
    columns: set[str] = set()
    payloads: set[str] = set()
    for one in trajectories:
        columns |= one.columns.keys()
        payloads |= one.payloads.keys()
    return ExtraNames(tuple(sorted(columns)), tuple(sorted(payloads)))


def named_only(trajectory: Trajectory, extra: ExtraNames) -> Trajectory:
    """The trajectory with only those columns and payloads that `extra` names."""
    return replace(
        trajectory,
        columns={name: values for name, values in trajectory.columns.items() if name in extra.columns},
        payloads={name: rows for name, rows in trajectory.payloads.items() if name in extra.payloads},
    )


@cache
def trajectory_schema(extra: ExtraNames = ExtraNames()) -> pa.Schema:
    """The columns, their types and the file metadata. `reward` and the extra columns alone can be null."""
    import pyarrow as pa

    def column(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, nullable=False)

    def many(kind: pa.DataType) -> pa.DataType:
        return pa.list_(column("element", kind))

    span = pa.struct([column("start", pa.int32()), column("end", pa.int32()), column("version", pa.string())])
    media = pa.struct(
        [
            column("start", pa.int32()),
            column("length", pa.int32()),
            column("sha256", pa.string()),
            column("settings", pa.string()),
        ]
    )
    # Null where it is not known, as a whole or in part.
    distribution = pa.struct(
        [
            pa.field("penalties", pa.bool_()),
            pa.field("temperature", pa.float64()),
            pa.field("truncation", pa.bool_()),
            pa.field("grammar", pa.bool_()),
        ]
    )
    payload = pa.struct(
        [
            column("dtype", pa.string()),
            column("shape", many(pa.int32())),
            column("data", pa.binary()),
            column("known", many(pa.bool_())),
        ]
    )
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
            column("turn_rewards", many(pa.float64())),
            column("weight_spans", many(span)),
            column("media", many(media)),
            column("sampled_from", pa.list_(pa.field("element", distribution))),
            column("logprobs_of", pa.list_(pa.field("element", distribution))),
            *(pa.field(COLUMN_PREFIX + name, many(pa.float32())) for name in extra.columns),
            *(pa.field(PAYLOAD_PREFIX + name, payload) for name in extra.payloads),
        ],
        metadata={
            VERSION_KEY: str(SCHEMA_VERSION),
            PROVENANCE_KEY: json.dumps({code.name.lower(): int(code) for code in Provenance}),
        },
    )


def trajectories_table(trajectories: Sequence[Trajectory], extra: ExtraNames | None = None) -> pa.Table:
    """A table of `trajectory_schema(extra)` with one row per trajectory, in the given order.

    `extra` names the columns and payloads to write; None stands for all that there are.
    """
    import pyarrow as pa

    extra = extra_names(trajectories) if extra is None else extra
    schema = trajectory_schema(extra)

    def lists(name: str, rows: Sequence[npt.NDArray[Any] | None]) -> pa.Array:
        # Over the flat values: a Python object per token would cost fifty times the bytes of the token.
        kind = schema.field(name).type
        given = [row for row in rows if row is not None]
        offsets = np.concatenate([[0], np.cumsum([0 if row is None else len(row) for row in rows])]).astype(np.int32)
        values = np.concatenate([np.empty(0, kind.value_type.to_pandas_dtype()), *given])
        absent = None if len(given) == len(rows) else pa.array([row is None for row in rows])
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type), type=kind, mask=absent)

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
            lists("turn_rewards", [t.turn_rewards for t in trajectories]),
            plain(
                "weight_spans",
                [[{"start": a, "end": b, "version": v} for a, b, v in t.weight_spans] for t in trajectories],
            ),
            plain("media", [[asdict(span) for span in t.media] for t in trajectories]),
            plain("sampled_from", [[one and asdict(one) for one in t.sampled_from] for t in trajectories]),
            plain("logprobs_of", [[one and asdict(one) for one in t.logprobs_of] for t in trajectories]),
            *(lists(COLUMN_PREFIX + name, [t.columns.get(name) for t in trajectories]) for name in extra.columns),
            *(
                plain(PAYLOAD_PREFIX + name, [_struct(t.payloads.get(name)) for t in trajectories])
                for name in extra.payloads
            ),
        ],
        schema=schema,
    )


def write_parquet(trajectories: Iterable[Trajectory], sink: Sink, extra: ExtraNames | None = None) -> int:
    """Write a Parquet file, row group by row group, and return the number of trajectories.

    Holds one row group at a time, so `trajectories` may be a generator over any number of sessions. Then `extra` says
    which columns and payloads to write, for a file's columns are fixed before its first row; from a sequence they are
    found out. Compressed with Zstandard, with a page index.

    Raises `InvalidRequest` if a trajectory has a column or payload that `extra` doesn't name.
    """
    import pyarrow.parquet as pq

    if extra is None:
        extra = extra_names(trajectories) if isinstance(trajectories, Sequence) else ExtraNames()
    written = 0
    # Logprobs don't repeat, so a dictionary wastes room; split into byte streams their high bytes compress.
    numbers = ("logprobs", COLUMN_PREFIX)
    paths = _column_paths(extra)
    options = {
        "compression": "zstd",
        "use_dictionary": [path for path in paths if not path.startswith((*numbers, PAYLOAD_PREFIX))],
        "use_byte_stream_split": [path for path in paths if path.startswith(numbers)],
        "write_page_index": True,
    }
    with pq.ParquetWriter(sink, trajectory_schema(extra), **options) as writer:
        for group in _row_groups(trajectories):
            _check_named(group, extra)
            writer.write_table(trajectories_table(group, extra))
            written += len(group)
    return written


def read_parquet(source: str | Path) -> list[Trajectory]:
    """The trajectories of a file that `write_parquet` wrote, bit for bit, all in memory; the arrays are read-only.

    Raises `InvalidRequest` for a file without Tokentape's version, or with one that this release doesn't read.
    """
    return list(iter_parquet(source))


def iter_parquet(source: str | Path, *, row_group: int | None = None) -> Iterator[Trajectory]:
    """Yield the trajectories of such a file, or of one of its row groups, a batch in memory at a time.

    Raises as `read_parquet`.
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
        groups = None if row_group is None else [row_group]
        for batch in file.iter_batches(batch_size=ROW_GROUP_ROWS, row_groups=groups):
            yield from _trajectories_of(batch)


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


def _check_named(trajectories: Sequence[Trajectory], extra: ExtraNames) -> None:
    found = extra_names(trajectories)
    unnamed = sorted({*found.columns} - {*extra.columns} | {*found.payloads} - {*extra.payloads})
    if unnamed:
        raise InvalidRequest(
            f"{', '.join(unnamed)}: a column or payload that the file does not have; name it in `extra`, "
            "or give the trajectories as a list"
        )


def _column_paths(extra: ExtraNames) -> list[str]:
    """Columns as Parquet addresses them; those that hold structs are left out."""
    import pyarrow as pa

    return [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in trajectory_schema(extra)
        if not pa.types.is_struct(field.type.value_type if pa.types.is_list(field.type) else field.type)
    ]


def _struct(payload: TokenRows | None) -> dict[str, Any] | None:
    if payload is None:
        return None
    dtype, data = rows_as_bytes(payload.rows)
    return {"dtype": dtype, "shape": payload.rows.shape, "data": data, "known": payload.known}


def _token_rows(value: Mapping[str, Any]) -> TokenRows:
    return TokenRows(rows_from_bytes(value["dtype"], value["shape"], value["data"]), np.array(value["known"], bool))


def _trajectories_of(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    columns = {name: batch.column(name) for name in batch.schema.names}
    flat = {
        name: (column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False))
        for name, column in columns.items()
        if name in _ARRAYS or name.startswith(COLUMN_PREFIX)
    }
    for row in range(batch.num_rows):
        arrays = {}
        for name, (offsets, values) in flat.items():
            if columns[name][row].is_valid:
                arrays[name] = values[offsets[row] : offsets[row + 1]]
                arrays[name].flags.writeable = False
        scalars = {name: column[row].as_py() for name, column in columns.items() if name not in flat}
        spans = scalars.get("weight_spans")
        sampled_from = distributions(scalars.get("sampled_from"), scalars["turns"])
        logprobs_of = distributions(scalars.get("logprobs_of"), scalars["turns"])
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
            verdict=verdict_read(scalars["verdict"], (*sampled_from, *logprobs_of)),
            metadata=json.loads(scalars["metadata"]),
            turn_rewards=arrays["turn_rewards"] if "turn_rewards" in arrays else no_rewards(scalars["turns"]),
            weight_spans=spans_of_turns(
                arrays["completion_starts"], arrays["completion_ends"], scalars["weight_versions"]
            )
            if spans is None
            else tuple((span["start"], span["end"], span["version"]) for span in spans),
            columns={
                name.removeprefix(COLUMN_PREFIX): values
                for name, values in arrays.items()
                if name.startswith(COLUMN_PREFIX)
            },
            payloads={
                name.removeprefix(PAYLOAD_PREFIX): _token_rows(value)
                for name, value in scalars.items()
                if name.startswith(PAYLOAD_PREFIX) and value is not None
            },
            media=tuple(MediaSpan(**span) for span in scalars.get("media") or ()),
            sampled_from=sampled_from,
            logprobs_of=logprobs_of,
        )


def no_rewards(turns: Sequence[int]) -> npt.NDArray[np.float64]:
    """What `turn_rewards` is for a trajectory that was written before there was such a column."""
    return np.full(len(turns), np.nan)


def spans_of_turns(
    starts: Iterable[int], ends: Iterable[int], versions: Iterable[str]
) -> tuple[tuple[int, int, str], ...]:
    """What `weight_spans` is for such a trajectory: a span per turn."""
    return tuple((int(start), int(end), version) for start, end, version in zip(starts, ends, versions, strict=True))


def distributions(
    of_turns: Iterable[Mapping[str, Any] | None] | None, turns: Sequence[int]
) -> tuple[TokenDistribution | None, ...]:
    """What was written of each turn's distribution; None for each turn if nothing was."""
    return tuple(TokenDistribution(**one) if one else None for one in of_turns or [None] * len(turns))


_ARRAYS = frozenset(
    {"token_ids", "provenance", "loss_mask", "logprobs", "completion_starts", "completion_ends", "turn_rewards"}
)
