"""Read sequences of ids from a record, a file of trajectories, or other Parquet and JSON files.

Spans mark the sampled tokens. They come from turns in Tokentape's formats, from a mask or a completion column in other
files, or cover the whole row. One row is in memory at a time, or a small batch of Parquet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape._session.arrow import VERSION_KEY, iter_parquet, open_parquet
from tokentape._session.jsonl import trajectory_from_json
from tokentape.errors import InvalidRequest
from tokentape.store import Store, StoredSession
from tokentape.store._location import EXPECTED, is_record, open_record
from tokentape.types import Codes, Logprobs, Provenance, TokenIds, Trajectory

IDS_COLUMNS = ("token_ids", "input_ids", "completion_ids", "output_ids", "tokens", "ids")
"""Usual names of columns of ids, in order of preference."""
LOGPROB_COLUMNS = (
    "logprobs",
    "trainer_logprobs",
    "old_logprobs",
    "rollout_log_probs",
    "response_logprobs",
    "rollout_logprobs",
)
MASK_COLUMNS = ("loss_mask", "completion_mask", "response_mask", "assistant_masks", "mask", "loss_masks")
NAME_COLUMNS = ("session_id", "sample_id", "id", "uid")
LEAF_COLUMN = "leaf"
"""With `session_id`, names a row `SESSION:LEAF`."""
PROMPT_COLUMNS, AFTER_PROMPT = ("prompt_ids", "prompt_token_ids"), ("completion_ids", "response_ids")
"""The usual names of columns of prompt ids, and those of the ids after them."""

_BATCH_ROWS = 64

_Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names of a file that Tokentape did not write. A column that is None is found by its usual names."""

    ids: str | None = None
    mask: str | None = None
    """1 where a token was sampled. With a prompt column, the mask may cover only `ids`."""
    prompt: str | None = None
    """The column of prompt ids, which come before `ids` and were not sampled."""
    name: str | None = None
    by: tuple[str, ...] = ()
    """More columns to split the report by."""
    leaf: str | None = None
    """The column with a branch's last turn, for names `SESSION:LEAF`. By default `leaf`, unless `name` is given."""


@dataclass(frozen=True, slots=True)
class Span:
    """A completion within a row."""

    start: int
    end: int
    labels: Mapping[str, str] = field(default_factory=dict)
    """Values by dimension to group reports by: `turn`, `temperature`, `weights`, names of columns."""


@dataclass(frozen=True, slots=True)
class IdRow:
    """One sequence of ids."""

    name: str
    """`SESSION:LEAF` (the branch's last turn), the value of the name column, or the row's number from 1."""
    ids: TokenIds
    spans: tuple[Span, ...]
    """The ranges of sampled tokens, in order. Each sampled token is in one row only."""
    provenance: Codes | None = None
    line: int = 1
    """The row's line in a file with one row per line."""
    mask: npt.NDArray[np.bool_] | None = None
    """True for tokens that carry loss; None if the source has no mask. Shape [tokens]."""
    logprobs: Logprobs | None = None
    """NaN for tokens without a logprob; None if the source has not one value per token. Shape [tokens]."""
    session: str = ""
    """The row's session, or its name if it has no session. Rows of one session are not statistically independent."""
    unread_logprobs: str = ""
    """Why the source's column of logprobs can't be used; empty if it can, or if there is none."""


def iter_rows(location: str | Path, columns: Columns = Columns()) -> Iterator[IdRow]:
    """Yield the sequences of a record, or of a file named `.parquet`, `.jsonl` or `.json`.

    Raises `InvalidRequest` for a file of any other type, without a column of ids, or with invalid rows; for a record,
    the errors of `open_record`.
    """
    if is_record(location):
        with open_record(location, read_only=True) as store:
            yield from store_rows(store)
        return
    path = Path(location)
    match path.suffix:
        case ".parquet":
            yield from parquet_rows(path, columns)
        case ".jsonl":
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    yield replace(_json_row(line, columns, number, f"{path} line {number}"), line=number)
        case ".json":
            yield _json_row(path.read_bytes(), columns, 1, str(path))
        case _:
            raise InvalidRequest(f"{path}: expected {EXPECTED}, or a file named .parquet, .jsonl or .json")


def store_rows(store: Store) -> Iterator[IdRow]:
    for stored in store.iter_sessions():
        yield from session_rows(stored)


def session_rows(stored: StoredSession) -> Iterator[IdRow]:
    """Yield a row for each branch of a session. A turn that several branches share is only in the first one's spans."""
    return trajectory_rows(stored.trajectories(), {turn.seq: turn.sampling.get("temperature") for turn in stored.turns})


def trajectory_rows(
    trajectories: Iterable[Trajectory], temperatures: Mapping[int, Any] | None = None
) -> Iterator[IdRow]:
    """Yield a row for each trajectory of a session. `temperatures` maps turns to their sampling temperature."""
    for trajectory in trajectories:
        spans = []
        for n, (turn, start, end) in enumerate(trajectory.completions()):
            labels = {"turn": _turn_label(n), "weights": trajectory.weight_versions[n]}
            if temperatures is not None:
                temperature = temperatures.get(turn)
                labels["temperature"] = "unknown" if temperature is None else f"{temperature:g}"
            if trajectory.loss_mask[start:end].any():
                spans.append(Span(start, end, labels))
        name, values = f"{trajectory.session_id}:{trajectory.leaf}", (trajectory.loss_mask, trajectory.logprobs)
        yield IdRow(
            name, trajectory.token_ids, tuple(spans), trajectory.provenance, 1, *values, session=trajectory.session_id
        )


def _turn_label(n: int) -> str:
    """Return the bucket of turn `n`, counted from 0. Buckets count turns from 1: 1, 2, 3-4, 5-8 and so on."""
    for last in (1, 2, 4, 8, 16, 32, 64):
        if n < last:
            first = last // 2 + 1
            return str(last) if first >= last else f"{first}-{last}"
    return "65 on"


def parquet_rows(path: str | Path, columns: Columns = Columns(), row_group: int | None = None) -> Iterator[IdRow]:
    """Yield the sequences of a Parquet file, or of one of its row groups. Raises the errors of `iter_rows`."""
    with open_parquet(path) as file:
        if VERSION_KEY in (file.schema_arrow.metadata or {}) and columns == Columns():
            yield from trajectory_rows(iter_parquet(path, row_group=row_group, bare=True))
            return
        names = file.schema_arrow.names
        chosen = _chosen(columns, names, str(path))
        selected = [name for name in (chosen.ids, chosen.mask, chosen.prompt, chosen.name, chosen.leaf) if name]
        selected += chosen.by
        selected += [name for name in LOGPROB_COLUMNS if name in names]
        groups = None if row_group is None else [row_group]
        first = 1 + sum(file.metadata.row_group(n).num_rows for n in range(row_group or 0))
        for number, row in enumerate(_batches(file, list(dict.fromkeys(selected)), groups), first):
            yield _foreign_row(row, chosen, number, f"{path}, row {number}")


def _batches(file: Any, names: Sequence[str], row_groups: Sequence[int] | None) -> Iterator[_Row]:
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=names, row_groups=row_groups):
        for index in range(batch.num_rows):
            yield {name: _value(batch.column(name)[index]) for name in batch.schema.names}


def _value(scalar: Any) -> Any:
    values = getattr(scalar, "values", None)
    if values is None or callable(values):  # not a list, or a struct with its method
        return scalar.as_py()
    return values.to_pylist() if "string" in str(values.type) else values.to_numpy(zero_copy_only=False)


def _json_row(line: bytes, columns: Columns, number: int, where: str) -> IdRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from None
    if isinstance(value, list):
        ids = read_ids(value, where)
        return IdRow(str(number), ids, (Span(0, len(ids)),))
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where}: expected an object or a list of ids, found {type(value).__name__}")
    if "schema_version" in value and columns == Columns():
        try:
            return next(trajectory_rows([trajectory_from_json(value)]))
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}") from None
    return _foreign_row(value, _chosen(columns, list(value), where), number, where)


def _chosen(columns: Columns, names: Sequence[str], where: str) -> Columns:
    explicit = (columns.ids, columns.mask, columns.prompt, columns.name, columns.leaf, *columns.by)
    absent = [name for name in explicit if name is not None and name not in names]
    if absent:
        raise InvalidRequest(f"{where}: no column {', '.join(absent)}; choose from {', '.join(names)}")

    def first(requested: str | None, usual: Sequence[str]) -> str | None:
        return requested or next((name for name in usual if name in names), None)

    usual_prompt = first(None, PROMPT_COLUMNS)
    paired = [name for name in AFTER_PROMPT if name in names and usual_prompt is not None]
    ids = first(columns.ids, paired or IDS_COLUMNS)
    if ids is None:
        raise InvalidRequest(
            f"{where}: no column of ids: expected one of {', '.join(IDS_COLUMNS)}, found {', '.join(names)}; pass its "
            "name as --ids-column"
        )
    prompt = columns.prompt or (usual_prompt if ids in paired else None)
    name = first(columns.name, NAME_COLUMNS)
    has_leaf = columns.name is None and name == NAME_COLUMNS[0]
    leaf = first(columns.leaf, (LEAF_COLUMN,) if has_leaf else ())
    return Columns(ids, first(columns.mask, MASK_COLUMNS), prompt, name, columns.by, leaf)


def _foreign_row(value: _Row, columns: Columns, number: int, where: str) -> IdRow:
    own = read_ids(value.get(columns.ids or ""), where)
    prompt = read_ids(value.get(columns.prompt), where) if columns.prompt else own[:0]
    ids = np.concatenate([prompt, own])
    mask_values = value.get(columns.mask) if columns.mask else None
    mask = None if mask_values is None else _mask(mask_values, f"{where}: {columns.mask}")
    if mask is not None and len(mask) == len(own):
        mask = np.concatenate([np.zeros(len(prompt), np.bool_), mask])
    if mask is not None and len(mask) != len(ids):
        raise InvalidRequest(f"{where}: {len(mask)} values of {columns.mask} for {len(own)} ids; expected one per id")
    sampled = np.arange(len(ids)) >= len(prompt) if mask is None else mask
    codes = np.where(sampled, Provenance.SAMPLED, Provenance.TEMPLATE).astype(np.uint8)
    labels = {name: str(value.get(name)) for name in columns.by}
    spans = [(len(prompt), len(ids))] if mask is None else _runs(mask)
    row_spans = [
        Span(start, end, labels if mask is None else {**labels, "turn": _turn_label(n)})
        for n, (start, end) in enumerate(spans)
    ]
    name = value.get(columns.name) if columns.name else None
    leaf = value.get(columns.leaf) if columns.leaf else None
    session = str(number) if name is None else str(name)
    row = session if leaf is None else f"{session}:{leaf}"
    provenance = None if mask is None and not len(prompt) else codes
    column = next((column for column in LOGPROB_COLUMNS if value.get(column) is not None), "")
    logprobs, problem = read_logprobs(value.get(column), len(own), len(prompt))
    return IdRow(
        row,
        ids,
        tuple(row_spans),
        provenance,
        mask=mask,
        logprobs=logprobs,
        session=session,
        unread_logprobs=problem and f"{where}: {column}: {problem}",
    )


def read_logprobs(values: Any, tokens: int, prompt: int) -> tuple[Logprobs | None, str]:
    """Return logprobs for a prompt and `tokens` ids, NaN if missing. Else return None, and what is wrong with them."""
    if values is None:
        return None, ""
    try:
        logprobs = np.asarray(values, np.float32)  # null in JSON is NaN here
    except (TypeError, ValueError):
        logprobs = np.zeros((), np.float32)
    if logprobs.ndim == 0:
        return None, f"expected a list of numbers, one per id; found {type(values).__name__}"
    if logprobs.shape == (tokens,):
        logprobs = np.concatenate([np.full(prompt, np.nan, np.float32), logprobs])
    if logprobs.shape == (prompt + tokens,):
        return logprobs, ""
    shape = f"{len(logprobs)} values" if logprobs.ndim == 1 else f"an array of shape {logprobs.shape}"
    return None, f"{shape} for {tokens} ids; expected one number per id"


def read_ids(value: Any, where: str) -> TokenIds:
    """Return a list of integers as ids. Raises `InvalidRequest` for anything else."""
    with suppress(TypeError, ValueError):
        wide = np.asarray(value)
        if wide.ndim == 1 and not len(wide):
            return np.empty(0, np.int32)
        if wide.ndim == 1 and wide.dtype.kind in "iu" and wide.min() >= 0 and wide.max() <= _MOST:
            return wide.astype(np.int32)
    raise InvalidRequest(f"{where}: expected a list of token ids, integers from 0 to {_MOST}; found {_not_ids(value)}")


_MOST = 2**31 - 1


def _not_ids(value: Any) -> str:
    """Return the first element that is no id, with its position; for no list, the value's type."""
    for n, element in enumerate(value if isinstance(value, list | np.ndarray) else ()):
        plain = element.item() if isinstance(element, np.generic) else element
        if isinstance(plain, bool) or not isinstance(plain, int) or not 0 <= plain <= _MOST:
            return f"{str(plain)[:40]} ({type(plain).__name__}) at position {n}"
    return "nothing" if value is None else type(value).__name__


def _mask(value: Any, where: str) -> npt.NDArray[np.bool_]:
    try:
        numbers = np.asarray(value, np.float64)  # null is NaN here
    except (TypeError, ValueError):
        numbers = np.zeros(())
    if numbers.ndim != 1:
        raise InvalidRequest(f"{where}: expected a list of numbers, 1 where a token was sampled")
    if not (valid := numbers >= 0).all():
        n = int(valid.argmin())
        raise InvalidRequest(f"{where}: expected 1 where a token was sampled, else 0; found {value[n]} at position {n}")
    return numbers > 0


def _runs(which: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], which, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
