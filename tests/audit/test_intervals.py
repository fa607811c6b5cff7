"""Intervals: that they cover the true share from 50 sessions on, and that there are none below.

Oracle: sessions drawn with a known share. `-m slow` adds the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from tokentape.audit._statistics import ENOUGH, Rate, Shares, rate_of

Draw: TypeAlias = Callable[[np.random.Generator, int, float], tuple[npt.NDArray[Any], npt.NDArray[Any]]]


def independent(random: np.random.Generator, many: int, share: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Sessions of about 8 turns that know nothing of each other."""
    return random.poisson(7, many) + 1, np.full(many, share)


def clustered(random: np.random.Generator, many: int, share: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Sessions of 8 turns; in a fifth of them four times as many turns change, as at another temperature."""
    high = min(1.0, 4 * share)
    return np.full(many, 8), np.where(random.random(many) < 0.2, high, (share - 0.2 * high) / 0.8)


def heavy_tailed(random: np.random.Generator, many: int, share: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Sessions of 1 to 1,000 turns (log-normal, median 5, sigma 1.2), each with its own share (correlation 0.1)."""
    turns = np.ceil(np.exp(random.normal(1.5, 1.2, many))).clip(1, 1000).astype(int)
    return turns, random.beta(9 * share, 9 * (1 - share), many)


PROCESSES = (independent, clustered, heavy_tailed)


def over_sessions(changed: npt.NDArray[Any], turns: npt.NDArray[Any]) -> Rate:
    return rate_of(np.stack([changed, turns], 1))


def over_turns(changed: npt.NDArray[Any], turns: npt.NDArray[Any]) -> Rate:
    """The interval that treats each turn as an independent sample."""
    single = np.repeat([1, 0], [changed.sum(), (turns - changed).sum()])
    return rate_of(np.stack([single, np.ones_like(single)], 1))


def coverage(interval: Any, draw: Draw, share: float, many: int, runs: int) -> float:
    """The share of runs with an interval that has the true share in it."""
    random = np.random.default_rng(many)
    covered = 0
    for _ in range(runs):
        turns, shares = draw(random, many, share)
        found = interval(random.binomial(turns, shares), turns)
        covered += found.low <= share <= found.high
    return covered / runs


@pytest.mark.parametrize("draw", PROCESSES)
def test_intervals_of_50_sessions_cover_what_they_should(draw: Draw) -> None:
    """The wide limits are those of 400 runs: three standard errors."""
    assert 0.917 <= coverage(over_sessions, draw, 0.2, ENOUGH, 400) <= 0.993


@pytest.mark.parametrize("draw", [clustered, heavy_tailed])
def test_an_interval_over_turns_does_not(draw: Draw) -> None:
    assert coverage(over_turns, draw, 0.2, ENOUGH, 100) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "share", "many"), list(product(PROCESSES, (0.05, 0.2, 0.5), (50, 100, 400))))
def test_coverage_is_93_to_97_percent(draw: Draw, share: float, many: int) -> None:
    if draw is clustered:
        share = min(share, 0.25)
    found = coverage(over_sessions, draw, share, many, 5000)
    print(f"{draw.__name__:<14}{share:>6} {many:>5} sessions  {found:.1%}")
    assert 0.93 <= found <= 0.97


def shares_of(*sessions: tuple[int, int]) -> Rate:
    shares = Shares()
    for number, (changed, total) in enumerate(sessions):
        shares.add(str(number), [(("all", "all"), changed, total)])
    return shares.rate(("all", "all"))


def test_there_is_no_interval_below_50_sessions() -> None:
    found = shares_of(*[(1, 4)] * (ENOUGH - 1))
    assert (found.low, found.high, found.clusters, found.share) == (None, None, ENOUGH - 1, 0.25)
    assert shares_of(*[(1, 4)] * ENOUGH).low is not None
    assert "no interval" in found.interval


def test_sessions_count_and_not_turns_if_nothing_changed() -> None:
    """The rule of three: with none in n, up to 3 / n is likely; Wilson's interval is slightly wider."""
    found = shares_of(*[(0, 1000)] * 60)
    assert found.low == 0.0
    assert found.high is not None
    assert 3 / 60 < found.high < 4 / 60


def test_parts_of_a_session_are_one_cluster_in_any_order() -> None:
    shares = Shares()
    for number in [*range(120), *range(120)]:
        shares.add(str(number), [(("k",), 1, 2)])
    found = shares.rate(("k",))
    assert (found.changed, found.total, found.clusters) == (240, 480, 120)
    assert shares.rate(("none",)).total == 0


def test_memory_does_not_grow_with_sessions() -> None:
    shares = Shares()
    for number in range(6000):
        shares.add(str(number), [((), number % 2, 2)])
    found = shares.rate(())
    assert (found.changed, found.total, found.clusters) == (3000, 12000, 4096)
