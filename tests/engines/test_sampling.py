from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from embedded import penalised, reference  # noqa: E402

from tokentape.engines._base import SamplingParams  # noqa: E402
from tokentape.engines._sampling import choose, distribution, draw, penalise  # noqa: E402

# With multiples of 1/8, the reference and torch agree on ties.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=12)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
    top_k=st.integers(0, 14),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)


@given(rows=st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=4))
def test_distribution_matches_the_reference_for_every_row_of_a_batch(
    rows: list[tuple[list[float], SamplingParams]],
) -> None:
    width = max(len(logits) for logits, _ in rows)
    padded = torch.tensor([logits + [-math.inf] * (width - len(logits)) for logits, _ in rows])
    got = distribution(padded, [params for _, params in rows])
    got = got / got.sum(-1, keepdim=True)
    for row, (logits, params) in enumerate(rows):
        expected = torch.tensor(reference(logits, params), dtype=torch.float64)
        torch.testing.assert_close(got[row, : len(logits)], expected, atol=1e-9, rtol=1e-9)
        assert not got[row, len(logits) :].any()


@given(
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=8).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_draw_inverts_the_cumulative_distribution(weights: list[float], uniform: float) -> None:
    [drawn] = draw(torch.tensor([weights], dtype=torch.float64), [uniform]).tolist()
    assert weights[drawn] > 0
    assert sum(weights[:drawn]) <= uniform * sum(weights) <= sum(weights[: drawn + 1])


@given(total=st.floats(1e-3, 1e3))
def test_the_largest_uniform_number_draws_the_last_likely_id(total: float) -> None:
    weights = torch.tensor([[total / 2, total / 2, 0.0]], dtype=torch.float64)
    assert draw(weights, [math.nextafter(1, 0)]).tolist() == [1]


def test_row_of_nan_does_not_disturb_the_others() -> None:
    weights = torch.tensor([[math.nan, math.nan], [1.0, 0.0]], dtype=torch.float64)
    broken, fine = draw(weights, [0.5, 0.5]).tolist()
    assert broken in (0, 1)
    assert fine == 0


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([[1.0, 2.0, 0.0, 5.0]], dtype=torch.float64).repeat(800, 1)
    counts = Counter(draw(probabilities, [(i + 0.5) / 800 for i in range(800)]).tolist())
    assert counts == {0: 100, 1: 200, 3: 500}


def test_rows_are_greedy_or_drawn_by_their_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.9]] * 3)
    greedy, warm = (SamplingParams(max_tokens=1, temperature=t) for t in (0.0, 1.0))
    params = [greedy, warm, warm]
    assert choose(logits, distribution(logits, params), params, [0.999, 0.0, 0.999]).tolist() == [1, 0, 2]


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    tiny = SamplingParams(max_tokens=1, temperature=1e-300)
    logits = torch.tensor([[0.0, 1.0]])
    assert choose(logits, distribution(logits, [tiny]), [tiny], [0.0]).tolist() == [1]


def test_distribution_of_a_greedy_row_is_that_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.9]] * 2)
    greedy = SamplingParams(max_tokens=1, temperature=0.0, top_k=1, min_p=0.9, top_p=0.1)
    warm = SamplingParams(max_tokens=1, top_k=1)
    alone, beside = distribution(logits, [greedy, warm])
    torch.testing.assert_close(alone, logits[0].double().softmax(-1))
    assert (beside > 0).tolist() == [False, True, False]
    assert (distribution(logits, [greedy, warm], truncate=False) > 0).all()


@given(
    logits=st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=6, max_size=6),
    prompt=st.lists(st.integers(0, 5), max_size=5),
    completion=st.lists(st.integers(0, 5), max_size=5),
    repetition=st.sampled_from([0.5, 1.0, 2.0]),
    frequency=st.sampled_from([-0.5, 0.0, 0.25]),
    presence=st.sampled_from([-1.0, 0.0, 0.5]),
)
def test_penalties_match_the_reference(
    logits: list[float],
    prompt: list[int],
    completion: list[int],
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    params = SamplingParams(
        max_tokens=1, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    got = penalise(
        torch.tensor(logits),
        torch.tensor(prompt, dtype=torch.int64),
        torch.tensor(completion, dtype=torch.int64),
        params,
    )
    assert got.tolist() == penalised(logits, prompt, completion, params)
