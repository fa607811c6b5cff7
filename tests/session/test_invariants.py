from __future__ import annotations

import numpy as np
import pytest

from tests.session.builders import assistant, make_turn, user
from tokentape._session.invariants import check_completion, check_turn
from tokentape.errors import EngineContractError, InvariantViolation
from tokentape.types import Provenance

CONTEXT = np.array([1, 2, 3], dtype=np.int32)
TURN = make_turn(0, None, [user("a")], assistant("A"), added=[4, 5])


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_context_and_bridge_may_be_sent() -> None:
    check_turn(TURN, CONTEXT, ids(1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (ids(1, 2, 3, 4), "4 ids were sent, but parent and bridge have 5"),
        (ids(1, 9, 3, 4, 5), "at token 1"),
        (ids(1, 2, 3, 4, 9), "does not end with the recorded bridge"),
    ],
)
def test_other_fields_may_not_be_sent(sent: np.ndarray, message: str) -> None:
    with pytest.raises(InvariantViolation, match=message):
        check_turn(TURN, CONTEXT, sent)


def test_added_ids_can_not_be_marked_as_sampled() -> None:
    turn = make_turn(0, None, [user("a")], assistant("A"), added=[4, 5])
    turn.added_provenance[0] = Provenance.SAMPLED
    with pytest.raises(InvariantViolation, match="recorded as sampled"):
        check_turn(turn, CONTEXT, ids(1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("sampled", "logprobs", "message"),
    [
        (ids(1, 2), [-0.1], "2 ids but 1 logprobs"),
        (ids(), [], "no ids"),
        (ids(1, 100), [-0.1, -0.1], "id 100, but the vocabulary ends at 99"),
        (ids(1, -1), [-0.1, -0.1], "id -1"),
        (ids(1, 2), [-0.1, float("nan")], "finite"),
        (ids(1, 2), [-0.1, float("-inf")], "finite"),
        (ids(1, 2), [-0.1, 0.7], "finite"),
    ],
)
def test_untrustworthy_reply_is_refused(sampled: np.ndarray, logprobs: list[float], message: str) -> None:
    with pytest.raises(EngineContractError, match=message):
        check_completion(sampled, np.array(logprobs, dtype=np.float32), vocab_size=100)
