from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.session.builders import make_turn, said, user
from tokentape.session.flatten import trajectories
from tokentape.session.tree import Session
from tokentape.types import Provenance, Reward, SessionInfo


def fork() -> Session:
    """Two branches: 0-1 and 0-2."""
    return Session(
        SessionInfo("s", 0.0, {"task": 1}),
        [
            make_turn(0, None, [user("a")], said("A"), added=[1, 2], completion=[3]),
            make_turn(1, 0, [user("b")], said("B"), added=[4], completion=[5, 6]),
            make_turn(2, 0, [user("c")], said("C"), added=[7], completion=[8], fork="branched"),
        ],
    )


def test_a_branch_is_flattened_root_first() -> None:
    first, second = trajectories(fork())
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert second.token_ids.tolist() == [1, 2, 3, 7, 8]
    assert first.completion_starts.tolist() == [2, 4]
    assert first.completion_ends.tolist() == [3, 6]
    assert (first.turns, second.turns) == ((0, 1), (0, 2))


def test_a_shared_token_is_trained_once_and_sampled_in_both() -> None:
    first, second = trajectories(fork())
    assert first.loss_mask.tolist() == [False, False, True, False, True, True]
    assert second.loss_mask.tolist() == [False, False, False, False, True]
    assert second.provenance[2] == Provenance.SAMPLED
    assert second.logprobs.tolist() == [0.0, 0.0, -0.5, 0.0, -0.5]


def test_the_verdict_says_what_happened_to_a_branch() -> None:
    first, second = trajectories(fork())
    assert (first.verdict, second.verdict) == ("exact", "forked: branched")
    closed = Session(
        SessionInfo("s", 0.0),
        [
            make_turn(0, None, [user("a")], said("A"), finish_reason="length"),
            make_turn(1, 0, [user("b")], said("B"), closed=True),
        ],
    )
    assert trajectories(closed)[0].verdict == "closed"


def test_a_leaf_s_reward_counts_before_the_session_s() -> None:
    rewards = [Reward("s", None, 0.5, 0.0), Reward("s", 2, 1.0, 0.0), Reward("s", None, 0.25, 1.0)]
    assert [trajectory.reward for trajectory in trajectories(fork(), rewards)] == [0.25, 1.0]
    assert [trajectory.reward for trajectory in trajectories(fork())] == [None, None]


@given(seed=st.integers(0, 2**20), size=st.integers(1, 20))
@settings(max_examples=60)
def test_every_sampled_token_is_trained_exactly_once(seed: int, size: int) -> None:
    rng = random.Random(seed)
    session = Session(SessionInfo("s", 0.0))
    unique = iter(range(10**6))
    sampled: list[int] = []
    for seq in range(size):
        completion = [next(unique) for _ in range(rng.randint(1, 4))]
        sampled += completion
        parent = rng.choice([None, *range(seq)]) if seq else None
        session.add(make_turn(seq, parent, [user(str(seq))], said("x"), added=[next(unique)], completion=completion))
    trained = np.concatenate([t.token_ids[t.loss_mask] for t in trajectories(session)])
    assert sorted(trained.tolist()) == sampled
