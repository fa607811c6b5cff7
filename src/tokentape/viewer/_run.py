"""Measure sessions, and aggregate them as a run: figures per weight version, and groups with their rewards.

Each version of a session is loaded once. The numbers come from the functions that `tokentape drift` and `tokentape
export` use, over the trajectories that `export` writes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from threading import Lock
from typing import Any

import numpy as np

from tokentape._canonical import canonical_json
from tokentape._session.comparable import has_supports, not_comparable
from tokentape.audit._drift.meter import RowMeter
from tokentape.audit._id_rows import trajectory_rows
from tokentape.audit._statistics import NumbersTally
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.errors import InvalidRequest, NotFound, TokentapeError
from tokentape.types import SessionInfo, Trajectory
from tokentape.viewer._comparing import RecordReader
from tokentape.viewer._source import SessionView, TurnNode, ViewerSource

TRAINER_LOGPROBS = "trainer_logprobs"
"""The column into which a trainer writes its own logprobs, from which importance ratios are computed."""

_MOST_KEPT = 100_000

_DRIFT = ("drift_tokens", "drift_changed")


@dataclass(slots=True)
class WeightsTally:
    """Counts over the turns that began with one weight version."""

    counts: Counter[str] = field(default_factory=Counter)
    """turns; sampled_tokens; ended: turns with a known finish reason that were not aborted; truncated: those of them
    that ran out of tokens; drift_tokens, drift_changed."""
    forks: Counter[str] = field(default_factory=Counter)
    aborts: Counter[str] = field(default_factory=Counter)
    resumes: Counter[str] = field(default_factory=Counter)
    not_comparable: Counter[str] = field(default_factory=Counter)
    """Turns whose trainer logprobs can't be compared with the recorded logprobs, by reason."""
    begun_at: float = math.inf
    """The latest known time before sampling began. The times are infinite if they are not recorded."""
    first_at: float = math.inf
    """When the first turn was recorded."""
    last_at: float = -math.inf
    ratio: NumbersTally = field(default_factory=NumbersTally)

    def add(self, turn: TurnNode, begun_at: float) -> None:
        """Count a turn that was not sampled before `begun_at`."""
        aborted, reason = turn.finish_reason == "abort", turn.finish_reason
        self.counts.update(turns=1, sampled_tokens=turn.sampled_tokens)
        self.counts.update(ended=int(reason is not None and not aborted), truncated=int(reason == "length"))
        self.forks.update([turn.fork] if turn.fork else [])
        self.aborts.update([turn.abort_cause or "unknown"] if aborted else [])
        self.resumes.update(turn.resumes)
        if turn.created_at is not None:
            self._span(begun_at, turn.created_at, turn.created_at)

    def merge(self, other: WeightsTally) -> None:
        for name in ("counts", "forks", "aborts", "resumes", "not_comparable"):
            getattr(self, name).update(getattr(other, name))
        self._span(other.begun_at, other.first_at, other.last_at)
        self.ratio.merge(other.ratio)

    def _span(self, begun_at: float, first_at: float, last_at: float) -> None:
        self.begun_at = min(self.begun_at, begun_at)
        self.first_at, self.last_at = min(self.first_at, first_at), max(self.last_at, last_at)


@dataclass(frozen=True, slots=True)
class SessionMeasures:
    """Measures of one version of a session."""

    info: SessionInfo
    version: str
    verdicts: tuple[str, ...]
    """One verdict per trajectory that `export` writes."""
    roles: tuple[str, ...]
    """The roles of these trajectories, each once."""
    reward: float | None
    """Mean over the trajectories that train a token and have a reward, as in GRPO's advantages."""
    sampled_tokens: int
    drift: Mapping[str, Any] | None
    """None if there is no tokenizer, or the tokenizer lacks an id."""
    weights: Mapping[str, WeightsTally]
    """Counts by weight version, in the order of turns."""

    def shown(self) -> dict[str, Any]:
        """Return the measures for a list."""
        return {"verdicts": self.verdicts, "roles": self.roles, "weights": list(self.weights), "drift": self.drift}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A version of a session that can't be read."""

    version: str
    why: str


class Measures:
    """Measures sessions, and caches results until a session changes. Methods block, and are thread-safe."""

    def __init__(self, source: ViewerSource, reader: RecordReader) -> None:
        self._source, self._reader = source, reader
        self._known: dict[str, SessionMeasures | Unreadable] = {}
        self._lock = Lock()

    @cached_property
    def _meter(self) -> RowMeter | None:
        return None if self._reader.tokenizer is None else RowMeter(self._reader.tokenizer)

    def known(self, session_id: str, version: str) -> SessionMeasures | Unreadable | None:
        """Return the measures of this version of a session, or why it can't be read; None if it was not measured."""
        latest = self._known.get(session_id)
        return latest if latest is not None and latest.version == version else None

    def measured(
        self, versions: Mapping[str, tuple[str, str]], seconds: float | None = None
    ) -> tuple[dict[str, SessionMeasures], dict[str, str]]:
        """Return measures by session, and by session why it can't be read. Stop measuring after `seconds`."""
        until = None if seconds is None else time.monotonic() + seconds
        measured, unreadable = {}, {}
        for session_id, (_, version) in versions.items():
            measures = self.known(session_id, version)
            if measures is None and (until is None or time.monotonic() < until):
                measures = self._measure(session_id, version)
            if isinstance(measures, Unreadable):
                unreadable[session_id] = measures.why
            elif measures is not None:
                measured[session_id] = measures
        return measured, unreadable

    def _measure(self, session_id: str, version: str) -> SessionMeasures | Unreadable | None:
        with self._lock:
            earlier = self.known(session_id, version)
            if earlier is not None:
                return earlier
            measures: SessionMeasures | Unreadable
            try:
                measures = self._measures_of(self._source.load(session_id))
            except NotFound:
                return None
            except TokentapeError as error:
                if error.retry:
                    raise
                measures = Unreadable(version, str(error))
            self._known[session_id] = measures
            if len(self._known) > _MOST_KEPT:
                self._known.pop(next(iter(self._known)))
            return measures

    def _measures_of(self, view: SessionView) -> SessionMeasures:
        exported = view.exported()
        weights: dict[str, WeightsTally] = {}
        recorded_at = {turn.seq: turn.created_at for turn in view.turns}
        for turn in view.turns:
            # A turn is sampled after the turn that it continues was recorded.
            before = None if turn.parent is None else recorded_at.get(turn.parent)
            begun_at = view.info.created_at if before is None else before
            weights.setdefault(turn.weight_version, WeightsTally()).add(turn, begun_at)
        for trajectory in exported:
            _add_ratios(weights, trajectory)
        drift = self._drift(exported, weights)
        rewards = [branch.reward for branch in exported if branch.reward is not None and branch.loss_mask.any()]
        return SessionMeasures(
            info=view.info,
            version=view.version,
            verdicts=tuple(trajectory.verdict for trajectory in exported),
            roles=tuple(dict.fromkeys(trajectory.role for trajectory in exported if trajectory.role)),
            # Exact: the mean of equal rewards is that reward, whatever their number.
            reward=statistics.mean(rewards) if rewards else None,
            sampled_tokens=sum(turn.sampled_tokens for turn in view.turns),
            drift=drift,
            weights=weights,
        )

    def _drift(self, exported: Iterable[Trajectory], weights: Mapping[str, WeightsTally]) -> dict[str, Any] | None:
        if self._meter is None:
            return None
        classes: Counter[str] = Counter()
        try:
            rows = list(self._meter.measure(trajectory_rows(exported, {})))
        except InvalidRequest:
            # The tokenizer lacks an id: the record is from a different model.
            return None
        for row in rows:
            for key, many in row.counts.items():
                if key[0] == "weights":
                    weights[key[1]].counts.update(drift_tokens=many, drift_changed=row.changed[key])
            classes.update(ARTIFACTS[artifact].kind for artifact, *_ in row.stretches)
        tokens, changed = (sum(tally.counts[name] for tally in weights.values()) for name in _DRIFT)
        return {"tokens": tokens, "changed_tokens": changed, "classes": dict(classes)}


def _add_ratios(weights: Mapping[str, WeightsTally], trajectory: Trajectory) -> None:
    """Add trainer minus recorded logprobs of the trained tokens that have both, if they can be compared."""
    trainers = trajectory.columns.get(TRAINER_LOGPROBS)
    if trainers is None:
        return
    distributions = zip(trajectory.sampled_from, trajectory.logprobs_of, strict=True)
    turns = zip(trajectory.weight_versions, trajectory.completions(), distributions, strict=True)
    for version, (_, start, end), (sampled, recorded) in turns:
        compared = trajectory.loss_mask[start:end] & ~np.isnan(trainers[start:end])
        if not compared.any():
            continue
        wrong = not_comparable(sampled, recorded, has_supports(trajectory, start, end))
        if wrong:
            weights[version].not_comparable.update([wrong])
            continue
        apart = (trainers[start:end].astype(np.float64) - trajectory.logprobs[start:end])[compared]
        weights[version].ratio.add(apart[~np.isnan(apart)])


MAX_GROUPS = 500
MAX_VERSIONS = 2000
MAX_REWARDS = 64
"""The maximum number of rewards to send per group."""

GROUP_KEYS = ("group", "group_id", "prompt_id", "task", "problem_id")
"""Metadata keys that name a group by default, in order of preference."""


def run_of(measured: Sequence[SessionMeasures], group: str = "", *, aborts_recorded: bool = True) -> dict[str, Any]:
    """Return the figures of sessions, which are passed newest first. A figure that is not recorded is None."""
    keys = _keys(measured)
    group = group or next((key for key in GROUP_KEYS if key in keys), "")
    return {
        "weights": _versions(measured, aborts_recorded)[-MAX_VERSIONS:],
        "keys": dict(sorted(keys.items())),
        "group": group,
        **_groups(measured, group),
    }


def _keys(measured: Sequence[SessionMeasures]) -> dict[str, int]:
    """Return the number of distinct values of each metadata key."""
    values: dict[str, set[str]] = {}
    for session in measured:
        for key in session.info.metadata:
            values.setdefault(key, set()).add(group_value(session, key))
    return {key: len(several) for key, several in values.items()}


def group_value(session: SessionMeasures, key: str) -> str:
    """Return a metadata value as the name of a group, as `assemble` does."""
    value = session.info.metadata[key]
    return value if isinstance(value, str) else canonical_json(value)


def _versions(measured: Sequence[SessionMeasures], aborts_recorded: bool) -> list[dict[str, Any]]:
    """Return the figures of each weight version, in the order of first use."""
    tallies: dict[str, WeightsTally] = {}
    begun: dict[str, list[SessionMeasures]] = {}
    for session in reversed(measured):
        for n, (version, tally) in enumerate(session.weights.items()):
            tallies.setdefault(version, WeightsTally()).merge(tally)
            if n == 0:
                begun.setdefault(version, []).append(session)
    in_time = sorted(tallies, key=lambda version: tallies[version].first_at)
    return [
        {"weights": version, **_of_sessions(begun.get(version, [])), **_of_turns(tallies[version], aborts_recorded)}
        for version in in_time
    ]


def _of_sessions(sessions: Sequence[SessionMeasures]) -> dict[str, Any]:
    """Return figures of sessions, with the mean and standard deviation of rewards that GRPO uses in a group."""
    length = float(np.mean([session.sampled_tokens for session in sessions])) if sessions else None
    values = [session.reward for session in sessions if session.reward is not None]
    least, most = min(values, default=None), max(values, default=None)
    # A power of two changes no digit, and keeps sums and squares finite.
    exponent = math.frexp(max(map(abs, values), default=0.0))[1]
    scaled = np.ldexp(values, -exponent)
    sd = 0.0 if values else None
    if least != most:  # numpy may return 1e-17 for equal rewards.
        sd = math.ldexp(float(np.std(scaled)), exponent)
    mean = math.ldexp(float(np.mean(scaled)), exponent) if values else None
    rewards = {"rewarded": len(values), "mean": mean, "sd": sd, "least": least, "most": most}
    return {"sessions": len(sessions), "length": length, **rewards}


def _of_turns(tally: WeightsTally, aborts_recorded: bool) -> dict[str, Any]:
    counts, ratio, timed = tally.counts, tally.ratio.numbers(), tally.last_at > -math.inf
    seconds = tally.last_at - tally.begun_at if timed else 0.0
    return {
        "turns": counts["turns"],
        "sampled_tokens": counts["sampled_tokens"],
        "drift": _share(counts["drift_changed"], counts["drift_tokens"]),
        "ratio": tally.ratio.mean_ratio() if ratio.tokens else None,
        "ratio_tokens": ratio.tokens,
        "not_comparable": dict(tally.not_comparable),
        "k3": ratio.k3 if ratio.tokens else None,
        "ess": ratio.ess_tokens if ratio.tokens else None,
        "forks": dict(tally.forks),
        "truncated": _share(counts["truncated"], counts["ended"]),
        "aborts": dict(tally.aborts) if aborts_recorded else None,
        "resumes": dict(tally.resumes) if aborts_recorded else None,
        "tokens_per_second": counts["sampled_tokens"] / seconds if seconds > 0 else None,
        "first_at": tally.first_at if timed else None,
        "last_at": tally.last_at if timed else None,
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _groups(measured: Sequence[SessionMeasures], key: str) -> dict[str, Any]:
    """Return the groups of sessions with the same value of a key, newest first."""
    groups: dict[str, list[SessionMeasures]] = {}
    for session in measured:
        if key in session.info.metadata:
            groups.setdefault(group_value(session, key), []).append(session)
    return {
        "groups": [_group(value, sessions) for value, sessions in list(groups.items())[:MAX_GROUPS]],
        "groups_total": len(groups),
    }


def _group(value: str, sessions: Sequence[SessionMeasures]) -> dict[str, Any]:
    versions = list(dict.fromkeys(version for session in reversed(sessions) for version in session.weights))
    drifts = [session.drift for session in sessions if session.drift is not None]
    rewarded = [(session.reward, session.info.session_id) for session in sessions if session.reward is not None]
    return {
        "value": value,
        **_of_sessions(sessions),
        "rewards": [reward for reward, _ in rewarded][:MAX_REWARDS],
        "best_and_worst": [choose(rewarded, key=itemgetter(0))[1] for choose in (max, min)] if rewarded else [],
        "drift": _share(sum(drift["changed_tokens"] for drift in drifts), sum(drift["tokens"] for drift in drifts)),
        "weights": [versions[0], versions[-1]] if versions else [],
    }
