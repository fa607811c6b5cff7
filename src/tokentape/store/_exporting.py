"""Export the trajectories of sessions, filtered and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tokentape._session.arrow import ExtraNames, named_only
from tokentape._session.verdict import wanted_verdict
from tokentape.store._base import Store
from tokentape.store._reads import StoredSession, lineage_of
from tokentape.types import Trajectory


@dataclass(slots=True)
class ExportCounts:
    sessions: int = 0
    trajectories: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    other_verdicts: dict[str, int] = field(default_factory=dict, repr=False)
    """Number of trajectories that the filter of verdicts excluded, by verdict."""
    other_roles: dict[str, int] = field(default_factory=dict, repr=False)
    """Number of trajectories that the filter of roles excluded, by role."""

    def add(self, other: ExportCounts) -> None:
        self.sessions += other.sessions
        self.trajectories += other.trajectories
        self.tokens += other.tokens
        self.trained_tokens += other.trained_tokens
        self.other_verdicts = dict(Counter(self.other_verdicts) + Counter(other.other_verdicts))
        self.other_roles = dict(Counter(self.other_roles) + Counter(other.other_roles))


def exported(
    sessions: Iterable[StoredSession],
    extra: ExtraNames,
    verdicts: Sequence[str] | None,
    counts: ExportCounts,
    *,
    unread: bool = False,
    store: Store | None = None,
    roles: Sequence[str] | None = None,
) -> Iterator[Trajectory]:
    """Yield the trajectories of sessions that have one of `verdicts`; None stands for all. Update `counts`.

    Only columns and payloads named by `extra` are included: more can be recorded while a file with fixed columns is
    written. Masks don't depend on `verdicts`: turns trained on an excluded branch are not trained on another one. Turns
    that no client read are exported only with `unread`. With `store` trajectories have a role, and `roles` selects
    those to export.
    """
    # A small cache suffices, because children of one parent are adjacent.
    load = None if store is None else lru_cache(8)(store.load_session)
    for stored in sessions:
        counts.sessions += 1
        edges = None if load is None else lineage_of(load, stored)
        for one in stored.trajectories(unread=unread, edges=edges):
            if roles is not None and one.role not in roles:
                counts.other_roles[one.role] = counts.other_roles.get(one.role, 0) + 1
                continue
            if verdicts is not None and not wanted_verdict(one.verdict, verdicts):
                counts.other_verdicts[one.verdict] = counts.other_verdicts.get(one.verdict, 0) + 1
                continue
            counts.trajectories += 1
            counts.tokens += len(one.token_ids)
            counts.trained_tokens += int(np.count_nonzero(one.loss_mask))
            yield named_only(one, extra)
