"""All contents of a record, read by the imported version of Tokentape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokentape.store import SqliteStore
from tokentape.store._snapshots import Snapshots
from tokentape.training._samples import assemble
from tokentape.types import Trajectory


def contents(directory: Path) -> dict[str, Any]:
    """Return sessions with all their parts, by id, in order of creation; snapshots; samples of all trajectories."""
    with SqliteStore.open(directory, read_only=True) as store:
        listed = store.sessions(limit=1000)
        sessions = {session.info.session_id: _session(store, session.info.session_id) for session in listed}
        snapshots = Snapshots(store).all(None)
    return {"listed": listed, "sessions": sessions, "snapshots": snapshots, "samples": samples(sessions)}


def _session(store: SqliteStore, session_id: str) -> dict[str, Any]:
    stored = store.load_session(session_id, per_token=True)
    paths = stored.trajectories()
    hashes = sorted({sha256 for path in paths for span in path.media for sha256 in (span.sha256, span.settings)})
    return {
        "info": stored.info,
        "setups": dict(stored.setups),
        "turns": stored.turns,
        "rewards": stored.rewards,
        "answers": stored.answers,
        "columns": stored.columns,
        "payloads": stored.payloads,
        "trajectories": paths,
        "media": [store.load_media(session_id, sha256) for sha256 in hashes],
    }


def samples(sessions: dict[str, dict[str, Any]]) -> list[Any]:
    """Return the samples that are assembled from all trajectories with the default policies."""
    paths: list[Trajectory] = [trajectory for parts in sessions.values() for trajectory in parts["trajectories"]]
    return list(assemble(paths).samples)
