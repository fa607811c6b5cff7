"""Write and read trajectories as JSON: an object with the fields in `fields`, one per line in JSON lines.

Each object has `schema_version`. To keep the lines of older records, and digests over them, unchanged, `sampled_from`,
`logprobs_of`, `finish_reasons` and `adapters` are left out if no turn has them, as are `role` and `lineage` if they
were not computed; lines contain the verdict as it was stored. Numbers keep every bit: a float32 logprob is written as
the double it equals, NaN as null. A payload's `data` is base64. The text is ASCII.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tokentape._canonical import canonical_json
from tokentape._session.fields import TRAJECTORIES, Layout
from tokentape._session.verdict import verdict_written
from tokentape.errors import InvalidRequest
from tokentape.types import Trajectory


def trajectory_to_json(trajectory: Trajectory, layout: Layout = TRAJECTORIES) -> dict[str, Any]:
    """Return the trajectory as plain values, with lists for arrays."""
    of_turns = ("sampled_from", "logprobs_of", "finish_reasons", "adapters")
    left_out = {name for name in of_turns if all(value is None for value in getattr(trajectory, name))}
    if not trajectory.role:
        left_out |= {"role", "lineage"}
    values = layout.values(trajectory).items()
    return {**layout.versions, **{name: _plain(value) for name, value in values if name not in left_out}}


def json_line(trajectory: Trajectory, layout: Layout = TRAJECTORIES) -> bytes:
    """Return the trajectory as a line of canonical JSON. Digests are computed over such lines."""
    distributions = *trajectory.sampled_from, *trajectory.logprobs_of
    value = trajectory_to_json(trajectory, layout) | {"verdict": verdict_written(trajectory.verdict, distributions)}
    return canonical_json(value).encode("ascii") + b"\n"


def trajectory_from_json(value: Mapping[str, Any], layout: Layout = TRAJECTORIES) -> Trajectory:
    """Return an object's trajectory. Raises `InvalidRequest` if it is invalid or has a different schema version."""
    layout.check_versions("a trajectory", value)
    return layout.made(value)


def write_jsonl(trajectories: Iterable[Trajectory], sink: str | Path | IO[bytes], layout: Layout = TRAJECTORIES) -> int:
    """Write one line per trajectory, without collecting them, and return the number of lines."""
    if isinstance(sink, str | Path):
        with open(sink, "wb") as file:
            return write_jsonl(trajectories, file, layout)
    count = 0
    for trajectory in trajectories:
        sink.write(json_line(trajectory, layout))
        count += 1
    return count


def read_jsonl(source: str | Path, layout: Layout = TRAJECTORIES) -> Iterator[Trajectory]:
    """Yield the trajectories in a file from `write_jsonl`. Raises `InvalidRequest` that names the invalid line."""
    return (trajectory for _, trajectory in read_jsonl_places(source, layout))


def read_jsonl_places(
    source: str | Path, layout: Layout = TRAJECTORIES, start: int = 0
) -> Iterator[tuple[int, Trajectory]]:
    """Yield (line offset, trajectory) from the line at offset `start`. Raises `InvalidRequest` for an invalid line."""
    with open(source, "rb") as lines:
        lines.seek(start)
        for number, line in enumerate(lines, 1):
            try:
                yield start, trajectory_from_json(json.loads(line), layout)
            except (ValueError, AttributeError) as error:
                raise InvalidRequest(f"{source} line {number}: {error}") from None
            start += len(line)


def _plain(value: Any) -> Any:
    match value:
        case np.ndarray():
            values = value.tolist()
            missing = value.dtype.kind == "f" and bool(np.isnan(value).any())
            return [None if number != number else number for number in values] if missing else values
        case bytes():
            return base64.b64encode(value).decode("ascii")
        case dict():
            return {name: _plain(entry) for name, entry in value.items()}
        case tuple():
            return list(value)
    return value
