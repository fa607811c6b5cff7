"""Take the trajectories of sessions out of a record, filtered and counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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
    """The trajectories that a filter of verdicts left out, by verdict."""

    def add(self, other: ExportCounts) -> None:
        self.sessions += other.sessions
        self.trajectories += other.trajectories
        self.tokens += other.tokens
        self.trained_tokens += other.trained_tokens
        for verdict, many in other.other_verdicts.items():
            self.leave_out(verdict, many)

    def leave_out(self, verdict: str, many: int = 1) -> None:
        self.other_verdicts[verdict] = self.other_verdicts.get(verdict, 0) + many


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
    """Yield the trajectories of sessions, those with one of `verdicts` only unless that is None.

    With only those columns and payloads that `extra` names: one may be recorded meanwhile, when the columns of a file
    are fixed. Masks don't depend on `verdicts`: no other branch trains what a branch that is left out trains. Turns
    that no client read are exported only with `unread`. With `store` each says its role, and only `roles` are exported
    unless that is None.
    """
    # Children of one parent come after each other.
    load = None if store is None else lru_cache(8)(store.load_session)
    for stored in sessions:
        counts.sessions += 1
        edges = None if load is None else lineage_of(load, stored)
        for one in stored.trajectories(unread=unread, edges=edges):
            if roles is not None and one.role not in roles:
                continue
            if verdicts is not None and not wanted_verdict(one.verdict, verdicts):
                counts.leave_out(one.verdict)
                continue
            counts.trajectories += 1
            counts.tokens += len(one.token_ids)
            counts.trained_tokens += int(one.loss_mask.sum())
            yield named_only(one, extra)
