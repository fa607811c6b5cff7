"""Measure sessions for lists and for the page of a run: verdicts, roles, rewards, drift, and what each weights did.

A session is loaded once per version of it. The numbers come from the functions that `tokentape drift` and `tokentape
export` use, over the trajectories that `export` writes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from tokentape._session.comparable import has_supports, not_comparable
from tokentape.audit._drift.meter import RowMeter
from tokentape.audit._id_rows import trajectory_rows
from tokentape.audit._statistics import NumbersTally
from tokentape.audit._tokendiff import ARTIFACTS
from tokentape.errors import InvalidRequest, NotFound, TokentapeError
from tokentape.types import SessionInfo, Trajectory
from tokentape.viewer._comparing import RecordReader
from tokentape.viewer._file_source import ViewerSource
from tokentape.viewer._source import SessionView, TurnNode

TRAINER_LOGPROBS = "trainer_logprobs"
"""The column that a trainer annotates with its own logprobs: importance ratios are computed from it."""

_MOST_KEPT = 100_000


@dataclass(slots=True)
class WeightsTally:
    """Counts over the turns of which one version of the weights sampled the first token."""

    turns: int = 0
    sampled_tokens: int = 0
    ended: int = 0
    """Turns of which it is known why they ended, without aborted ones."""
    truncated: int = 0
    """Of these, turns that ended by the token budget."""
    forks: Counter[str] = field(default_factory=Counter)
    aborts: Counter[str] = field(default_factory=Counter)
    resumes: Counter[str] = field(default_factory=Counter)
    begun_at: float = math.inf
    """The latest time at which sampling can't have begun yet; infinite where that is not recorded, as the next two."""
    first_at: float = math.inf
    """When the first turn was recorded."""
    last_at: float = -math.inf
    drift_tokens: int = 0
    drift_changed: int = 0
    ratio: NumbersTally = field(default_factory=NumbersTally)
    not_comparable: Counter[str] = field(default_factory=Counter)
    """Turns with a trainer's logprobs that the recorded ones can't be compared with, by why."""

    def add(self, turn: TurnNode, begun_at: float) -> None:
        """Count a turn that was not sampled before `begun_at`."""
        aborted = turn.finish_reason == "abort"
        self.turns += 1
        self.sampled_tokens += turn.sampled_tokens
        self.ended += turn.finish_reason is not None and not aborted
        self.truncated += turn.finish_reason == "length"
        self.forks.update([turn.fork] if turn.fork else [])
        self.aborts.update([turn.abort_cause or "unknown"] if aborted else [])
        self.resumes.update(turn.resumes)
        if turn.created_at is not None:
            self._span(begun_at, turn.created_at, turn.created_at)

    def merge(self, other: WeightsTally) -> None:
        for name in ("turns", "sampled_tokens", "ended", "truncated", "drift_tokens", "drift_changed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("forks", "aborts", "resumes", "not_comparable"):
            getattr(self, name).update(getattr(other, name))
        self._span(other.begun_at, other.first_at, other.last_at)
        self.ratio.merge(other.ratio)

    def _span(self, begun_at: float, first_at: float, last_at: float) -> None:
        self.begun_at = min(self.begun_at, begun_at)
        self.first_at, self.last_at = min(self.first_at, first_at), max(self.last_at, last_at)


@dataclass(frozen=True, slots=True)
class SessionMeasures:
    """A session in numbers, as it was in one version of it."""

    info: SessionInfo
    version: str
    verdicts: tuple[str, ...]
    """One per trajectory that `export` writes."""
    roles: tuple[str, ...]
    """Of these trajectories, each role once; empty for those of a file without roles."""
    reward: float | None
    """Mean over the trajectories that train a token and have a reward, as in GRPO's advantages."""
    sampled_tokens: int
    drift: Mapping[str, Any] | None
    """None without a tokenizer, or with one that lacks an id."""
    weights: Mapping[str, WeightsTally]
    """By version, in the order of turns."""

    def shown(self) -> dict[str, Any]:
        """Return what a list shows."""
        return {"verdicts": self.verdicts, "roles": self.roles, "weights": list(self.weights), "drift": self.drift}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A session that can't be read in this version."""

    version: str
    why: str


class Measures:
    """Measures of sessions, kept until a session has changed. Methods block, and may be called from any thread."""

    def __init__(self, source: ViewerSource, reader: RecordReader) -> None:
        self._source, self._reader = source, reader
        self._known: dict[str, SessionMeasures | Unreadable] = {}
        self._lock = Lock()

    @cached_property
    def _meter(self) -> RowMeter | None:
        return None if self._reader.tokenizer is None else RowMeter(self._reader.tokenizer)

    def known(self, session_id: str, version: str) -> SessionMeasures | Unreadable | None:
        """Return the measures of a session in this version or why it has none, None if they were not taken."""
        found = self._known.get(session_id)
        return found if found is not None and found.version == version else None

    def measured(
        self, versions: Mapping[str, tuple[str, str]], seconds: float | None = None
    ) -> tuple[dict[str, SessionMeasures], dict[str, str]]:
        """Return the measures of sessions, and of the unreadable ones why they are.

        Of those not yet measured only as many are as can be within so many seconds.
        """
        until = None if seconds is None else time.monotonic() + seconds
        found, unreadable = {}, {}
        for session_id, (_, version) in versions.items():
            one = self.known(session_id, version)
            if one is None and (until is None or time.monotonic() < until):
                one = self._measure(session_id, version)
            if isinstance(one, Unreadable):
                unreadable[session_id] = one.why
            elif one is not None:
                found[session_id] = one
        return found, unreadable

    def _measure(self, session_id: str, version: str) -> SessionMeasures | Unreadable | None:
        with self._lock:
            known = self.known(session_id, version)
            if known is not None:
                return known
            found: SessionMeasures | Unreadable
            try:
                found = self._measures_of(self._source.load(session_id))
            except NotFound:
                return None
            except TokentapeError as error:
                if error.retry:
                    raise
                found = Unreadable(version, str(error))
            self._known[session_id] = found
            if len(self._known) > _MOST_KEPT:
                self._known.pop(next(iter(self._known)))
            return found

    def _measures_of(self, view: SessionView) -> SessionMeasures:
        exported = view.exported()
        weights: dict[str, WeightsTally] = {}
        recorded_at = {turn.seq: turn.created_at for turn in view.turns}
        for turn in view.turns:
            # A turn is sampled after the one that it continues was recorded.
            before = None if turn.parent is None else recorded_at.get(turn.parent)
            begun_at = view.info.created_at if before is None else before
            weights.setdefault(turn.weight_version, WeightsTally()).add(turn, begun_at)
        for one in exported:
            _add_ratios(weights, one)
        drift = self._drift(view, exported, weights)
        rewards = [one.reward for one in exported if one.reward is not None and one.loss_mask.any()]
        return SessionMeasures(
            info=view.info,
            version=view.version,
            verdicts=tuple(one.verdict for one in exported),
            roles=tuple(dict.fromkeys(one.role for one in exported if one.role)),
            # Exact: equal rewards have this mean, whatever their number.
            reward=statistics.mean(rewards) if rewards else None,
            sampled_tokens=sum(turn.sampled_tokens for turn in view.turns),
            drift=drift,
            weights=weights,
        )

    def _drift(
        self, view: SessionView, exported: Iterable[Trajectory], weights: Mapping[str, WeightsTally]
    ) -> dict[str, Any] | None:
        if self._meter is None:
            return None
        tokens = changed = 0
        classes: Counter[str] = Counter()
        try:
            rows = list(self._meter.measure(trajectory_rows(exported, {})))
        except InvalidRequest:
            # The tokenizer lacks an id: the record is of another model.
            return None
        for row in rows:
            for (dimension, version), many in row.counts.items():
                if dimension == "weights":
                    weights[version].drift_tokens += many
                    weights[version].drift_changed += row.changed[dimension, version]
                    tokens, changed = tokens + many, changed + row.changed[dimension, version]
            classes.update(ARTIFACTS[artifact].kind for artifact, *_ in row.stretches)
        return {"tokens": tokens, "changed_tokens": changed, "classes": dict(classes)}


def _add_ratios(weights: Mapping[str, WeightsTally], one: Trajectory) -> None:
    """Add the trainer's logprobs minus the recorded ones, of the trained tokens that have both, where they compare."""
    trainers = one.columns.get(TRAINER_LOGPROBS)
    if trainers is None:
        return
    spans = zip(one.completion_starts.tolist(), one.completion_ends.tolist(), strict=True)
    turns = zip(one.weight_versions, spans, one.sampled_from, one.logprobs_of, strict=True)
    for version, (start, end), sampled, recorded in turns:
        given = one.loss_mask[start:end] & ~np.isnan(trainers[start:end])
        if not given.any():
            continue
        wrong = not_comparable(sampled, recorded, has_supports(one, start, end))
        if wrong:
            weights[version].not_comparable.update([wrong])
            continue
        apart = (trainers[start:end].astype(np.float64) - one.logprobs[start:end])[given]
        weights[version].ratio.add(apart[~np.isnan(apart)])
