"""Trajectories as JSON: the columns of `arrow` by the same names, an object per trajectory, in JSONL one per line.

Each object also has `schema_version`, and its `metadata` is an object. `sampled_from` and `logprobs_of` are left out
where they are not known of any turn. In a line the verdict then does not say so either: lines of older records, and
digests over them, stay what they were.
Numbers keep every bit: a float32 logprob is written as the double it equals, and NaN, where a reward or value is
missing, as null. The `data` of a payload is base64. The text is ASCII.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tokentape.canonical import canonical_json
from tokentape.errors import InvalidRequest
from tokentape.session.arrow import (
    COLUMN_PREFIX,
    PAYLOAD_PREFIX,
    SCHEMA_VERSION,
    distributions,
    no_rewards,
    spans_of_turns,
)
from tokentape.session.payloads import rows_as_bytes, rows_from_bytes
from tokentape.session.verdict import verdict_read, verdict_written
from tokentape.types import MediaSpan, TokenRows, Trajectory


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
        "turn_rewards": _nulled(trajectory.turn_rewards),
        "weight_spans": [{"start": start, "end": end, "version": one} for start, end, one in trajectory.weight_spans],
        "media": [asdict(span) for span in trajectory.media],
        **distributions_to_json(trajectory),
        **{COLUMN_PREFIX + name: _nulled(values) for name, values in sorted(trajectory.columns.items())},
        **{PAYLOAD_PREFIX + name: _payload(rows) for name, rows in sorted(trajectory.payloads.items())},
    }


def distributions_to_json(trajectory: Trajectory) -> dict[str, list[dict[str, Any] | None]]:
    """`sampled_from` and `logprobs_of`, each unless it is not known of any turn."""
    of_turns = {"sampled_from": trajectory.sampled_from, "logprobs_of": trajectory.logprobs_of}
    return {name: [asdict(one) if one else None for one in found] for name, found in of_turns.items() if any(found)}


def json_line(trajectory: Trajectory) -> bytes:
    """The trajectory as its line of JSONL. It has no other spelling: a digest over lines is one over contents."""
    known = *trajectory.sampled_from, *trajectory.logprobs_of
    value = trajectory_to_json(trajectory) | {"verdict": verdict_written(trajectory.verdict, known)}
    return canonical_json(value).encode("ascii") + b"\n"


def trajectory_from_json(value: Mapping[str, Any]) -> Trajectory:
    """Undo `trajectory_to_json`. Raises `InvalidRequest` for another schema version and for what is no trajectory."""
    version = value.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InvalidRequest(f"a trajectory has schema version {version!r}, this release reads {SCHEMA_VERSION}")
    try:
        starts, ends = np.array(value["completion_starts"], np.int32), np.array(value["completion_ends"], np.int32)
        rewards, spans = value.get("turn_rewards"), value.get("weight_spans")
        sampled_from = distributions(value.get("sampled_from"), value["turns"])
        logprobs_of = distributions(value.get("logprobs_of"), value["turns"])
        return Trajectory(
            session_id=value["session_id"],
            leaf=value["leaf"],
            token_ids=np.array(value["token_ids"], np.int32),
            provenance=np.array(value["provenance"], np.uint8),
            loss_mask=np.array(value["loss_mask"], np.bool_),
            logprobs=np.array(value["logprobs"], np.float32),
            turns=tuple(value["turns"]),
            completion_starts=starts,
            completion_ends=ends,
            weight_versions=tuple(value["weight_versions"]),
            reward=value["reward"],
            verdict=verdict_read(value["verdict"], (*sampled_from, *logprobs_of)),
            metadata=value["metadata"],
            turn_rewards=no_rewards(value["turns"]) if rewards is None else np.array(rewards, np.float64),
            weight_spans=spans_of_turns(starts, ends, value["weight_versions"])
            if spans is None
            else tuple((span["start"], span["end"], span["version"]) for span in spans),
            columns={
                name.removeprefix(COLUMN_PREFIX): np.array(values, np.float32)
                for name, values in value.items()
                if name.startswith(COLUMN_PREFIX) and values is not None
            },
            payloads={
                name.removeprefix(PAYLOAD_PREFIX): _token_rows(rows)
                for name, rows in value.items()
                if name.startswith(PAYLOAD_PREFIX) and rows is not None
            },
            media=tuple(MediaSpan(**span) for span in value.get("media", ())),
            sampled_from=sampled_from,
            logprobs_of=logprobs_of,
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidRequest(f"a trajectory is damaged ({type(error).__name__}: {error})") from None


def write_jsonl(trajectories: Iterable[Trajectory], sink: str | Path | IO[bytes]) -> int:
    """Write one line per trajectory, as they come, and return how many."""
    if isinstance(sink, str | Path):
        with open(sink, "wb") as file:
            return write_jsonl(trajectories, file)
    written = 0
    for trajectory in trajectories:
        sink.write(json_line(trajectory))
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


def _nulled(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _payload(payload: TokenRows) -> dict[str, Any]:
    dtype, data = rows_as_bytes(payload.rows)
    return {
        "dtype": dtype,
        "shape": list(payload.rows.shape),
        "data": base64.b64encode(data).decode("ascii"),
        "known": payload.known.tolist(),
    }


def _token_rows(value: Mapping[str, Any]) -> TokenRows:
    data = base64.b64decode(value["data"], validate=True)
    return TokenRows(rows_from_bytes(value["dtype"], value["shape"], data), np.array(value["known"], bool))
