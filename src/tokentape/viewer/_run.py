"""Sum sessions up as a run: figures over the versions of the weights, and groups with the spread of their rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from tokentape._canonical import canonical_json
from tokentape.viewer._measuring import SessionMeasures, WeightsTally

MAX_GROUPS = 500
MAX_VERSIONS = 2000
MAX_REWARDS = 64
"""Rewards that are sent of a group."""

GROUP_KEYS = ("group", "group_id", "prompt_id", "task", "problem_id")
"""Keys of the metadata that name a group, in order of preference, unless another one is asked for."""


def run_of(measured: Sequence[SessionMeasures], group: str = "", *, aborts_recorded: bool = True) -> dict[str, Any]:
    """Return the figures of sessions, newest first. None stands for what is not recorded."""
    keys = _keys(measured)
    group = group or next((key for key in GROUP_KEYS if key in keys), "")
    return {
        "weights": _versions(measured, aborts_recorded)[-MAX_VERSIONS:],
        "keys": dict(sorted(keys.items())),
        "group": group,
        **_groups(measured, group),
    }


def _keys(measured: Sequence[SessionMeasures]) -> dict[str, int]:
    """Return by key of the metadata how many values it has."""
    values: dict[str, set[str]] = {}
    for one in measured:
        for key in one.info.metadata:
            values.setdefault(key, set()).add(group_value(one, key))
    return {key: len(several) for key, several in values.items()}


def group_value(one: SessionMeasures, key: str) -> str:
    """Return the value of a key as `assemble` names a group by it."""
    value = one.info.metadata[key]
    return value if isinstance(value, str) else canonical_json(value)


def _versions(measured: Sequence[SessionMeasures], aborts_recorded: bool) -> list[dict[str, Any]]:
    """Return the figures of each version of the weights, in the order in which they were first used."""
    tallies: dict[str, WeightsTally] = {}
    begun: dict[str, list[SessionMeasures]] = {}
    for one in reversed(measured):
        for n, (version, tally) in enumerate(one.weights.items()):
            tallies.setdefault(version, WeightsTally()).merge(tally)
            if n == 0:
                begun.setdefault(version, []).append(one)
    in_time = sorted(tallies, key=lambda version: tallies[version].first_at)
    return [
        {"weights": version, **_of_sessions(begun.get(version, [])), **_of_turns(tallies[version], aborts_recorded)}
        for version in in_time
    ]


def _of_sessions(sessions: Sequence[SessionMeasures]) -> dict[str, Any]:
    """Return the figures of the sessions that a version of the weights began."""
    lengths = [one.sampled_tokens for one in sessions]
    length = float(np.mean(lengths)) if lengths else None
    return {"sessions": len(sessions), "length": length, **_spread([one.reward for one in sessions])}


def _spread(rewards: Sequence[float | None]) -> dict[str, Any]:
    """Return mean and standard deviation of the rewards that were given, as GRPO takes them within a group."""
    given = [one for one in rewards if one is not None]
    if not given:
        return {"rewarded": 0, "mean": None, "sd": None, "least": None, "most": None}
    mean, least, most = float(np.mean(given)), min(given), max(given)
    # Of equal rewards numpy's may be 1e-17.
    sd = float(np.std(given)) if least != most else 0.0
    return {"rewarded": len(given), "mean": mean, "sd": sd, "least": least, "most": most}


def _of_turns(tally: WeightsTally, aborts_recorded: bool) -> dict[str, Any]:
    ratio, timed = tally.ratio.numbers(), tally.last_at > -math.inf
    seconds = tally.last_at - tally.begun_at if timed else 0.0
    return {
        "turns": tally.turns,
        "sampled_tokens": tally.sampled_tokens,
        "drift": tally.drift_changed / tally.drift_tokens if tally.drift_tokens else None,
        "ratio": tally.ratio.mean_ratio() if ratio.tokens else None,
        "ratio_tokens": ratio.tokens,
        "not_comparable": dict(tally.not_comparable),
        "k3": ratio.k3 if ratio.tokens else None,
        "ess": ratio.ess_tokens if ratio.tokens else None,
        "forks": dict(tally.forks),
        "truncated": tally.truncated / tally.ended if tally.ended else None,
        "aborts": dict(tally.aborts) if aborts_recorded else None,
        "resumes": dict(tally.resumes) if aborts_recorded else None,
        "tokens_per_second": tally.sampled_tokens / seconds if seconds > 0 else None,
        "first_at": tally.first_at if timed else None,
        "last_at": tally.last_at if timed else None,
    }


def _groups(measured: Sequence[SessionMeasures], key: str) -> dict[str, Any]:
    """Return the groups that the values of a key make, newest first."""
    groups: dict[str, list[SessionMeasures]] = {}
    for one in measured:
        if key in one.info.metadata:
            groups.setdefault(group_value(one, key), []).append(one)
    return {
        "groups": [_group(value, sessions) for value, sessions in list(groups.items())[:MAX_GROUPS]],
        "groups_total": len(groups),
    }


def _group(value: str, sessions: Sequence[SessionMeasures]) -> dict[str, Any]:
    versions = list(dict.fromkeys(version for one in reversed(sessions) for version in one.weights))
    drifts = Counter[str]()
    for one in sessions:
        if one.drift is not None:
            drifts.update({"tokens": one.drift["tokens"], "changed": one.drift["changed_tokens"]})
    rewarded = [(one.reward, one.info.session_id) for one in sessions if one.reward is not None]
    return {
        "value": value,
        **_of_sessions(sessions),
        "rewards": [reward for reward, _ in rewarded][:MAX_REWARDS],
        "best_and_worst": [choose(rewarded, key=itemgetter(0))[1] for choose in (max, min)] if rewarded else [],
        "drift": drifts["changed"] / drifts["tokens"] if drifts["tokens"] else None,
        "weights": [versions[0], versions[-1]] if versions else [],
    }
