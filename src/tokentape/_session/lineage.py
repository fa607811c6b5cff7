"""Which branch of a session came from which other turn, and the role of each branch.

Nothing here changes a record or a mask: edges are computed when a session is read. What a header says comes first; then
what the messages say, compared as texts, so that the language of a prompt or a summary does not matter.
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
    """Return the edges of the branches of `session`, in order of their first turns; at most one for each.

    `others` are sessions that headers name as parents.
    """
    one_branch = len({turn.parent for turn in session.turns}) == len(session.turns)
    if one_branch and not parent_sessions(session):
        return []
    branches = Branches(session, {one.info.session_id: one for one in others})
    found = (next(filter(None, (rule(branches, one) for rule in RULES)), None) for one in branches.all.values())
    return [edge for edge in found if edge is not None]


def parent_sessions(session: Session) -> set[str]:
    """Return the ids that headers name as the session of a parent."""
    named = {client_of(turn).get("parent") for turn in session.turns if turn.parent is None}
    return {str(one) for one in named if one} - {session.info.session_id}


def roles(session: Session, edges: Iterable[LineageEdge]) -> dict[int, str]:
    """Return by turn one of `ROLES`. Compactions, retries and edits have the role of the branch they come from."""
    by_turn = {edge.turn: edge for edge in edges}
    found: dict[int | None, str] = {}
    for turn in session.turns:
        edge = by_turn.get(turn.seq)
        if edge is not None and edge.kind in ROLES:
            found[turn.seq] = edge.kind
        else:
            found[turn.seq] = found.get(turn.parent if edge is None else edge.parent, "main")
    return {turn.seq: found[turn.seq] for turn in session.turns}


def check_roles(wanted: Iterable[str]) -> None:
    """Raise `InvalidRequest` unless each is one of `ROLES`."""
    for one in wanted:
        if one not in ROLES:
            raise InvalidRequest(f"unknown role {one!r}; expected {', '.join(ROLES)}", "roles")
