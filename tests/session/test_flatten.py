from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.searching import examples
from tests.session.builders import assistant, make_turn, user
from tests.session.trajectory_cases import make_trajectory
from tokentape._session.arrow import write_parquet
from tokentape._session.files import read_trajectories
from tokentape._session.flatten import trained_turns, trajectories
from tokentape._session.jsonl import read_jsonl, write_jsonl
from tokentape._session.tree import Session
from tokentape.types import Provenance, Reward, SessionInfo, TurnColumn, TurnPayload


def fork() -> Session:
    """Two branches: 0-1 and 0-2."""
    return Session(
        SessionInfo("s", 0.0, {"task": 1}),
        [
            make_turn(0, None, [user("a")], assistant("A"), added=[1, 2], completion=[3]),
            make_turn(1, 0, [user("b")], assistant("B"), added=[4], completion=[5, 6]),
            make_turn(2, 0, [user("c")], assistant("C"), added=[7], completion=[8], fork="branched"),
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


def test_session_path_and_turn_rewards_are_separate() -> None:
    rewards = [
        Reward("s", None, 0.5, 0.0),
        Reward("s", None, 1.0, 0.0, leaf=2),
        Reward("s", 0, 7.0, 0.0),
        Reward("s", 2, 8.0, 0.0),
        Reward("s", None, 0.25, 1.0),
        Reward("s", 2, 9.0, 1.0),
    ]
    first, second = trajectories(fork(), rewards)
    assert (first.reward, second.reward) == (0.25, 1.0)
    np.testing.assert_array_equal(first.turn_rewards, [7.0, np.nan])
    np.testing.assert_array_equal(second.turn_rewards, [7.0, 9.0])
    assert [trajectory.reward for trajectory in trajectories(fork())] == [None, None]


def test_reward_of_a_continued_path_no_longer_counts() -> None:
    (first, _) = trajectories(fork(), [Reward("s", None, 1.0, 0.0, leaf=0)])
    assert first.reward is None


def test_weight_spans_cover_the_sampled_tokens() -> None:
    turns = [
        replace(
            make_turn(0, None, [user("a")], assistant("A"), added=[1, 2], completion=[3, 4, 5]), weight_version="a"
        ),
        replace(
            make_turn(1, 0, [user("b")], assistant("B"), added=[6], completion=[7, 8, 9]),
            weight_version="a",
            weight_changes=((1, "b"), (2, "c")),
        ),
    ]
    (trajectory,) = trajectories(Session(SessionInfo("s", 0.0), turns))
    assert trajectory.weight_spans == ((2, 5, "a"), (6, 7, "a"), (7, 8, "b"), (8, 9, "c"))
    assert trajectory.weight_versions == ("a", "a")


def column(turn: int, *values: float, name: str = "advantages") -> TurnColumn:
    return TurnColumn("s", turn, name, np.array(values, np.float32), 0.0)


def test_columns_are_on_every_branch_with_their_turn() -> None:
    first, second = trajectories(fork(), columns=[column(0, 0.5), column(1, 9, 1, 2), column(0, 0.25)])
    assert first.columns["advantages"].tolist() == [0, 0, 0.25, 9, 1, 2]
    # Turn 2 is trained and has no value: that must not pass for a zero. Turn 0's first values were replaced.
    np.testing.assert_array_equal(second.columns["advantages"], np.array([0, 0, 0.25, 0, np.nan], np.float32))


def test_branch_without_a_column_on_any_turn_lacks_it() -> None:
    first, second = trajectories(fork(), columns=[column(2, 1)])
    assert (dict(first.columns), list(second.columns)) == ({}, ["advantages"])


def test_trained_turns_have_a_set_loss_mask() -> None:
    assert [turn.seq for turn in trained_turns(fork(), 1)] == [0, 1]
    assert [turn.seq for turn in trained_turns(fork(), 2)] == [2]


def payload(turn: int, start: int, *rows: int) -> TurnPayload:
    return TurnPayload("s", turn, "experts", start, np.array(rows, np.uint8)[:, None])


def test_payload_rows_align_with_their_tokens() -> None:
    payloads = [payload(0, 0, 10, 11), payload(1, -1, 12, 13, 14), payload(2, 0, 23)]
    first, second = trajectories(fork(), payloads=payloads)
    # The row of turn 0's last token came with turn 1; on the branch of turn 2 it is unknown.
    assert first.payloads["experts"].rows[:, 0].tolist() == [10, 11, 12, 13, 14, 0]
    assert first.payloads["experts"].known.tolist() == [True, True, True, True, True, False]
    assert second.payloads["experts"].rows[:, 0].tolist() == [10, 11, 0, 23, 0]
    assert second.payloads["experts"].known.tolist() == [True, True, False, True, False]


def test_row_of_the_parent_takes_precedence_over_the_child() -> None:
    first, _ = trajectories(fork(), payloads=[payload(0, 0, 10, 11, 12), payload(1, -1, 99, 13)])
    assert first.payloads["experts"].rows[:, 0].tolist() == [10, 11, 12, 13, 0, 0]


@given(seed=st.integers(0, 2**20), size=st.integers(1, 20))
@settings(max_examples=examples(60))
def test_every_sampled_token_is_trained_exactly_once(seed: int, size: int) -> None:
    rng = random.Random(seed)
    session = Session(SessionInfo("s", 0.0))
    unique = iter(range(10**6))
    sampled: list[int] = []
    for seq in range(size):
        completion = [next(unique) for _ in range(rng.randint(1, 4))]
        sampled += completion
        parent = rng.choice([None, *range(seq)]) if seq else None
        session.add(
            make_turn(seq, parent, [user(str(seq))], assistant("x"), added=[next(unique)], completion=completion)
        )
    trained = np.concatenate([t.token_ids[t.loss_mask] for t in trajectories(session)])
    assert sorted(trained.tolist()) == sampled


@given(seed=st.integers(0, 2**20), size=st.integers(1, 12))
@settings(max_examples=examples(60))
def test_values_stay_with_their_tokens_through_forks_and_files(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int
) -> None:
    """Against a dict from token id, unique in the session, to the value last given to it."""
    rng = random.Random(seed)
    session = Session(SessionInfo("s", 0.0))
    unique = iter(range(10**6))
    for seq in range(size):
        added = [next(unique) for _ in range(rng.randint(1, 3))]
        completion = [next(unique) for _ in range(rng.randint(1, 4))]
        parent = rng.choice([None, *range(seq)]) if seq else None
        session.add(make_turn(seq, parent, [user(str(seq))], assistant("x"), added=added, completion=completion))
    columns: list[TurnColumn] = []
    value_of: dict[tuple[str, int], float] = {}
    for _ in range(rng.randint(0, 8)):
        turn, name = session.turns[rng.randrange(size)], rng.choice(["advantages", "values"])
        ids = [*turn.added_ids.tolist(), *turn.completion_ids.tolist()] if rng.random() < 0.5 else turn.completion_ids
        # Values of an earlier, longer column for the added tokens are removed with it.
        value_of = {key: value for key, value in value_of.items() if key[0] != name or key[1] not in turn.added_ids}
        values = [rng.randint(1, 1000) / 8 for _ in ids]
        value_of |= {(name, int(token)): value for token, value in zip(ids, values, strict=True)}
        columns.append(column(turn.seq, *values, name=name))
    found = trajectories(session, columns=columns)
    directory = tmp_path_factory.mktemp("files")
    write_parquet(found, directory / "t.parquet")
    write_jsonl(found, directory / "t.jsonl")
    for copy in (found, read_trajectories(directory / "t.parquet"), list(read_jsonl(directory / "t.jsonl"))):
        for trajectory in copy:
            names = {column.name for column in columns if column.turn in trajectory.turns}
            assert set(trajectory.columns) == names
            for name in names:
                expected = [
                    value_of.get((name, token), np.nan if trained else 0.0)
                    for token, trained in zip(trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), strict=True)
                ]
                np.testing.assert_array_equal(trajectory.columns[name], np.array(expected, np.float32))


def test_trajectories_and_samples_compare_by_identity() -> None:
    left, right = make_trajectory(), make_trajectory()
    assert left == left
    assert left != right
    assert left in [right, left]
    assert len({left, right}) == 2


def test_trajectory_has_finish_reasons_except_in_older_records() -> None:
    turns = [
        make_turn(0, None, [user("a")], assistant("A"), added=[1], completion=[2]),
        replace(make_turn(1, 0, [user("b")], assistant("B"), added=[3], completion=[4]), finish_reason="length"),
    ]
    (trajectory,) = trajectories(Session(SessionInfo("s", 0.0, {}), turns))
    assert (trajectory.finish_reasons, trajectory.truncated) == (("stop", "length"), True)
    old = [replace(turn, sampled_from=None, logprobs_of=None) for turn in turns]
    (trajectory,) = trajectories(Session(SessionInfo("s", 0.0, {}), old))
    assert (trajectory.finish_reasons, trajectory.truncated) == ((None, None), None)
