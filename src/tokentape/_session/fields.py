"""Define the fields of trajectories in files, in one table for Parquet (`arrow`) and JSON lines (`jsonl`).

A trajectory can have more: `column_NAME`, per-token numbers from clients, and `payload_NAME`, per-token arrays from
engines, as {dtype, shape, data, known}: `np.frombuffer(data, dtype).reshape(shape)` is the array. Adding fields keeps
the `SCHEMA_VERSION`; changing or removing a field increments it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape._session.chain import distribution_fields
from tokentape._session.payloads import rows_as_bytes, rows_from_bytes
from tokentape._session.verdict import verdict_read
from tokentape.errors import InvalidRequest
from tokentape.types import LineageEdge, MediaSpan, Provenance, TokenDistribution, TokenRows, Trajectory

SCHEMA_VERSION = 1

COLUMN_PREFIX = "column_"
PAYLOAD_PREFIX = "payload_"


@dataclass(frozen=True, slots=True)
class FileField:
    name: str
    kind: str | tuple[tuple[str, str], ...]
    """The Arrow type of the value, or of each list entry. For a struct, the names and types of its members."""
    per: str | None = None
    """For lists, what each entry belongs to: a `token`, `turn`, `span` or `edge`. None for a single value."""
    array: bool = False
    """Whether the attribute is a numpy array."""
    nullable: bool = False
    """Whether the value, a list entry, or a member of an entry may be null."""
    least: float = -np.inf
    most: float = np.inf
    """The bounds of an array's numbers."""
    write: Callable[[Any], Any] = lambda value: value
    """Converts the attribute to plain values."""
    read: Callable[[Any], Any] = lambda value: value
    """Converts plain values to the attribute."""
    absent: Callable[[Mapping[str, Any]], Any] | None = None
    """Computes the attribute from the other plain values, for files that are older than the field."""


def _read_distributions(values: Iterable[Mapping[str, Any] | None]) -> tuple[TokenDistribution | None, ...]:
    return tuple(TokenDistribution(**fields) if fields else None for fields in values)


def _spans_of_turns(values: Mapping[str, Any]) -> tuple[tuple[int, int, str], ...]:
    turns = zip(values["completion_starts"], values["completion_ends"], values["weight_versions"], strict=True)
    return tuple((int(start), int(end), version) for start, end, version in turns)


def _not_known(values: Mapping[str, Any]) -> tuple[None, ...]:
    return (None,) * len(values["turns"])


def _distributions(name: str) -> FileField:
    kind = (("penalties", "bool"), ("temperature", "double"), ("truncation", "bool"), ("grammar", "bool"))
    return FileField(
        name,
        kind,
        "turn",
        nullable=True,
        write=lambda values: [distribution and distribution_fields(distribution) for distribution in values],
        read=_read_distributions,
        absent=_not_known,
    )


FIELDS = (
    FileField("session_id", "string"),
    FileField("leaf", "int32"),
    FileField("token_ids", "int32", "token", array=True, least=0),
    FileField("provenance", "uint8", "token", array=True, most=max(Provenance)),
    FileField("loss_mask", "bool", "token", array=True),
    # Rounding in a float32 sum may give logprobs slightly above 0.
    FileField("logprobs", "float", "token", array=True, least=float(np.finfo(np.float32).min), most=1e-3),
    FileField("turns", "int32", "turn", read=tuple),
    FileField("completion_starts", "int32", "turn", array=True, least=0),
    FileField("completion_ends", "int32", "turn", array=True, least=0),
    FileField("weight_versions", "string", "turn", read=tuple),
    FileField("reward", "double", nullable=True),
    FileField("verdict", "string"),
    FileField("metadata", "json", write=dict),
    FileField(
        "turn_rewards", "double", "turn", array=True, absent=lambda values: np.full(len(values["turns"]), np.nan)
    ),
    FileField(
        "weight_spans",
        (("start", "int32"), ("end", "int32"), ("version", "string")),
        "span",
        write=lambda spans: [{"start": start, "end": end, "version": version} for start, end, version in spans],
        read=lambda spans: tuple((span["start"], span["end"], span["version"]) for span in spans),
        absent=_spans_of_turns,
    ),
    FileField(
        "media",
        (("start", "int32"), ("length", "int32"), ("sha256", "string"), ("settings", "string")),
        "span",
        write=lambda spans: [asdict(span) for span in spans],
        read=lambda spans: tuple(MediaSpan(**span) for span in spans),
        absent=lambda values: (),
    ),
    _distributions("sampled_from"),
    _distributions("logprobs_of"),
    FileField("finish_reasons", "string", "turn", nullable=True, read=tuple, absent=_not_known),
    FileField("adapters", "string", "turn", nullable=True, read=tuple, absent=_not_known),
    FileField("role", "string", absent=lambda values: ""),
    FileField(
        "lineage",
        (
            ("kind", "string"),
            ("turn", "int32"),
            ("parent_session", "string"),
            ("parent", "int32"),
            ("evidence", "string"),
            ("confidence", "double"),
        ),
        "edge",
        nullable=True,
        write=lambda edges: [asdict(edge) for edge in edges],
        read=lambda edges: tuple(LineageEdge(**edge) for edge in edges),
        absent=lambda values: (),
    ),
)

DTYPES = {"int32": np.int32, "uint8": np.uint8, "bool": np.bool_, "float": np.float32, "double": np.float64}
"""The dtypes of arrays, by Arrow type."""


@dataclass(frozen=True)
class Layout:
    """The class of a file's rows: `Trajectory`, or a subclass with more fields and a separate version."""

    record: type[Trajectory]
    more: tuple[FileField, ...] = ()
    version_name: str = ""
    version: int = 1

    @property
    def fields(self) -> tuple[FileField, ...]:
        """All fields, in column order."""
        return *FIELDS, *self.more

    @property
    def versions(self) -> dict[str, int]:
        """The versions that a file records, by name."""
        return {"schema_version": SCHEMA_VERSION, **({self.version_name: self.version} if self.version_name else {})}

    def check_versions(self, source: str, versions: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` unless this release reads `versions`, which maps names to versions."""
        for name, version in self.versions.items():
            if versions.get(name) is None:
                what = "trajectories" if name == "schema_version" else "samples; make samples from trajectories first"
                raise InvalidRequest(f"{source} has no {name}, so it does not contain {what}")
            if str(versions[name]) != str(version):
                raise InvalidRequest(
                    f"{source} has {name.replace('_', ' ')} {versions[name]}, but this release reads {version}; "
                    "read it with the release that wrote it, or export it again"
                )

    def values(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return a trajectory as a dict of plain values by column name. Arrays stay arrays."""
        return {
            **{field.name: field.write(getattr(trajectory, field.name)) for field in self.fields},
            **{COLUMN_PREFIX + name: values for name, values in sorted(trajectory.columns.items())},
            **{PAYLOAD_PREFIX + name: _payload(rows) for name, rows in sorted(trajectory.payloads.items())},
        }

    def made(self, values: Mapping[str, Any]) -> Trajectory:
        """Undo `values`: return the trajectory. Unknown names are ignored.

        Arrays may be lists, and bytes base64. Raises `InvalidRequest` if a value has a wrong type, length or range.
        """
        try:
            return self._made(values)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InvalidRequest(
                f"a trajectory is corrupt ({type(error).__name__}: {error}); export it again"
            ) from None

    def _made(self, values: Mapping[str, Any]) -> Trajectory:
        attributes = {field.name: _attribute(field, values) for field in self.fields}
        attributes["verdict"] = verdict_read(
            attributes["verdict"], (*attributes["sampled_from"], *attributes["logprobs_of"])
        )
        present = {name: value for name, value in values.items() if value is not None}
        columns = {
            name.removeprefix(COLUMN_PREFIX): _array(FileField(name, "float"), value)
            for name, value in present.items()
            if name.startswith(COLUMN_PREFIX)
        }
        payloads = {
            name.removeprefix(PAYLOAD_PREFIX): _token_rows(value)
            for name, value in present.items()
            if name.startswith(PAYLOAD_PREFIX)
        }
        tokens, turns = len(attributes["token_ids"]), len(attributes["turns"])
        per_token = {field.name: attributes[field.name] for field in self.fields if field.per == "token"} | columns
        per_token |= {f"{name}.rows": token_rows.rows for name, token_rows in payloads.items()}
        per_token |= {f"{name}.known": token_rows.known for name, token_rows in payloads.items()}
        per_turn = {field.name: attributes[field.name] for field in self.fields if field.per == "turn"}
        for expected, lists in ((tokens, per_token), (turns, per_turn)):
            for name, entries in lists.items():
                if len(entries) != expected:
                    raise ValueError(f"{name} has {len(entries)} values, expected {expected}")
        starts, ends = attributes["completion_starts"], attributes["completion_ends"]
        if (starts > ends).any() or (ends > tokens).any():
            raise ValueError(f"a completion ends before its start, or after the last of {tokens} tokens")
        # A trained token that was not sampled, as in samples of supervised fine-tuning, has no logprob.
        recorded = attributes["loss_mask"] & np.isfinite(attributes["logprobs"])
        if (wrong := recorded & (attributes["provenance"] != Provenance.SAMPLED)).any():
            raise ValueError(f"loss_mask trains token {wrong.argmax()}, which has a logprob but was not sampled")
        return self.record(**attributes, columns=columns, payloads=payloads)


TRAJECTORIES = Layout(Trajectory)


def _attribute(field: FileField, values: Mapping[str, Any]) -> Any:
    if field.absent is not None and values.get(field.name) is None:
        return field.absent(values)
    value = values[field.name]
    if field.array:
        return _array(field, value)
    entries = value if field.per else [value]
    if not isinstance(entries, list | tuple) or not all(_fits(field.kind, entry, field.nullable) for entry in entries):
        raise TypeError(f"{field.name} is {str(value)[:80]}, expected {'a list of ' * bool(field.per)}{field.kind}")
    return field.read(value)


_PLAIN = {"string": str, "int32": int, "double": int | float, "bool": bool, "json": Mapping}


def _fits(kind: str | tuple[tuple[str, str], ...], value: Any, nullable: bool) -> bool:
    if value is None:
        return nullable
    if not isinstance(kind, str):
        return isinstance(value, Mapping) and all(
            _fits(field_kind, value.get(name), nullable) for name, field_kind in kind
        )
    return isinstance(value, _PLAIN[kind]) and (kind == "bool" or not isinstance(value, bool))


def _array(field: FileField, value: Any) -> npt.NDArray[Any]:
    dtype = np.dtype(DTYPES[str(field.kind)])
    array = np.asarray(value)
    if array.dtype == object and dtype.kind == "f":
        array = np.asarray([np.nan if number is None else number for number in value])  # JSON has no NaN
    if array.ndim != 1 or (array.size and array.dtype.kind not in {"f": "fiu", "b": "b"}.get(dtype.kind, "iu")):
        raise TypeError(f"{field.name} is an array of {array.dtype} {list(array.shape)}, expected a list of {dtype}")
    least, most = field.least, field.most
    if dtype.kind in "iu":
        least, most = max(least, np.iinfo(dtype.name).min), min(most, np.iinfo(dtype.name).max)
    outside = (array < least) | (array > most)
    if outside.any():
        raise ValueError(f"{field.name} has {array[outside][0]}, expected {least} to {most}")
    return array.astype(dtype, copy=False)


def _payload(payload: TokenRows) -> dict[str, Any]:
    dtype, data = rows_as_bytes(payload.rows)
    return {"dtype": dtype, "shape": payload.rows.shape, "data": data, "known": payload.known}


def _token_rows(value: Mapping[str, Any]) -> TokenRows:
    data = value["data"]
    data = base64.b64decode(data, validate=True) if isinstance(data, str) else data
    return TokenRows(rows_from_bytes(value["dtype"], value["shape"], data), np.array(value["known"], bool))
