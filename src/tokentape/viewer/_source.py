"""The viewer's sources: sessions with their trees and trajectories, from a store or from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tokentape._canonical import canonical_json
from tokentape._session.arrow import iter_parquet, open_parquet
from tokentape._session.jsonl import read_jsonl_places
from tokentape.errors import InvalidRequest, NotFound
from tokentape.store._base import Store
from tokentape.store._listing import (
    ANY_FORK,
    NO_FORK,
    ListedPage,
    Listing,
    SessionSummary,
    SortKey,
    extents,
    list_page,
    metadata_spellings,
)
from tokentape.store._reads import StoredSession, lineage_of
from tokentape.types import LineageEdge, SessionInfo, Trajectory


@dataclass(frozen=True, slots=True)
class TurnNode:
    """A turn in the session's tree. Fields that only a store has are None for files."""

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
    """The reason for each abort after which a later call continued the turn."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session with the data that pages show."""

    info: SessionInfo
    version: str
    """Changes whenever the session changes."""
    turns: tuple[TurnNode, ...]
    trajectories: tuple[Trajectory, ...]
    """One trajectory per leaf (last turn of a branch), in the order of commits."""
    stored: StoredSession | None = None
    """The recorded session with its messages; None for files."""
    edges: tuple[LineageEdge, ...] = ()

    def exported(self) -> Sequence[Trajectory]:
        """Return the trajectories that `tokentape export` writes, without those that no client read."""
        return self.trajectories if self.stored is None else self.stored.trajectories(edges=self.edges)

    def trajectory(self, leaf: int) -> Trajectory | None:
        """Return the trajectory that ends with this turn, or None."""
        return next((trajectory for trajectory in self.trajectories if trajectory.leaf == leaf), None)


class StoreSource:
    """A store that a gateway may be writing to. All methods block, and may be called from any thread."""

    grows = True
    """True if sessions may be added."""
    keeps_messages = True
    """True if there are messages to render again."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.name = name

    def page(self, listing: Listing) -> ListedPage:
        """Return a page of sessions."""
        with self._store.reading() as connection:
            return list_page(connection, listing)

    def versions(self, listing: Listing) -> dict[str, tuple[str, str]]:
        """Map session ids to owner and version, newest session first."""
        with self._store.reading() as connection:
            by_id = extents(connection, listing)
        return {name: (owner, "-".join(map(str, astuple(extent)))) for name, (owner, extent) in by_id.items()}

    def version(self, session_id: str) -> tuple[str, str]:
        """Return a session's owner and version. Raises `NotFound`."""
        versions = self.versions(Listing(session_ids=[session_id]))
        if session_id not in versions:
            raise NotFound(f"there is no session {session_id!r}")
        return versions[session_id]

    def load(self, session_id: str) -> SessionView:
        """Return the recorded session, after checking its hash chain."""
        # Read the version first: if the session grows meanwhile, the next request finds a newer version and loads it.
        _, version = self.version(session_id)
        stored = self._store.load_session(session_id, per_token=True)
        edges = lineage_of(self._store.load_session, stored)
        shown = tuple(stored.trajectories(unread=True, edges=edges))
        return SessionView(stored.info, version, _nodes(stored), shown, stored, tuple(edges))


def _nodes(stored: StoredSession) -> tuple[TurnNode, ...]:
    rewards = {reward.turn: reward.value for reward in stored.rewards if reward.turn is not None}
    return tuple(
        TurnNode(
            added_tokens=len(turn.added_ids),
            sampled_tokens=len(turn.completion_ids),
            reward=rewards.get(turn.seq),
            resumes=tuple(resume.cause for resume in turn.resumes),
            **{name: getattr(turn, name) for name in _OF_TURN},
        )
        for turn in stored.turns
    )


_OF_TURN = (
    *("seq", "parent", "digest", "created_at", "fork", "weight_version", "engine"),
    *("finish_reason", "stop", "abort_cause"),
)
"""The fields of a node that are copied from the turn."""


@dataclass(slots=True)
class _FileSession:
    """A session in a file, without its tokens."""

    info: SessionInfo
    nodes: dict[int, TurnNode] = field(default_factory=dict)
    paths: list[tuple[int, int]] = field(default_factory=list)
    """Each trajectory's leaf, and its row group or the offset of its line."""
    causes: list[str | None] = field(default_factory=list)
    """Why each trajectory forked."""
    reward: float | None = None
    """The reward of the last trajectory that has a reward."""

    def add(self, trajectory: Trajectory, place: int) -> None:
        word, _, why = trajectory.verdict.split(", ")[0].partition(": ")
        cause = why if word == "forked" else None
        # A path's verdict shows its last fork: the first of its turns that no earlier path has.
        new = next((seq for seq in trajectory.turns if seq not in self.nodes), None)
        parent, before = None, 0
        for n, (seq, start, end) in enumerate(trajectory.completions()):
            if seq not in self.nodes:
                self.nodes[seq] = TurnNode(
                    seq=seq,
                    parent=parent,
                    added_tokens=start - before,
                    sampled_tokens=end - start,
                    weight_version=trajectory.weight_versions[n],
                    fork=cause if seq == new else None,
                    finish_reason=trajectory.finish_reasons[n],
                    reward=None if np.isnan(trajectory.turn_rewards[n]) else float(trajectory.turn_rewards[n]),
                )
            parent, before = seq, end
        self.paths.append((trajectory.leaf, place))
        self.causes.append(cause)
        self.reward = self.reward if trajectory.reward is None else trajectory.reward


class FileSource:
    """A file of trajectories, which is scanned once and must not change."""

    grows = False
    keeps_messages = False

    def __init__(self, path: Path) -> None:
        """Raises `InvalidRequest` unless it is a file of trajectories."""
        self.name = path.name
        self._path = path
        self._parquet = path.suffix == ".parquet"
        if not self._parquet and path.suffix != ".jsonl":
            raise InvalidRequest(f"{path.name}: expected a .parquet or .jsonl file of trajectories")
        self._sessions: dict[str, _FileSession] = {}
        for place, trajectory in self._all():
            if trajectory.session_id not in self._sessions:
                info = SessionInfo(trajectory.session_id, 0.0, dict(trajectory.metadata))
                self._sessions[trajectory.session_id] = _FileSession(info)
            self._sessions[trajectory.session_id].add(trajectory, place)
        self._listed = [_summary(n, session) for n, session in enumerate(self._sessions.values())]

    def page(self, listing: Listing) -> ListedPage:
        """Return a page of sessions. `listing.owner` has no effect, because sessions in a file have no owner."""
        summaries = [summary for summary in self._listed if self._matches(summary, listing)]
        # Sessions without a value come last in either order.
        summaries.sort(key=lambda summary: summary.position, reverse=listing.descending)
        summaries.sort(key=lambda summary: _sort_value(listing.sort, summary), reverse=listing.descending)
        summaries.sort(key=lambda summary: listing.sort == "reward" and summary.reward is None)
        return ListedPage(len(summaries), tuple(summaries[listing.offset : listing.offset + listing.limit]))

    def versions(self, listing: Listing) -> dict[str, tuple[str, str]]:
        """Map session ids to owner and version, the file's last session first."""
        ids = [summary.info.session_id for summary in reversed(self._listed) if self._matches(summary, listing)]
        return dict.fromkeys(ids[listing.offset : listing.offset + listing.limit], ("", "file"))

    def version(self, session_id: str) -> tuple[str, str]:
        """Return an empty owner and a constant version. Raises `NotFound`."""
        if session_id not in self._sessions:
            raise NotFound(f"there is no session {session_id!r}")
        return "", "file"

    def load(self, session_id: str) -> SessionView:
        """Return the trajectories of a session and the tree of their turns. Raises `NotFound`."""
        self.version(session_id)
        session = self._sessions[session_id]
        trajectories = tuple(self._read(session_id, *path) for path in session.paths)
        edges = {edge.turn: edge for trajectory in trajectories for edge in trajectory.lineage}
        nodes = tuple(session.nodes[seq] for seq in sorted(session.nodes))
        return SessionView(session.info, "file", nodes, trajectories, edges=tuple(edges.values()))

    def _all(self) -> Iterator[tuple[int, Trajectory]]:
        if not self._parquet:
            yield from read_jsonl_places(self._path)
            return
        # Raise if the file contains something else, even if it has no row group.
        next(iter_parquet(self._path), None)
        with open_parquet(self._path) as file:
            groups = file.num_row_groups
        for group in range(groups):
            for trajectory in iter_parquet(self._path, row_group=group):
                yield group, trajectory

    def _read(self, session_id: str, leaf: int, place: int) -> Trajectory:
        if not self._parquet:
            return next(read_jsonl_places(self._path, start=place))[1]
        rows = iter_parquet(self._path, row_group=place)
        return next(row for row in rows if row.session_id == session_id and row.leaf == leaf)

    def _matches(self, summary: SessionSummary, listing: Listing) -> bool:
        session_id, search, reward = summary.info.session_id, listing.search.casefold(), summary.reward
        session = self._sessions[session_id]
        metadata = canonical_json(summary.info.metadata).casefold() if listing.metadata else ""
        return (
            (listing.session_ids is None or session_id in listing.session_ids)
            and (
                search in session_id.casefold()
                or search in json.dumps(summary.info.metadata, ensure_ascii=False).casefold()
            )
            and (not listing.fork or listing.fork in (*session.causes, ANY_FORK if summary.forks else NO_FORK))
            and (listing.reward_min is None or (reward is not None and reward >= listing.reward_min))
            and (listing.reward_max is None or (reward is not None and reward <= listing.reward_max))
            and (listing.since, listing.until) == (None, None)  # a file has no timestamps
            and (not listing.weights or any(listing.weights == node.weight_version for node in session.nodes.values()))
            and all(any(text.casefold() in metadata for text in metadata_spellings(*pair)) for pair in listing.metadata)
        )


def _summary(position: int, session: _FileSession) -> SessionSummary:
    sampled = sum(node.sampled_tokens for node in session.nodes.values())
    return SessionSummary(
        info=session.info,
        position=position,
        turns=len(session.nodes),
        forks=sum(cause is not None for cause in session.causes),
        tokens=sampled + sum(node.added_tokens for node in session.nodes.values()),
        sampled_tokens=sampled,
        reward=session.reward,
    )


ViewerSource: TypeAlias = StoreSource | FileSource
"""A source of sessions."""


def _sort_value(sort: SortKey, summary: SessionSummary) -> Any:
    if sort == "session":
        return summary.info.session_id
    return getattr(summary, {"created": "position", "sampled": "sampled_tokens"}.get(sort, sort)) or 0
