"""Plant typical errors of data paths in correct rows."""

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
    """An error, and the kind of finding that must report it if it changes a row."""

    name: str
    kind: str
    plant: Plant


def _each(change: Callable[[Placed], Mapping[str, Any]]) -> Plant:
    return lambda golden, placed: [replace(one.row, **change(one)) for one in placed]


def _set(**changes: Callable[[Placed], Any]) -> Plant:
    return _each(lambda one: {name: change(one) for name, change in changes.items() if _given(one.row, name)})


def _moved(values: Any, by: int) -> Any:
    padding = np.zeros(abs(by), values.dtype)
    return np.concatenate([values[by:], padding] if by > 0 else [padding, values[:by]])


def _positions(one: Placed, change: Callable[[Any, float], Any]) -> dict[str, Any]:
    """Change all values per token. `change` also gets the value for an added token."""
    values = {"token_ids": PAD, "weights": one.row.weights.max(), "logprobs": 0.0, "advantages": 1.0}
    if isinstance(one.row.weight_versions, np.ndarray):
        values["weight_versions"] = one.row.weight_versions[0]
    return {name: change(getattr(one.row, name), new) for name, new in values.items() if _given(one.row, name)}


def _given(row: Row, name: str) -> bool:
    return getattr(row, name) is not None


def _once_per_turn(one: Placed) -> dict[str, Any]:
    turns = len({cell.turn for cell in one.cells if cell})
    return {name: getattr(one.row, name) * turns for name in ("reward", "advantages") if _given(one.row, name)}


def _without_last(one: Placed) -> dict[str, Any]:
    return _positions(one, lambda values, new: np.delete(values, one.end - 1))


def _unless_padding(one: Placed) -> Any:
    return np.where(one.row.token_ids == PAD, 0, one.row.weights)


def _of_prompt(one: Placed) -> Any:
    return _moved(one.row.logprobs, one.start - min(one.trained))


def _cooler(one: Placed) -> float:
    return 0.8 * (one.row.temperature or 0.0)


def _encoded_again(one: Placed) -> dict[str, Any]:
    first = min(one.trained)
    changed = _positions(one, lambda values, new: np.delete(values, first + 1))
    changed["token_ids"][first] = 3
    return changed


def _as_sessions(golden: Golden, placed: Sequence[Placed]) -> list[Row]:
    totals = {one.session.name: 0.0 for one in placed}
    for one in placed:
        totals[one.session.name] += one.row.weights.sum()
    return [
        replace(one.row, weights=one.row.weights * totals[one.session.name] / one.row.weights.sum()) for one in placed
    ]


def _mean_over_rows(golden: Golden, placed: Sequence[Placed]) -> list[Row]:
    right, wrong = golden.advantages(), golden.advantages([one.session.name for one in placed])
    factors = [wrong[one.session.name] / right[one.session.name] if one.scored else 1.0 for one in placed]
    return [
        replace(one.row, advantages=one.row.advantages * factor) if _given(one.row, "advantages") else one.row
        for one, factor in zip(placed, factors, strict=True)
    ]


def _reordered(golden: Golden, placed: Sequence[Placed]) -> list[Row]:
    rows = []
    for one, other in zip(placed, [*placed[1:], *placed[:1]], strict=True):
        changed: dict[str, Any] = {"reward": other.row.reward}
        if _given(other.row, "advantages"):
            changed["advantages"] = np.full(len(one.cells), other.row.advantages[min(other.trained)])
        rows.append(replace(one.row, **changed))
    return rows


def _at_temperature(one: Placed) -> Any:
    changed = one.row.logprobs.copy()
    for at, token in one.trained.items():
        changed[at] = token.logprob(0.8 * token.temperature)
    return changed


def _one_version(one: Placed) -> Any:
    versions, first = one.row.weight_versions, next(iter(one.trained.values())).version
    if not isinstance(versions, np.ndarray):
        return {first}
    return np.where(one.row.weights != 0, first, versions)


def _trained_too(more: Callable[[Placed], Any]) -> Plant:
    return _set(weights=lambda one: np.where(more(one), one.row.weights.max(), one.row.weights))


ERRORS = (
    Planted("mask shifted left", "mask shifted", _set(weights=lambda one: _moved(one.row.weights, 1))),
    Planted("mask shifted right", "mask shifted", _set(weights=lambda one: _moved(one.row.weights, -1))),
    Planted("mask inverted", "mask inverted", _set(weights=lambda one: 1.0 * (one.real & (one.row.weights == 0)))),
    Planted("prompt trained", "prompt trained", _trained_too(lambda one: one.prompt)),
    Planted("padding trained", "padding trained", _each(lambda one: _positions(one, np.append))),
    Planted("last token dropped", "last token not trained", _each(_without_last)),
    Planted("end of turn taken for padding", "last token not trained", _set(weights=_unless_padding)),
    Planted("ids encoded again", "ids not as recorded", _each(_encoded_again)),
    Planted("fork counted twice", "trained twice", _trained_too(lambda one: one.sampled)),
    Planted("siblings counted as sessions", "siblings counted as sessions", _as_sessions),
    Planted("group's mean over samples", "siblings counted as sessions", _mean_over_rows),
    Planted("logprobs shifted by one", "logprobs shifted", _set(logprobs=lambda one: _moved(one.row.logprobs, 1))),
    Planted("logprobs of prompt positions", "logprobs shifted", _set(logprobs=_of_prompt)),
    Planted("logprobs of another temperature", "logprobs of another temperature", _set(logprobs=_at_temperature)),
    Planted("float16 logprobs", "logprobs rounded", _set(logprobs=lambda one: np.float16(one.row.logprobs))),
    Planted("another temperature named", "temperature differs", _set(temperature=_cooler)),
    Planted("rewards broadcast twice", "reward counted several times", _each(_once_per_turn)),
    Planted("samples reordered, rewards not", "reward of another session", _reordered),
    Planted("missing reward read as 0", "reward invented", _each(lambda one: {} if one.scored else {"reward": 0.0})),
    Planted("truncation hidden", "truncation hidden", _set(truncated=lambda one: False)),
    Planted("one weight version for a row", "version of other weights", _set(weight_versions=_one_version)),
)
