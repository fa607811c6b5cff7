"""The edges of a recorded session, to other sessions of the record too."""

from __future__ import annotations

from collections.abc import Callable

from tokentape._session.lineage import lineage, parent_sessions
from tokentape.errors import NotFound
from tokentape.store._reads import StoredSession
from tokentape.types import LineageEdge


def lineage_of(load: Callable[[str], StoredSession], stored: StoredSession) -> list[LineageEdge]:
    """Return the edges of a session's branches. Parents that headers name are loaded, and have the same owner."""
    others = []
    for session_id in sorted(parent_sessions(stored.tree())):
        try:
            other = load(session_id)
        except NotFound:
            continue
        if other.info.owner == stored.info.owner:
            others.append(other)
    return lineage(stored.tree(), others)
