"""A file of trajectories to look at: Parquet, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokentape.errors import InvalidRequest, NotFound
from tokentape.session.arrow import iter_parquet
from tokentape.session.jsonl import read_jsonl, trajectory_from_json
from tokentape.store.listing import ANY_FORK, NO_FORK, ListedPage, ListedSession, Listing
from tokentape.types import SessionInfo, Trajectory
from tokentape.viewer.source import SessionView, TurnNode


@dataclass(frozen=True, slots=True)
class _Line:
    """One trajectory of the file, without its tokens."""

    leaf: int
    turns: tuple[int, ...]
    own_tokens: tuple[tuple[int, int], ...]
    """Per turn its added and sampled tokens."""
    verdict: str
    reward: float | None
    place: int
    """Row group, or offset of the line."""


class FileSource:
    """The trajectories of a file, which is read through once and does not change."""

    grows = False
    keeps_messages = False

    def __init__(self, path: Path) -> None:
        """Raises `InvalidRequest` for what is no file of trajectories."""
        self.name = path.name
        self._path = path
        self._parquet = path.suffix == ".parquet"
        if not self._parquet and path.suffix != ".jsonl":
            raise InvalidRequest(f"{path.name} is neither a .parquet nor a .jsonl file of trajectories")
        self._lines: dict[str, list[_Line]] = {}
        self._metadata: dict[str, Any] = {}
        for place, one in self._all():
            sizes = zip(one.completion_starts.tolist(), one.completion_ends.tolist(), strict=True)
            own, before = [], 0
            for start, end in sizes:
                own.append((start - before, end - start))
                before = end
            line = _Line(one.leaf, one.turns, tuple(own), one.verdict, one.reward, place)
            self._lines.setdefault(one.session_id, []).append(line)
            self._metadata.setdefault(one.session_id, dict(one.metadata))
        self._listed = [self._summary(session_id) for session_id in self._lines]

    def page(self, wanted: Listing) -> ListedPage:
        """Some sessions; all of them are nobody's."""
        search = wanted.search.casefold()
        found = [
            (position, one)
            for position, one in enumerate(self._listed)
            if (wanted.session_ids is None or one.info.session_id in wanted.session_ids)
            and (search in one.info.session_id.casefold() or search in _text(one.info.metadata))
            and self._forked(one, wanted.fork)
            and (wanted.reward_min is None or (one.reward is not None and one.reward >= wanted.reward_min))
            and (wanted.reward_max is None or (one.reward is not None and one.reward <= wanted.reward_max))
        ]
        sign = -1 if wanted.descending else 1
        key = _SORT_KEYS[wanted.sort]
        if wanted.sort == "created":
            found.sort(key=lambda pair: sign * pair[0])
        elif wanted.sort == "session":
            found.sort(key=lambda pair: pair[1].info.session_id, reverse=wanted.descending)
        else:
            found.sort(key=lambda pair: ((value := key(pair[1])) is None, sign * (value or 0), sign * pair[0]))
        shown = found[wanted.offset : wanted.offset + wanted.limit]
        return ListedPage(len(found), tuple(one for _, one in shown))

    def version(self, session_id: str) -> tuple[str, str]:
        """Nobody's, and always the same. Raises `NotFound`."""
        if session_id not in self._lines:
            raise NotFound(f"there is no session {session_id!r}")
        return "", "file"

    def load(self, session_id: str) -> SessionView:
        """The trajectories of a session, and the tree that they are the paths of. Raises `NotFound`."""
        self.version(session_id)
        trajectories = tuple(self._read(session_id, line) for line in self._lines[session_id])
        return SessionView(self._info(session_id), "file", self._nodes(session_id, trajectories), trajectories)

    def _all(self) -> Iterator[tuple[int, Trajectory]]:
        if self._parquet:
            # Tells what is wrong with a file that is none of ours.
            next(iter_parquet(self._path), None)
            for group in range(_row_groups(self._path)):
                for one in iter_parquet(self._path, row_group=group):
                    yield group, one
            return
        offset = 0
        with open(self._path, "rb") as file:
            for one, line in zip(read_jsonl(self._path), file, strict=True):
                yield offset, one
                offset += len(line)

    def _read(self, session_id: str, line: _Line) -> Trajectory:
        if self._parquet:
            rows = iter_parquet(self._path, row_group=line.place)
            return next(one for one in rows if one.session_id == session_id and one.leaf == line.leaf)
        with open(self._path, "rb") as file:
            file.seek(line.place)
            return trajectory_from_json(json.loads(file.readline()))

    def _info(self, session_id: str) -> SessionInfo:
        return SessionInfo(session_id, 0.0, self._metadata[session_id])

    def _summary(self, session_id: str) -> ListedSession:
        lines = self._lines[session_id]
        own = {seq: sizes for line in lines for seq, sizes in zip(line.turns, line.own_tokens, strict=True)}
        sampled = sum(size for _, size in own.values())
        return ListedSession(
            info=self._info(session_id),
            turns=len(own),
            forks=sum(_cause(line.verdict) is not None for line in lines),
            aborted=0,
            tokens=sampled + sum(size for size, _ in own.values()),
            sampled_tokens=sampled,
            reward=next((line.reward for line in reversed(lines) if line.reward is not None), None),
            last_at=None,
        )

    def _forked(self, one: ListedSession, fork: str) -> bool:
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
                        reward=None if reward != reward else reward,
                    )
        return tuple(nodes[seq] for seq in sorted(nodes))


def _row_groups(path: Path) -> int:
    import pyarrow.parquet as pq

    found: int = pq.ParquetFile(path).metadata.num_row_groups
    return found


def _cause(verdict: str) -> str | None:
    word, _, why = verdict.split(", ")[0].partition(": ")
    return why if word == "forked" else None


def _text(metadata: Any) -> str:
    return json.dumps(metadata, ensure_ascii=False).casefold()


_SORT_KEYS: dict[str, Callable[[ListedSession], float | None]] = {
    "created": lambda one: 0,
    "session": lambda one: 0,
    "turns": lambda one: one.turns,
    "tokens": lambda one: one.tokens,
    "sampled": lambda one: one.sampled_tokens,
    "reward": lambda one: one.reward,
    "forks": lambda one: one.forks,
    "aborted": lambda one: one.aborted,
}
