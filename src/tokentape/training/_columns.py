"""Numbers of a sample: named columns with one value per token, rewards, and advantages within a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tokentape.errors import InvalidRequest
from tokentape.training._samples import Sample
from tokentape.types import TokenValues


def with_column(sample: Sample, name: str, values: npt.ArrayLike) -> Sample:
    """Return the sample with a named column: give one number for all trained tokens, one per turn or one per token.

    One number, or one per turn, applies to trained tokens only; other tokens get 0. Raises `InvalidRequest` for another
    number of values.

    >>> with_column(sample, "advantages", 0.5)                                      # doctest: +SKIP
    """
    numbers = np.asarray(values, np.float32)
    tokens, turns = len(sample.token_ids), len(sample.turns)
    if numbers.shape == (tokens,):
        column = numbers
    elif numbers.shape in ((), (turns,)):
        column = np.zeros(tokens, np.float32)
        for (_, start, end), value in zip(sample.completions(), np.broadcast_to(numbers, (turns,)), strict=True):
            column[start:end] = value
        column[~sample.loss_mask] = 0
    else:
        raise InvalidRequest(
            f"values of shape {numbers.shape} for a sample of {tokens} tokens and {turns} turns; expected one number, "
            "one per turn or one per token",
            "values",
        )
    return replace(sample, columns={**sample.columns, name: column})


def group_advantages(
    samples: Sequence[Sample], *, name: str = "advantages", scale: bool = True, epsilon: float = 1e-6
) -> list[Sample]:
    """Return samples with GRPO's advantage as a column: reward minus the group's mean, divided by its deviation.

    The mean is over sessions: a session with several samples counts once, with the mean of their rewards. `scale` False
    omits the division (Dr. GRPO). Raises `InvalidRequest` for a sample without reward or group.
    """
    rewards: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        rewards.setdefault(_group_of(sample), {}).setdefault(sample.session_id, []).append(reward_of(sample))
    center: dict[str, tuple[float, float]] = {}
    for group, sessions in rewards.items():
        of_sessions = [np.mean(one) for one in sessions.values()]
        center[group] = float(np.mean(of_sessions)), float(np.std(of_sessions)) + epsilon if scale else 1.0
    out = []
    for sample in samples:
        mean, divisor = center[_group_of(sample)]
        out.append(with_column(sample, name, (reward_of(sample) - mean) / divisor))
    return out


def _group_of(sample: Sample) -> str:
    if sample.group is None:
        raise InvalidRequest(
            f"a sample of session {sample.session_id!r} has no group: name the key of its metadata with --group, or in "
            "Python `group` to `assemble`"
        )
    return sample.group


def column_of(sample: Sample, name: str) -> TokenValues:
    """Return a column. Raises `InvalidRequest` if there is none, or if it has no number for a trained token."""
    where = f"session {sample.session_id!r}, leaf {sample.leaf}"
    if name not in sample.columns:
        raise InvalidRequest(f"{where}: there is no column {name!r}; see `with_column`", "samples")
    missing = np.flatnonzero(sample.loss_mask & ~np.isfinite(sample.columns[name]))
    if missing.size:
        raise InvalidRequest(
            f"{where}: no value in column {name!r} for {missing.size} trained tokens, the first at {int(missing[0])}; "
            "annotate them, or leave the sample out",
            "samples",
        )
    return sample.columns[name]


def reward_of(sample: Sample) -> float:
    """Return a sample's reward. Raises `InvalidRequest` if there is none."""
    if sample.reward is None:
        raise InvalidRequest(f"session {sample.session_id!r} has no reward; give one, or leave the session out")
    return sample.reward
