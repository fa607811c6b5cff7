"""Find the turn from which each branch of a session came, and the role of each branch.

Edges are computed when a session is read; nothing here changes a record or a mask. Headers take precedence. Without
them, the texts of messages are compared, so the language of a prompt or summary does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokentape._session.lineage_branches import Branches, Recorded, client_of
from tokentape._session.lineage_rules import RULES
from tokentape._session.tree import Session
from tokentape.errors import InvalidRequest
from tokentape.types import LineageEdge

ROLES = ("main", "subagent", "side_call")


def lineage(session: Session, others: Iterable[Recorded] = ()) -> list[LineageEdge]:
    """Return at most one edge per branch of `session`, in order of the branches' first turns.

    `others` are the sessions that headers name as parents, see `parent_sessions`.
    """
    one_branch = len({turn.parent for turn in session.turns}) == len(session.turns)
    if one_branch and not parent_sessions(session):
        return []
    branches = Branches(session, {other.info.session_id: other for other in others})
    edges = (next(filter(None, (rule(branches, branch) for rule in RULES)), None) for branch in branches.all.values())
    return [edge for edge in edges if edge is not None]


def parent_sessions(session: Session) -> set[str]:
    """Return the ids of other sessions that headers name as this session's parent."""
    parents = {client_of(turn).get("parent") for turn in session.turns if turn.parent is None}
    return {str(parent) for parent in parents if parent} - {session.info.session_id}


def roles(session: Session, edges: Iterable[LineageEdge]) -> dict[int, str]:
    """Return a role from `ROLES` for each turn. Compactions, retries and edits keep the role of their origin."""
    by_turn = {edge.turn: edge for edge in edges}
    role_of: dict[int | None, str] = {}
    for turn in session.turns:
        edge = by_turn.get(turn.seq)
        if edge is not None and edge.kind in ROLES:
            role_of[turn.seq] = edge.kind
        else:
            role_of[turn.seq] = role_of.get(turn.parent if edge is None else edge.parent, "main")
    return {turn.seq: role_of[turn.seq] for turn in session.turns}


def check_roles(names: Iterable[str]) -> None:
    """Raise `InvalidRequest` unless each name is one of `ROLES`."""
    for name in names:
        if name not in ROLES:
            raise InvalidRequest(f"unknown role {name!r}; expected {', '.join(ROLES)}", "roles")
