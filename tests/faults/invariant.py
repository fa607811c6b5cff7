"""The universal invariant, checked from outside: replies that clients received against what is on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.store import StoredSession, open_record, verify


@dataclass(frozen=True)
class Received:
    """One choice of a reply that arrived whole."""

    session_id: str
    turn: int
    prompt_ids: list[int]
    """The whole context that was sent."""
    ids: list[int]
    """What was sampled."""
    content: str

    @classmethod
    def of(cls, reply: Any) -> list[Received]:
        """The choices of a whole chat completion that was requested with `return_token_ids`."""
        return [
            cls(
                choice.tokentape["session_id"],
                choice.tokentape["turn"],
                reply.prompt_token_ids,
                choice.token_ids,
                choice.message.content or "",
            )
            for choice in reply.choices
        ]


def invariant(
    location: str | Path, acknowledged: Iterable[Received], *, unacknowledged: int = 0
) -> dict[str, StoredSession]:
    """Check a record against every reply that arrived whole, and return the recorded sessions.

    - The hash chain verifies, and the file with it.
    - Each acknowledged turn is there: its context, walked up by hand, is what was sent, its completion what came.
    - Over all trajectories each sampled id of an acknowledged turn is trained once, and no other: what was not
      acknowledged is in none of them. Up to `unacknowledged` turns may be, where a process was killed between a commit
      and the arrival of the reply's last byte.
    """
    report = verify(location)
    assert report.findings == ()
    with open_record(location, read_only=True) as store:
        recorded = {stored.info.session_id: stored for stored in store.iter_sessions()}
    received = {(choice.session_id, choice.turn): choice for choice in acknowledged}
    for reply in received.values():
        turns = recorded[reply.session_id].turns
        assert reply.turn < len(turns), f"turn {reply.turn} of {reply.session_id} was acknowledged and is lost"
        turn = turns[reply.turn]
        assert turn.finish_reason != "abort"
        assert turn.completion_ids.tolist() == reply.ids
        context: list[int] = turn.added_ids.tolist()
        at = turn.parent
        while at is not None:
            context[:0] = turns[at].added_ids.tolist() + turns[at].completion_ids.tolist()
            at = turns[at].parent
        assert context == reply.prompt_ids, f"turn {reply.turn} of {reply.session_id} was sampled from another context"
    shown: set[tuple[str, int]] = set()
    trained = 0
    for stored in recorded.values():
        assert [turn.seq for turn in stored.turns] == list(range(len(stored.turns)))
        for trajectory in trajectories(Session(stored.info, stored.turns)):
            last = stored.turns[trajectory.leaf]
            own = received.get((last.session_id, last.seq))
            if own is not None:
                assert trajectory.token_ids.tolist() == own.prompt_ids + own.ids
            shown |= {(last.session_id, seq) for seq in trajectory.turns}
            trained += int(trajectory.loss_mask.sum())
    assert received.keys() <= shown
    extra = shown - received.keys()
    assert len(extra) <= unacknowledged, f"in a trajectory, and acknowledged to nobody: {sorted(extra)}"
    lengths = sum(len(choice.ids) for choice in received.values())
    more = sum(len(recorded[session_id].turns[seq].completion_ids) for session_id, seq in extra)
    assert trained == lengths + more
    return recorded
