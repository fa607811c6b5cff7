"""Sources of the viewer: sessions with their trees and trajectories, from a store or from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
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
    *("seq", "parent", "fork", "weight_version", "finish_reason", "stop", "abort_cause", "engine", "created_at"),
    "digest",
)
"""The fields of a node that are a turn's."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One trajectory of the file, without its tokens."""

    leaf: int
    turns: tuple[int, ...]
    own_tokens: tuple[tuple[int, int], ...]
    """Per turn its added and sampled tokens."""
    weights: frozenset[str]
    verdict: str
    reward: float | None
    place: int
    """Row group, or offset of the line."""


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
        self._lines: dict[str, list[_Line]] = {}
        self._metadata: dict[str, Any] = {}
        for place, one in self._all():
            starts, ends = one.completion_starts, one.completion_ends
            added = starts - np.concatenate([[0], ends[:-1]])
            own = tuple(zip(added.tolist(), (ends - starts).tolist(), strict=True))
            line = _Line(one.leaf, one.turns, own, frozenset(one.weight_versions), one.verdict, one.reward, place)
            self._lines.setdefault(one.session_id, []).append(line)
            self._metadata.setdefault(one.session_id, dict(one.metadata))
        self._listed = [self._summary(n, session_id) for n, session_id in enumerate(self._lines)]

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
        if session_id not in self._lines:
            raise NotFound(f"there is no session {session_id!r}")
        return "", "file"

    def load(self, session_id: str) -> SessionView:
        """Return the trajectories of a session and the tree of their turns. Raises `NotFound`."""
        self.version(session_id)
        trajectories = tuple(self._read(session_id, line) for line in self._lines[session_id])
        edges = {edge.turn: edge for one in trajectories for edge in one.lineage}
        nodes = self._nodes(session_id, trajectories)
        return SessionView(self._info(session_id), "file", nodes, trajectories, edges=tuple(edges.values()))

    def _all(self) -> Iterator[tuple[int, Trajectory]]:
        if not self._parquet:
            yield from read_jsonl_places(self._path)
            return
        # Raises for a file of something else, even without a row group.
        next(iter_parquet(self._path), None)
        for group in range(open_parquet(self._path).num_row_groups):
            for one in iter_parquet(self._path, row_group=group):
                yield group, one

    def _read(self, session_id: str, line: _Line) -> Trajectory:
        if not self._parquet:
            return next(read_jsonl_places(self._path, start=line.place))[1]
        rows = iter_parquet(self._path, row_group=line.place)
        return next(one for one in rows if one.session_id == session_id and one.leaf == line.leaf)

    def _info(self, session_id: str) -> SessionInfo:
        return SessionInfo(session_id, 0.0, self._metadata[session_id])

    def _summary(self, position: int, session_id: str) -> SessionSummary:
        lines = self._lines[session_id]
        own = {seq: sizes for line in lines for seq, sizes in zip(line.turns, line.own_tokens, strict=True)}
        sampled = sum(size for _, size in own.values())
        return SessionSummary(
            info=self._info(session_id),
            position=position,
            turns=len(own),
            forks=sum(_cause(line.verdict) is not None for line in lines),
            tokens=sampled + sum(size for size, _ in own.values()),
            sampled_tokens=sampled,
            reward=next((line.reward for line in reversed(lines) if line.reward is not None), None),
        )

    def _wanted(self, one: SessionSummary, wanted: Listing) -> bool:
        session_id, search, reward = one.info.session_id, wanted.search.casefold(), one.reward
        text = json.dumps(one.info.metadata, ensure_ascii=False).casefold()
        metadata = canonical_json(one.info.metadata).casefold() if wanted.metadata else ""
        return (
            (wanted.session_ids is None or session_id in wanted.session_ids)
            and (search in session_id.casefold() or search in text)
            and self._forked(one, wanted.fork)
            and (wanted.reward_min is None or (reward is not None and reward >= wanted.reward_min))
            and (wanted.reward_max is None or (reward is not None and reward <= wanted.reward_max))
            and (wanted.since, wanted.until) == (None, None)  # a file has no times
            and (not wanted.weights or any(wanted.weights in line.weights for line in self._lines[session_id]))
            and all(any(each.casefold() in metadata for each in metadata_spellings(*pair)) for pair in wanted.metadata)
        )

    def _forked(self, one: SessionSummary, fork: str) -> bool:
        if fork in (ANY_FORK, NO_FORK):
            return bool(one.forks) == (fork == ANY_FORK)
        return not fork or any(_cause(line.verdict) == fork for line in self._lines[one.info.session_id])

    def _nodes(self, session_id: str, trajectories: tuple[Trajectory, ...]) -> tuple[TurnNode, ...]:
        nodes: dict[int, TurnNode] = {}
        for line, one in zip(self._lines[session_id], trajectories, strict=True):
            # A path's verdict tells its last fork: the first of its turns that no earlier path has.
            new = next((seq for seq in line.turns if seq not in nodes), None)
            for n, seq in enumerate(line.turns):
                if seq not in nodes:
                    reward = float(one.turn_rewards[n])
                    nodes[seq] = TurnNode(
                        seq=seq,
                        parent=line.turns[n - 1] if n else None,
                        added_tokens=line.own_tokens[n][0],
                        sampled_tokens=line.own_tokens[n][1],
                        weight_version=one.weight_versions[n],
                        fork=_cause(line.verdict) if seq == new else None,
                        finish_reason=one.finish_reasons[n],
                        reward=None if reward != reward else reward,
                    )
        return tuple(nodes[seq] for seq in sorted(nodes))


ViewerSource: TypeAlias = StoreSource | FileSource
"""A source of sessions."""


def _cause(verdict: str) -> str | None:
    word, _, why = verdict.split(", ")[0].partition(": ")
    return why if word == "forked" else None


def _sort_value(sort: SortKey, one: SessionSummary) -> Any:
    if sort == "session":
        return one.info.session_id
    return getattr(one, {"created": "position", "sampled": "sampled_tokens"}.get(sort, sort)) or 0
