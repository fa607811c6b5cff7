"""Trajectories as JSON: the columns of `arrow` by the same names, an object per trajectory, in JSONL one per line.

Each object also has `schema_version`, and its `metadata` is an object. Numbers keep every bit: a float32 logprob is
written as the double it equals. The text is ASCII.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tokentape.errors import InvalidRequest
from tokentape.session.arrow import SCHEMA_VERSION
from tokentape.session.chain import canonical_json
from tokentape.types import Trajectory


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as plain values, every array a list."""
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": trajectory.session_id,
        "leaf": trajectory.leaf,
        "token_ids": trajectory.token_ids.tolist(),
        "provenance": trajectory.provenance.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "logprobs": trajectory.logprobs.tolist(),
        "turns": list(trajectory.turns),
        "completion_starts": trajectory.completion_starts.tolist(),
        "completion_ends": trajectory.completion_ends.tolist(),
        "weight_versions": list(trajectory.weight_versions),
        "reward": trajectory.reward,
        "verdict": trajectory.verdict,
        "metadata": dict(trajectory.metadata),
    }


def trajectory_from_json(value: Mapping[str, Any]) -> Trajectory:
    """Undo `trajectory_to_json`. Raises `InvalidRequest` for another schema version and for what is no trajectory."""
    version = value.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InvalidRequest(f"a trajectory has schema version {version!r}, this release reads {SCHEMA_VERSION}")
    try:
        return Trajectory(
            session_id=value["session_id"],
            leaf=value["leaf"],
            token_ids=np.array(value["token_ids"], np.int32),
            provenance=np.array(value["provenance"], np.uint8),
            loss_mask=np.array(value["loss_mask"], np.bool_),
            logprobs=np.array(value["logprobs"], np.float32),
            turns=tuple(value["turns"]),
            completion_starts=np.array(value["completion_starts"], np.int32),
            completion_ends=np.array(value["completion_ends"], np.int32),
            weight_versions=tuple(value["weight_versions"]),
            reward=value["reward"],
            verdict=value["verdict"],
            metadata=value["metadata"],
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a trajectory is damaged ({type(error).__name__}: {error})") from None


def write_jsonl(trajectories: Iterable[Trajectory], sink: str | Path | IO[bytes]) -> int:
    """Write one line per trajectory, as they come, and return how many."""
    if isinstance(sink, str | Path):
        with open(sink, "wb") as file:
            return write_jsonl(trajectories, file)
    written = 0
    for trajectory in trajectories:
        sink.write(canonical_json(trajectory_to_json(trajectory)).encode("ascii") + b"\n")
        written += 1
    return written


def read_jsonl(source: str | Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file that `write_jsonl` wrote. Raises `InvalidRequest` naming the damaged line."""
    with open(source, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield trajectory_from_json(json.loads(line))
            except (ValueError, AttributeError) as error:
                raise InvalidRequest(f"{source} line {number}: {error}") from None
