"""Typical errors of trainers' data pipelines, planted in correct rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokentape.testing._rows import Placed, Row
from tokentape.testing.golden import PAD, Golden

Plant = Callable[[Golden, Sequence[Placed]], list[Row]]


@dataclass(frozen=True, slots=True)
class Planted:
    """An error, and the kind of finding that must report it when the error changes a row."""

    name: str
    kind: str
    plant: Plant


def _each(change: Callable[[Placed], Mapping[str, Any]]) -> Plant:
    return lambda golden, placed: [replace(match.row, **change(match)) for match in placed]


def _set(**changes: Callable[[Placed], Any]) -> Plant:
    return _each(
        lambda match: {name: change(match) for name, change in changes.items() if _has_values(match.row, name)}
    )


def _moved(values: Any, by: int) -> Any:
    padding = np.zeros(abs(by), values.dtype)
    return np.concatenate([values[by:], padding] if by > 0 else [padding, values[:by]])


def _positions(match: Placed, change: Callable[[Any, float], Any]) -> dict[str, Any]:
    """Apply `change` to every per-token array. Its second argument is the value to use for an added token."""
    values = {
        "token_ids": PAD,
        "weights": match.row.weights.max(),
        "logprobs": 0.0,
        "advantages": 1.0,
        "position_ids": 0,
    }
    if isinstance(match.row.weight_versions, np.ndarray):
        values["weight_versions"] = match.row.weight_versions[0]
    return {name: change(getattr(match.row, name), new) for name, new in values.items() if _has_values(match.row, name)}


def _has_values(row: Row, name: str) -> bool:
    return getattr(row, name) is not None


def _once_per_turn(match: Placed) -> dict[str, Any]:
    turns = len({cell.turn for cell in match.cells if cell})
    return {name: getattr(match.row, name) * turns for name in ("reward", "advantages") if _has_values(match.row, name)}


def _without_last(match: Placed) -> dict[str, Any]:
    return _positions(match, lambda values, new: np.delete(values, match.end - 1))


def _unless_padding(match: Placed) -> Any:
    return np.where(match.row.token_ids == PAD, 0, match.row.weights)


def _of_prompt(match: Placed) -> Any:
    moved = _moved(match.row.logprobs, match.start - min(match.trained))
    # If all are 0, no logprobs are moved here: they are missing.
    return moved if moved[[*match.trained]].any() else match.row.logprobs


def _encoded_again(match: Placed) -> dict[str, Any]:
    first = min(match.trained)
    changed = _positions(match, lambda values, new: np.delete(values, first + 1))
    changed["token_ids"][first] = 3
    return changed


def _as_sessions(golden: Golden, placed: Sequence[Placed]) -> list[Row]:
    totals = {match.session.name: 0.0 for match in placed}
    for match in placed:
        totals[match.session.name] += match.row.weights.sum()
    return [
        replace(match.row, weights=match.row.weights * totals[match.session.name] / match.row.weights.sum())
        for match in placed
    ]


def _mean_over_rows(golden: Golden, placed: Sequence[Placed]) -> list[Row]:
    expected, wrong = golden.advantages(), golden.advantages([match.session.name for match in placed])
    factors = [wrong[match.session.name] / expected[match.session.name] if match.scored else 1.0 for match in placed]
    return [
        replace(match.row, advantages=match.row.advantages * factor)
        if _has_values(match.row, "advantages")
        else match.row
        for match, factor in zip(placed, factors, strict=True)
    ]


def _reordered(golden: Golden, placed: Sequence[Placed]) -> list[Row]:
    rows = []
    for match, following in zip(placed, [*placed[1:], *placed[:1]], strict=True):
        changed: dict[str, Any] = {"reward": following.row.reward}
        if _has_values(following.row, "advantages"):
            changed["advantages"] = np.full(len(match.cells), following.row.advantages[min(following.trained)])
        rows.append(replace(match.row, **changed))
    return rows


def _at_temperature(match: Placed) -> Any:
    changed = match.row.logprobs.copy()
    for position, token in match.trained.items():
        changed[position] = token.logprob(0.8 * token.temperature)
    return changed


def _one_version(match: Placed) -> Any:
    versions, first = match.row.weight_versions, next(iter(match.trained.values())).version
    if not isinstance(versions, np.ndarray):
        return {first}
    return np.where(match.row.weights != 0, first, versions)


def _trained_too(more: Callable[[Placed], Any]) -> Plant:
    return _set(weights=lambda match: np.where(more(match), match.row.weights.max(), match.row.weights))


ERRORS = (
    Planted("mask shifted left", "mask shifted", _set(weights=lambda match: _moved(match.row.weights, 1))),
    Planted("mask shifted right", "mask shifted", _set(weights=lambda match: _moved(match.row.weights, -1))),
    Planted(
        "mask inverted", "mask inverted", _set(weights=lambda match: 1.0 * (match.real & (match.row.weights == 0)))
    ),
    Planted("prompt trained", "prompt trained", _trained_too(lambda match: match.prompt)),
    Planted("padding trained", "padding trained", _each(lambda match: _positions(match, np.append))),
    Planted("last token dropped", "last token not trained", _each(_without_last)),
    Planted("end of turn taken for padding", "last token not trained", _set(weights=_unless_padding)),
    Planted("ids encoded again", "ids not as recorded", _each(_encoded_again)),
    Planted("fork counted twice", "trained twice", _trained_too(lambda match: match.sampled)),
    Planted("siblings counted as sessions", "siblings counted as sessions", _as_sessions),
    Planted("group's mean over samples", "siblings counted as sessions", _mean_over_rows),
    Planted("logprobs shifted by one", "logprobs shifted", _set(logprobs=lambda match: _moved(match.row.logprobs, 1))),
    Planted("logprobs of prompt positions", "logprobs shifted", _set(logprobs=_of_prompt)),
    Planted("logprobs of another temperature", "logprobs of another temperature", _set(logprobs=_at_temperature)),
    Planted("logprobs left out", "logprobs missing", _set(logprobs=lambda match: np.zeros_like(match.row.logprobs))),
    Planted("logprobs clamped", "logprobs clamped", _set(logprobs=lambda match: np.maximum(match.row.logprobs, -10))),
    Planted("float16 logprobs", "logprobs rounded", _set(logprobs=lambda match: np.float16(match.row.logprobs))),
    Planted(
        "another temperature named",
        "temperature differs",
        _set(temperature=lambda match: 0.8 * (match.row.temperature or 0.0)),
    ),
    Planted("rewards broadcast twice", "reward counted several times", _each(_once_per_turn)),
    Planted("samples reordered, rewards not", "reward of another session", _reordered),
    Planted(
        "missing reward read as 0", "reward invented", _each(lambda match: {} if match.scored else {"reward": 0.0})
    ),
    Planted("truncation hidden", "truncation hidden", _set(truncated=lambda match: False)),
    Planted(
        "positions shifted by one", "positions differ", _set(position_ids=lambda match: match.row.position_ids + 1)
    ),
    Planted("one weight version for a row", "version of other weights", _set(weight_versions=_one_version)),
)
