"""Samples as files: Parquet, JSON lines, Hugging Face datasets, safetensors.

Parquet and JSON lines are those of trajectories (`session.arrow`, `session.jsonl`) with the mask decided and one more
column, `group`, null where there is none; whatever reads trajectories reads them too. `tokentape.samples_version` in a
Parquet file's metadata, `samples_version` in a line, is the version of that; the other columns have their own.

A safetensors file has the arrays of all samples behind each other:

    offsets            int64    where each sample's tokens begin, and the end of the last
    token_ids          int32    \\
    provenance         uint8     |  a value per token
    loss_mask          bool      |
    logprobs           float32   |
    column_NAME        float32  /   NaN throughout a sample that lacks the column
    payload_NAME       any          a row per token; payload_NAME_known says where there is one
    turn_offsets       int64    where each sample's turns begin, and the end of the last
    turns, completion_starts, completion_ends    int32, a value per turn; turn_rewards  float64
    rewards            float64  a value per sample, NaN where there is none

and in its metadata `tokentape.samples_version` and, as JSON, `samples`: the rest of each sample.

`pyarrow`, `datasets` and `safetensors` are imported on first use; the last two are extras.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokentape.canonical import canonical_json
from tokentape.errors import InvalidRequest
from tokentape.session.arrow import (
    COLUMN_PREFIX,
    PAYLOAD_PREFIX,
    ROW_GROUP_ROWS,
    ROW_GROUP_TOKENS,
    distributions,
    extra_names,
    iter_parquet,
    trajectories_table,
)
from tokentape.session.jsonl import distributions_to_json, trajectory_from_json, trajectory_to_json
from tokentape.session.verdict import verdict_read
from tokentape.training.samples import Sample
from tokentape.types import MediaSpan, TokenRows, Trajectory

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

SAMPLES_VERSION = 1
"""Columns may be added under the same version; one that changes or goes away raises it."""

_VERSION_KEY = "tokentape.samples_version"


def samples_table(samples: Sequence[Sample]) -> pa.Table:
    """A row per sample: the columns of `session.arrow.trajectory_schema` and `group`."""
    import pyarrow as pa

    table = trajectories_table(samples, extra_names(samples))
    table = table.append_column("group", pa.array([sample.group for sample in samples], pa.string()))
    return table.replace_schema_metadata({**table.schema.metadata, _VERSION_KEY: str(SAMPLES_VERSION)})


def write_samples_parquet(samples: Sequence[Sample], path: str | Path) -> None:
    """Write a Parquet file: Zstandard, row groups of about a million tokens, with a page index."""
    import pyarrow.parquet as pq

    table = samples_table(samples)
    repeated = [name for name in ("session_id", "verdict", "metadata", "group") if name in table.column_names]
    with pq.ParquetWriter(
        path, table.schema, compression="zstd", use_dictionary=repeated, write_page_index=True
    ) as writer:
        for start, end in _row_groups(samples):
            writer.write_table(table.slice(start, end - start))


def read_samples_parquet(path: str | Path) -> list[Sample]:
    """The samples of such a file, bit for bit. Raises `InvalidRequest` for another file or version."""
    import pyarrow.parquet as pq

    trajectories = iter_parquet(path)
    # The first one tells whether the file is of trajectories at all.
    first = next(trajectories, None)
    schema = pq.read_schema(path)
    _check_version(path, (schema.metadata or {}).get(_VERSION_KEY.encode(), b"").decode())
    groups = pq.read_table(path, columns=["group"])["group"].to_pylist()
    found = [] if first is None else [first, *trajectories]
    return [_with_group(one, group) for one, group in zip(found, groups, strict=True)]


def write_samples_jsonl(samples: Iterable[Sample], path: str | Path) -> None:
    """Write a line of JSON per sample. A logprob that is not known is null."""
    with open(path, "w", encoding="ascii") as file:
        for sample in samples:
            logprobs = [None if value != value else value for value in sample.logprobs.tolist()]
            own = {"samples_version": SAMPLES_VERSION, "logprobs": logprobs, "group": sample.group}
            file.write(canonical_json(trajectory_to_json(sample) | own) + "\n")


def read_samples_jsonl(path: str | Path) -> Iterator[Sample]:
    """Yield the samples of such a file. Raises `InvalidRequest` for another file or version, naming the line."""
    with open(path, encoding="ascii") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
                _check_version(path, str(value.get("samples_version", "")))
                yield _with_group(trajectory_from_json(value), value["group"])
            except (ValueError, AttributeError, KeyError) as error:
                raise InvalidRequest(f"{path} line {number}: {error}") from None


def to_dataset(samples: Sequence[Sample]) -> datasets.Dataset:
    """A Hugging Face dataset in memory, a row per sample. Needs `datasets`."""
    import datasets

    return datasets.Dataset(datasets.table.InMemoryTable(samples_table(samples)))


def write_samples_safetensors(samples: Sequence[Sample], path: str | Path) -> None:
    """Write the arrays of samples, laid out as the module says. Needs `safetensors`."""
    from safetensors.numpy import save_file

    extra = extra_names(samples)
    arrays: dict[str, npt.NDArray[Any]] = {
        "offsets": _offsets(len(sample.token_ids) for sample in samples),
        "turn_offsets": _offsets(len(sample.turns) for sample in samples),
        "rewards": np.array([np.nan if sample.reward is None else sample.reward for sample in samples], np.float64),
    }
    for name, dtype, of in _PER_TOKEN + _PER_TURN:
        arrays[name] = np.concatenate([np.empty(0, dtype), *(np.asarray(of(sample), dtype) for sample in samples)])
    for name in extra.columns:
        arrays[COLUMN_PREFIX + name] = np.concatenate(
            [sample.columns.get(name, np.full(len(sample.token_ids), np.nan, np.float32)) for sample in samples]
        )
    for name in extra.payloads:
        rows = next(sample.payloads[name].rows for sample in samples if name in sample.payloads)
        given = [
            sample.payloads.get(name) or _no_rows(len(sample.token_ids), rows.shape[1:], rows.dtype)
            for sample in samples
        ]
        arrays[PAYLOAD_PREFIX + name] = np.concatenate([one.rows for one in given])
        arrays[f"{PAYLOAD_PREFIX}{name}_known"] = np.concatenate([one.known for one in given])
    rest = [
        {
            **_plain(sample),
            "columns": sorted(sample.columns),
            "payloads": sorted(sample.payloads),
        }
        for sample in samples
    ]
    save_file(arrays, path, {_VERSION_KEY: str(SAMPLES_VERSION), "samples": canonical_json(rest)})


def read_samples_safetensors(path: str | Path) -> list[Sample]:
    """The samples of such a file, bit for bit. Raises `InvalidRequest` for another file or version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise InvalidRequest(f"{path} is not a safetensors file ({error})") from None
    _check_version(path, metadata.get(_VERSION_KEY, ""))
    samples = []
    for n, rest in enumerate(json.loads(metadata["samples"])):
        tokens = np.s_[arrays["offsets"][n] : arrays["offsets"][n + 1]]
        turns = np.s_[arrays["turn_offsets"][n] : arrays["turn_offsets"][n + 1]]
        columns, payloads = rest.pop("columns"), rest.pop("payloads")
        reward = float(arrays["rewards"][n])
        known = {
            name: distributions(rest.get(name), arrays["turns"][turns]) for name in ("sampled_from", "logprobs_of")
        }
        rest["verdict"] = verdict_read(rest["verdict"], (*known["sampled_from"], *known["logprobs_of"]))
        per_token = {name: arrays[name][tokens] for name, _, _ in _PER_TOKEN}
        per_turn: dict[str, Any] = {name: arrays[name][turns] for name, _, _ in _PER_TURN}
        samples.append(
            Sample(
                **rest
                | per_token
                | per_turn
                | known
                | {
                    "turns": tuple(per_turn["turns"].tolist()),
                    "weight_versions": tuple(rest["weight_versions"]),
                    "weight_spans": tuple((start, end, version) for start, end, version in rest["weight_spans"]),
                    "media": tuple(MediaSpan(**span) for span in rest["media"]),
                    "reward": None if np.isnan(reward) else reward,
                    "columns": {name: arrays[COLUMN_PREFIX + name][tokens] for name in columns},
                    "payloads": {
                        name: TokenRows(
                            arrays[PAYLOAD_PREFIX + name][tokens], arrays[f"{PAYLOAD_PREFIX}{name}_known"][tokens]
                        )
                        for name in payloads
                    },
                }
            )
        )
    return samples


_Array = Callable[[Sample], Any]
_PER_TOKEN: tuple[tuple[str, type[np.generic], _Array], ...] = (
    ("token_ids", np.int32, lambda sample: sample.token_ids),
    ("provenance", np.uint8, lambda sample: sample.provenance),
    ("loss_mask", np.bool_, lambda sample: sample.loss_mask),
    ("logprobs", np.float32, lambda sample: sample.logprobs),
)
_PER_TURN: tuple[tuple[str, type[np.generic], _Array], ...] = (
    ("turns", np.int32, lambda sample: sample.turns),
    ("completion_starts", np.int32, lambda sample: sample.completion_starts),
    ("completion_ends", np.int32, lambda sample: sample.completion_ends),
    ("turn_rewards", np.float64, lambda sample: sample.turn_rewards),
)


def _plain(sample: Sample) -> dict[str, Any]:
    """What of a sample is no array."""
    return {
        "session_id": sample.session_id,
        "leaf": sample.leaf,
        "group": sample.group,
        "verdict": sample.verdict,
        "metadata": dict(sample.metadata),
        "weight_versions": sample.weight_versions,
        "weight_spans": sample.weight_spans,
        "media": [asdict(span) for span in sample.media],
        **distributions_to_json(sample),
    }


def _no_rows(tokens: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TokenRows:
    return TokenRows(np.zeros((tokens, *shape), dtype), np.zeros(tokens, np.bool_))


def _offsets(lengths: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _row_groups(samples: Sequence[Sample]) -> Iterator[tuple[int, int]]:
    start = tokens = 0
    for end, sample in enumerate(samples, 1):
        tokens += len(sample.token_ids)
        if tokens >= ROW_GROUP_TOKENS or end - start >= ROW_GROUP_ROWS or end == len(samples):
            yield start, end
            start, tokens = end, 0


def _with_group(trajectory: Trajectory, group: str | None) -> Sample:
    return Sample(**{one.name: getattr(trajectory, one.name) for one in fields(Trajectory)}, group=group)


def _check_version(path: str | Path, found: str) -> None:
    if not found:
        raise InvalidRequest(f"{path} is not a file of samples; make some of its trajectories with `assemble`")
    if found != str(SAMPLES_VERSION):
        raise InvalidRequest(f"{path} has samples of version {found}, this release reads version {SAMPLES_VERSION}")
