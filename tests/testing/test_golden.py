"""The golden sessions: pinned ids and numbers, and the properties that make errors visible."""

from __future__ import annotations

from math import exp

import pytest

from tokentape.testing.golden import GOLDEN, PAD, VOCAB_SIZE, Golden, Token
from tokentape.types import Provenance

BY_NAME = {golden.name: golden for golden in GOLDEN}


def test_golden_ids_and_logprobs_are_stable() -> None:
    (trajectory,) = BY_NAME["truncated in the middle"].sessions[0].trajectories()
    first, second, third = [64, 3, 14, 25], [65, 10, 21, 32, 3, PAD], [66, 17, 28, 39, 10, 21, PAD]
    assert trajectory.token_ids.tolist() == [50, 10, 51, 12, *first, PAD, 55, 11, 56, *second, 55, 12, 56, *third]
    assert trajectory.logprobs[4:7].tolist() == pytest.approx([-7.075023, -5.801091, -4.000360], abs=1e-6)
    assert trajectory.provenance[trajectory.token_ids == PAD].tolist() == [
        Provenance.CLOSE,
        Provenance.SAMPLED,
        Provenance.SAMPLED,
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4])
def test_golden_model_s_probabilities_sum_to_1(temperature: float) -> None:
    tokens = [Token("a", 0, 0, token_id, "7", temperature) for token_id in range(VOCAB_SIZE)]
    assert sum(exp(token.logprob()) for token in tokens) == pytest.approx(1)
    assert len({round(token.logprob(), 9) for token in tokens}) > VOCAB_SIZE / 2


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_some_logprobs_are_below_those_at_which_trainers_clamp(golden: Golden) -> None:
    assert min(token.logprob() for session in golden.sessions for token in session.tokens()) < -10


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_every_session_of_a_group_has_a_nonzero_advantage(golden: Golden) -> None:
    assert all(abs(value) > 0.01 for value in golden.advantages().values())


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_no_two_sessions_have_equal_weights(golden: Golden) -> None:
    assert len({len(session.tokens()) for session in golden.sessions}) > 1


def test_aborted_turns_are_in_the_record_and_in_no_path() -> None:
    session = BY_NAME["aborted"].sessions[0]
    aborted = session.turns[1]
    assert aborted.finish == "abort"
    assert not {*aborted.sampled} & {*session.tokens()}
    assert all(aborted.sampled[0].id not in trajectory.token_ids for trajectory in session.trajectories())


def test_weights_change_within_a_turn() -> None:
    (trajectory,) = BY_NAME["two weight versions"].sessions[0].trajectories()
    assert [version for _, _, version in trajectory.weight_spans] == ["7", "7", "8", "8"]


def test_siblings_have_unequal_numbers_within_a_group() -> None:
    sessions = BY_NAME["groups of unequal branches"].sessions
    assert [(session.group, len(session.paths())) for session in sessions] == [
        ("g0", 3),
        ("g0", 1),
        ("g0", 2),
        ("g1", 1),
        ("g1", 2),
    ]
