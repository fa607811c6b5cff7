"""Sources of the viewer: sessions with their trees and trajectories, from a store or from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tokentape.errors import NotFound
from tokentape.store._base import Store
from tokentape.store._listing import ListedPage, Listing, extents, list_page
from tokentape.store._reads import StoredSession, lineage_of
from tokentape.types import LineageEdge, SessionInfo, Trajectory


@dataclass(frozen=True, slots=True)
class TurnNode:
    """A turn of the tree. What only a store knows is None for a file's."""

    seq: int
    parent: int | None
    added_tokens: int
    sampled_tokens: int
    weight_version: str
    fork: str | None = None
    finish_reason: str | None = None
    stop: int | str | None = None
    abort_cause: str | None = None
    engine: str | None = None
    created_at: float | None = None
    reward: float | None = None
    digest: str | None = None
    resumes: tuple[str, ...] = ()
    """Why each call was aborted that another one continued."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session with everything that is shown of it."""

    info: SessionInfo
    version: str
    """Another one as soon as anything of it has changed."""
    turns: tuple[TurnNode, ...]
    trajectories: tuple[Trajectory, ...]
    """One per leaf, in order of commits."""
    stored: StoredSession | None = None
    """The record itself, with the messages; None for a file's."""
    edges: tuple[LineageEdge, ...] = ()

    def exported(self) -> Sequence[Trajectory]:
        """Return the trajectories that `tokentape export` writes: without those that no client read."""
        return self.trajectories if self.stored is None else self.stored.trajectories(edges=self.edges)

    def trajectory(self, leaf: int) -> Trajectory | None:
        """The trajectory that ends with this turn, if there is one."""
        return next((one for one in self.trajectories if one.leaf == leaf), None)


class StoreSource:
    """A store, which may be written to meanwhile. All methods block, and may be called from any thread."""

    grows = True
    """Whether there may be more of it later."""
    keeps_messages = True
    """Whether there are messages that could be rendered again."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.name = name

    def page(self, wanted: Listing) -> ListedPage:
        """Return a page of sessions."""
        with self._store.reading() as connection:
            return list_page(connection, wanted)

    def versions(self, wanted: Listing) -> dict[str, tuple[str, str]]:
        """Return by session its owner and version, newest first."""
        with self._store.reading() as connection:
            found = extents(connection, wanted)
        return {
            session_id: (owner, "-".join(map(str, astuple(extent)))) for session_id, (owner, extent) in found.items()
        }

    def version(self, session_id: str) -> tuple[str, str]:
        """Return a session's owner and version. Raises `NotFound`."""
        found = self.versions(Listing(session_ids=[session_id]))
        if session_id not in found:
            raise NotFound(f"there is no session {session_id!r}")
        return found[session_id]

    def load(self, session_id: str) -> SessionView:
        """Return a session as it is recorded, its hash chain checked."""
        # The version first: if the session grows in between, the next look finds another one and loads it again.
        _, version = self.version(session_id)
        stored = self._store.load_session(session_id, per_token=True)
        edges = lineage_of(self._store.load_session, stored)
        shown = tuple(stored.trajectories(unread=True, edges=edges))
        return SessionView(stored.info, version, _nodes(stored), shown, stored, tuple(edges))


def _nodes(stored: StoredSession) -> tuple[TurnNode, ...]:
    rewards = {reward.turn: reward.value for reward in stored.rewards if reward.turn is not None}
    return tuple(
        TurnNode(
            seq=turn.seq,
            parent=turn.parent,
            added_tokens=len(turn.added_ids),
            sampled_tokens=len(turn.completion_ids),
            weight_version=turn.weight_version,
            fork=turn.fork,
            finish_reason=turn.finish_reason,
            stop=turn.stop,
            abort_cause=turn.abort_cause,
            engine=turn.engine,
            created_at=turn.created_at,
            reward=rewards.get(turn.seq),
            digest=turn.digest,
            resumes=tuple(one.cause for one in turn.resumes),
        )
        for turn in stored.turns
    )
