"""Sources of the viewer: sessions with their trees and trajectories, from a store or from a file."""

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
    """A turn of the tree. Fields that only a store has are None for files."""

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
    """The reason of each abort after which another call continued the turn."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session with the data that pages show."""

    info: SessionInfo
    version: str
    """Changes whenever the session changes."""
    turns: tuple[TurnNode, ...]
    trajectories: tuple[Trajectory, ...]
    """One per leaf, in order of commits."""
    stored: StoredSession | None = None
    """The recorded session with its messages; None for files."""
    edges: tuple[LineageEdge, ...] = ()

    def exported(self) -> Sequence[Trajectory]:
        """Return the trajectories that `tokentape export` writes: without those that no client read."""
        return self.trajectories if self.stored is None else self.stored.trajectories(edges=self.edges)

    def trajectory(self, leaf: int) -> Trajectory | None:
        """Return the trajectory that ends with this turn, or None."""
        return next((one for one in self.trajectories if one.leaf == leaf), None)


class StoreSource:
    """A store, to which a gateway may be writing. All methods block, and may be called from any thread."""

    grows = True
    """True if sessions may be added."""
    keeps_messages = True
    """True if there are messages to render again."""

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
        return {one: (owner, "-".join(map(str, astuple(extent)))) for one, (owner, extent) in found.items()}

    def version(self, session_id: str) -> tuple[str, str]:
        """Return a session's owner and version. Raises `NotFound`."""
        found = self.versions(Listing(session_ids=[session_id]))
        if session_id not in found:
            raise NotFound(f"there is no session {session_id!r}")
        return found[session_id]

    def load(self, session_id: str) -> SessionView:
        """Return a session as it is recorded, its hash chain checked."""
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
            resumes=tuple(one.cause for one in turn.resumes),
            **{name: getattr(turn, name) for name in _OF_TURN},
        )
        for turn in stored.turns
    )


_OF_TURN = (
    *("seq", "parent", "digest", "created_at", "fork", "weight_version", "engine"),
    *("finish_reason", "stop", "abort_cause"),
)
"""The fields of a node that are a turn's."""


@dataclass(slots=True)
class _FileSession:
    """A session of a file, without its tokens."""

    info: SessionInfo
    nodes: dict[int, TurnNode] = field(default_factory=dict)
    paths: list[tuple[int, int]] = field(default_factory=list)
    """The leaf of each trajectory, and its row group or the offset of its line."""
    causes: list[str | None] = field(default_factory=list)
    """Why each trajectory forked."""
    reward: float | None = None
    """The last one of a trajectory."""

    def add(self, one: Trajectory, place: int) -> None:
        word, _, why = one.verdict.split(", ")[0].partition(": ")
        cause = why if word == "forked" else None
        # A path's verdict tells its last fork: the first of its turns that no earlier path has.
        new = next((seq for seq in one.turns if seq not in self.nodes), None)
        parent, before = None, 0
        for n, (seq, start, end) in enumerate(one.completions()):
            if seq not in self.nodes:
                self.nodes[seq] = TurnNode(
                    seq=seq,
                    parent=parent,
                    added_tokens=start - before,
                    sampled_tokens=end - start,
                    weight_version=one.weight_versions[n],
                    fork=cause if seq == new else None,
                    finish_reason=one.finish_reasons[n],
                    reward=None if np.isnan(one.turn_rewards[n]) else float(one.turn_rewards[n]),
                )
            parent, before = seq, end
        self.paths.append((one.leaf, place))
        self.causes.append(cause)
        self.reward = self.reward if one.reward is None else one.reward


class FileSource:
    """The trajectories of a file, which is read through once and does not change."""

    grows = False
    keeps_messages = False

    def __init__(self, path: Path) -> None:
        """Raises `InvalidRequest` unless it is a file of trajectories."""
        self.name = path.name
        self._path = path
        self._parquet = path.suffix == ".parquet"
        if not self._parquet and path.suffix != ".jsonl":
            raise InvalidRequest(f"{path.name} is neither a .parquet nor a .jsonl file of trajectories")
        self._sessions: dict[str, _FileSession] = {}
        for place, one in self._all():
            if one.session_id not in self._sessions:
                info = SessionInfo(one.session_id, 0.0, dict(one.metadata))
                self._sessions[one.session_id] = _FileSession(info)
            self._sessions[one.session_id].add(one, place)
        self._listed = [_summary(n, session) for n, session in enumerate(self._sessions.values())]

    def page(self, wanted: Listing) -> ListedPage:
        """Return a page of sessions. Sessions of a file have no owner."""
        found = [one for one in self._listed if self._wanted(one, wanted)]
        # Sessions without a value come last in either order.
        found.sort(key=lambda one: (_sort_value(wanted.sort, one), one.position), reverse=wanted.descending)
        found.sort(key=lambda one: wanted.sort == "reward" and one.reward is None)
        return ListedPage(len(found), tuple(found[wanted.offset : wanted.offset + wanted.limit]))

    def versions(self, wanted: Listing) -> dict[str, tuple[str, str]]:
        """Return by session its owner and version, the last ones first."""
        found = [one.info.session_id for one in reversed(self._listed) if self._wanted(one, wanted)]
        return dict.fromkeys(found[wanted.offset : wanted.offset + wanted.limit], ("", "file"))

    def version(self, session_id: str) -> tuple[str, str]:
        """Return no owner and a constant version. Raises `NotFound`."""
        if session_id not in self._sessions:
            raise NotFound(f"there is no session {session_id!r}")
        return "", "file"

    def load(self, session_id: str) -> SessionView:
        """Return the trajectories of a session and the tree of their turns. Raises `NotFound`."""
        self.version(session_id)
        session = self._sessions[session_id]
        trajectories = tuple(self._read(session_id, *path) for path in session.paths)
        edges = {edge.turn: edge for one in trajectories for edge in one.lineage}
        nodes = tuple(session.nodes[seq] for seq in sorted(session.nodes))
        return SessionView(session.info, "file", nodes, trajectories, edges=tuple(edges.values()))

    def _all(self) -> Iterator[tuple[int, Trajectory]]:
        if not self._parquet:
            yield from read_jsonl_places(self._path)
            return
        # Raises for a file of something else, even without a row group.
        next(iter_parquet(self._path), None)
        for group in range(open_parquet(self._path).num_row_groups):
            for one in iter_parquet(self._path, row_group=group):
                yield group, one

    def _read(self, session_id: str, leaf: int, place: int) -> Trajectory:
        if not self._parquet:
            return next(read_jsonl_places(self._path, start=place))[1]
        rows = iter_parquet(self._path, row_group=place)
        return next(one for one in rows if one.session_id == session_id and one.leaf == leaf)

    def _wanted(self, one: SessionSummary, wanted: Listing) -> bool:
        session_id, search, reward = one.info.session_id, wanted.search.casefold(), one.reward
        session = self._sessions[session_id]
        metadata = canonical_json(one.info.metadata).casefold() if wanted.metadata else ""
        return (
            (wanted.session_ids is None or session_id in wanted.session_ids)
            and (
                search in session_id.casefold()
                or search in json.dumps(one.info.metadata, ensure_ascii=False).casefold()
            )
            and (not wanted.fork or wanted.fork in (*session.causes, ANY_FORK if one.forks else NO_FORK))
            and (wanted.reward_min is None or (reward is not None and reward >= wanted.reward_min))
            and (wanted.reward_max is None or (reward is not None and reward <= wanted.reward_max))
            and (wanted.since, wanted.until) == (None, None)  # a file has no times
            and (not wanted.weights or any(wanted.weights == node.weight_version for node in session.nodes.values()))
            and all(any(each.casefold() in metadata for each in metadata_spellings(*pair)) for pair in wanted.metadata)
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


def _sort_value(sort: SortKey, one: SessionSummary) -> Any:
    if sort == "session":
        return one.info.session_id
    return getattr(one, {"created": "position", "sampled": "sampled_tokens"}.get(sort, sort)) or 0
