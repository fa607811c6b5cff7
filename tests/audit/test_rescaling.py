"""Log-probabilities under a rule, from a few alternatives, against the whole distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.audit.planted import distribution
from tests.session.trajectory_cases import make_trajectory
from tokentape.audit._rescaling import RAW, Rule, recorded_rules, under
from tokentape.types import TokenDistribution

VOCABULARY = 60
RULES = [
    Rule(0.6),
    Rule(1.4),
    Rule(1.0, top_p=0.9),
    Rule(1.4, top_p=0.8),
    Rule(0.7, top_k=3),
    Rule(1.0, min_p=0.1),
    Rule(1.3, min_p=0.02, top_k=20, top_p=0.95),
]


def raw(seed: int, sharpness: float) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, sharpness, (40, VOCABULARY))
    return np.asarray(logits - np.logaddexp.reduce(logits, -1, keepdims=True))


def best(rows: np.ndarray, count: int) -> np.ndarray:
    return np.asarray(-np.sort(-rows, -1)[:, :count], np.float32)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_all_alternatives_give_the_exact_number(rule: Rule) -> None:
    rows = raw(1, 2.0)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, len(rows))
    own, expected = (of[np.arange(len(rows)), ids] for of in (rows, distribution(rows, rule)))
    value, error = under(own, best(rows, VOCABULARY), rule, VOCABULARY)
    known = np.isfinite(error)
    assert known.mean() > 0.9
    np.testing.assert_allclose(value[known], expected[known], atol=1e-5)


@settings(max_examples=40)
@given(
    st.sampled_from(RULES),
    st.integers(0, 1000),
    st.floats(0.3, 8),
    st.integers(1, VOCABULARY),
)
def test_some_alternatives_give_bounds(rule: Rule, seed: int, sharpness: float, count: int) -> None:
    rows = raw(seed, sharpness)
    value, error = under(rows[:, 0], best(rows, count), rule, VOCABULARY)
    expected = distribution(rows, rule)[:, 0]
    known = np.isfinite(error)
    possible = known & np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        apart = np.abs(value - expected)
    assert (np.isneginf(value) == np.isneginf(expected))[known].all()
    assert (apart[possible] <= error[possible] + 1e-4).all()


def test_cut_beyond_the_alternatives_is_unknown() -> None:
    rows = np.full((1, VOCABULARY), -np.log(VOCABULARY))
    assert np.isinf(under(rows[:, 0], best(rows, 10), Rule(top_p=0.9), VOCABULARY)[1]).all()
    assert np.isfinite(under(rows[:, 0], best(rows, 10), Rule(top_k=4), VOCABULARY)[1]).all()


def test_only_the_raw_number_is_known_without_alternatives() -> None:
    none = np.empty((1, 0))
    assert under([-1.0], none, RAW, 10)[1].tolist() == [0.0]
    assert np.isinf(under([-1.0], none, Rule(0.6), 10)[1]).all()


@pytest.mark.parametrize(
    ("of", "sampling", "expected"),
    [
        (TokenDistribution(False, 1.0, False, False), None, RAW),
        (TokenDistribution(False, 0.6, False, False), None, Rule(0.6)),
        (TokenDistribution(False, 0.6, True, False), {"top_p": 0.9, "top_k": 5}, Rule(0.6, 0.0, 5, 0.9)),
        (TokenDistribution(False, 0.6, True, False), None, "after truncation"),
        (TokenDistribution(True, 1.0, False, False), None, "are taken after penalties"),
        (TokenDistribution(None, 1.0, False, False), None, "may be taken after penalties"),
        (TokenDistribution(False, 1.0, False, True), None, "after a grammar"),
        (TokenDistribution(False, None, False, False), None, "does not say"),
        (None, None, "does not say"),
    ],
)
def test_record_decides_which_logprobs_are_compared(
    of: TokenDistribution | None, sampling: dict[str, float] | None, expected: Rule | str
) -> None:
    trajectory = make_trajectory(logprobs_of=(of,))
    (found,) = recorded_rules(trajectory, None if sampling is None else {0: sampling})
    assert found == expected if isinstance(expected, Rule) else expected in str(found)
