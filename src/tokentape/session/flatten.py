"""Trees to trajectories: every root-to-leaf path as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tokentape.session.tree import Session
from tokentape.types import Provenance, Reward, Trajectory, Turn


def trajectories(session: Session, rewards: Iterable[Reward] = ()) -> list[Trajectory]:
    """One trajectory per leaf, in order of commits.

    Over all of them every sampled token has `loss_mask` True exactly once, in the first trajectory that holds it;
    elsewhere it is context. A trajectory's reward is the last one given to its leaf, else to the session.
    """
    given = {reward.turn: reward.value for reward in rewards}
    trained: set[int] = set()
    out = []
    for leaf in session.leaves():
        path = session.path(leaf)
        out.append(_flatten(session, path, trained, given.get(leaf, given.get(None))))
        trained.update(turn.seq for turn in path)
    return out


def verdict(path: Sequence[Turn]) -> str:
    """What a trainer gates on: `forked: WHY` (the last fork), `closed`, or `exact`.

    Every path is exact in its ids. A fork says that the agent's history did not simply go on; closed, that a turn
    before the last was ended by us and not by the model.
    """
    forks = [turn.fork for turn in path if turn.fork is not None]
    if forks:
        return f"forked: {forks[-1]}"
    if any((turn.added_provenance == Provenance.CLOSE).any() for turn in path):
        return "closed"
    return "exact"


def _flatten(session: Session, path: Sequence[Turn], trained: set[int], reward: float | None) -> Trajectory:
    sizes = np.array([[len(turn.added_ids), len(turn.completion_ids)] for turn in path], dtype=np.int32)
    ends = np.cumsum(sizes.ravel(), dtype=np.int32).reshape(-1, 2)
    sampled = [np.full(len(turn.completion_ids), Provenance.SAMPLED, dtype=np.uint8) for turn in path]
    return Trajectory(
        session_id=session.info.session_id,
        leaf=path[-1].seq,
        token_ids=np.concatenate([ids for turn in path for ids in (turn.added_ids, turn.completion_ids)]),
        provenance=np.concatenate(
            [codes for turn, own in zip(path, sampled, strict=True) for codes in (turn.added_provenance, own)]
        ),
        loss_mask=np.concatenate(
            [
                mask
                for turn in path
                for mask in (
                    np.zeros(len(turn.added_ids), bool),
                    np.full(len(turn.completion_ids), turn.seq not in trained),
                )
            ]
        ),
        logprobs=np.concatenate(
            [values for turn in path for values in (np.zeros(len(turn.added_ids), np.float32), turn.logprobs)]
        ),
        turns=tuple(turn.seq for turn in path),
        completion_starts=ends[:, 0],
        completion_ends=ends[:, 1],
        weight_versions=tuple(turn.weight_version for turn in path),
        reward=reward,
        verdict=verdict(path),
        metadata=session.info.metadata,
    )
