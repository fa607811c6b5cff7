"""A few seeds of the simulator, and that it can fail. `make test-simulator` plays many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulator.mutants import MUTANTS, found, mutated
from tests.simulator.run import play, simulating
from tokentape.chat._renderer import Renderer


@pytest.fixture(scope="module")
def player() -> Iterator[Renderer]:
    logging.disable(logging.CRITICAL)
    with simulating() as renderer:
        yield renderer
    logging.disable(logging.NOTSET)


def test_acknowledged_turns_are_kept_and_unread_ones_not_trained(player: Renderer) -> None:
    reached: Counter[str] = Counter()
    outcomes = [play(seed, player, reached) for seed in range(6)]
    assert [outcome.faults for outcome in outcomes] == [[]] * 6
    assert sum(outcome.calls for outcome in outcomes) > 100
    # A simulation without faults would find nothing.
    faults = {"killed", "client left", "disk full", "engine aborted", "reply lost", "duplicate"}
    assert {what for what, count in reached.items() if count} >= faults | {"paused", "snapshot", "dropped", "deleted"}


@pytest.mark.parametrize("seed", [4000497, 4000775])
def test_retry_abandoned_before_handling_leaves_the_reply_unread(seed: int, player: Renderer) -> None:
    assert play(seed, player, Counter()).faults == []


def test_seed_reproduces_a_run(player: Renderer) -> None:
    first, again, other = (play(seed, player, Counter()) for seed in (3, 3, 4))
    assert first.trace == again.trace
    assert first.digest == again.digest != other.digest


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_changes_one_place_of_the_sources(name: str) -> None:
    compile(mutated(name), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_is_found(name: str) -> None:
    caught, output = found(name)
    assert caught, output
