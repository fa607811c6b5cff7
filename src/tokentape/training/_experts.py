"""Routed experts for trainers: which experts computed each token when it was sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape.errors import InvalidRequest
from tokentape.training._samples import Sample

EXPERTS = "routed_experts"
"""The name of the payload that has them."""


def routed_experts(sample: Sample, layers: int | None = None) -> npt.NDArray[np.int32] | None:
    """Return the experts of all tokens but the last, int32 [tokens - 1, layers, top k]; None if none are recorded.

    No forward pass reads the last token. SGLang returns the experts of all layers in one row: with `layers` such rows
    are taken apart, else they are returned as they are, [tokens - 1, layers * top k].

    Raises `InvalidRequest` if the experts of another token are not known, since a trainer replays all of them.
    """
    found = sample.payloads.get(EXPERTS)
    if found is None:
        return None
    rows, known = found.rows[:-1].astype(np.int32), found.known[:-1]
    if not known.all():
        raise InvalidRequest(
            f"session {sample.session_id!r} has routed experts for {int(known.sum())} of {len(known)} tokens; a "
            "trainer needs them for all: record whole sessions with `--payloads`, or leave them out with "
            "`replace(sample, payloads={})`",
            "samples",
        )
    return rows.reshape(len(rows), layers, -1) if layers and rows.ndim == 2 else rows


def all_experts(sample: Sample, last: int) -> npt.NDArray[np.int32] | None:
    """Return `routed_experts` with a row for the last token too, filled with `last`; None if none are recorded."""
    rows = routed_experts(sample)
    return None if rows is None else np.concatenate([rows, np.full((1, *rows.shape[1:]), last, np.int32)])


def experts_field(
    name: str, rows: npt.NDArray[np.int32] | None, end: int | None = None, start: int = 0
) -> dict[str, npt.NDArray[np.int32]]:
    """Return a field with the rows of the tokens from `start` to `end`; no field if there are no rows."""
    return {} if rows is None else {name: rows[start:end]}


def prime_rl_experts(sample: Sample, make: Callable[..., Any]) -> dict[str, Any]:
    """Return prime-rl's field: the bytes of the rows of all tokens, zeros for the last."""
    rows = all_experts(sample, 0)
    if rows is None:
        return {}
    return {"routed_experts": make(data=rows.tobytes(), shape=list(rows.shape), dtype=rows.dtype.name)}


def skyrl_experts(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return what SkyRL has for the experts of its samples. Raises `InvalidRequest` if only some samples have them."""
    found = [rows for rows in map(routed_experts, samples) if rows is not None]
    if found and len(found) < len(samples):
        raise InvalidRequest(
            f"{len(found)} of {len(samples)} samples have routed experts; SkyRL replays them for all or none", "samples"
        )
    return {"rollout_expert_indices": found} if found else {}
