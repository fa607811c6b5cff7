"""A stop rule sees each planted fault and nothing else, and every live adapter obeys it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.session.trajectory_cases import make_trajectory
from tests.training import live, test_skyrl, test_slime, test_verifiers, test_verl
from tests.training.test_trl_rollouts import branching, one_question, trainer
from tokentape import Client
from tokentape.errors import InvalidRequest, TokentapeError, TrainingStopped
from tokentape.training import StopRule
from tokentape.training.trl import GatewayRollouts, GatewayWorker
from tokentape.types import Trajectory

ledger, servers, engines = test_verifiers.ledger, test_verl.servers, test_skyrl.engines
router = test_slime.router

LIMITS = {"unchecked_bridges": 0.25, "forked": 0.25, "truncated": 0.25, "not_exact": 0.25}
GOOD = replace(make_trajectory(), verdict="exact", finish_reasons=("stop",))
PLANTED = {
    "unchecked_bridges": {"verdict": "exact, bridge unchecked"},
    "forked": {"verdict": "forked: edited"},
    "truncated": {"finish_reasons": ("length", "stop")},
    "not_exact": {"verdict": "exact, model unverified"},
}


def samples(bad: Trajectory, count: int) -> list[Trajectory]:
    return [bad] * count + [GOOD] * (4 - count)


@pytest.mark.parametrize("name", PLANTED)
def test_a_share_above_its_limit_halts_and_one_at_its_limit_does_not(name: str) -> None:
    bad = replace(GOOD, **PLANTED[name])
    others = {limit: None if limit == "not_exact" else share for limit, share in LIMITS.items()} | {name: 0.25}
    StopRule(**others, window=4).add(samples(bad, 1))
    rule = StopRule(**others, window=4)
    with pytest.raises(TrainingStopped, match=rf"^{name} is 0\.5, the limit is 0\.25 \("):
        rule.add(samples(bad, 2))
    # Once halted it stays so, whatever comes later.
    with pytest.raises(TrainingStopped):
        rule.add([GOOD] * 8)


def test_a_bridge_that_differs_counts_as_unchecked() -> None:
    rule = StopRule(unchecked_bridges=0.0, window=1)
    with pytest.raises(TrainingStopped, match="unchecked_bridges"):
        rule.add([replace(GOOD, verdict="closed, bridge differs")])


def test_nothing_is_judged_before_the_window_is_full_and_the_oldest_leave_it() -> None:
    bad, rule = replace(GOOD, verdict="forked: edited"), StopRule(forked=0.5, window=4)
    rule.add([bad] * 3)
    assert rule.numbers()["forked"] == 1.0
    one = StopRule(forked=0.5, window=4)
    one.add([bad] * 2 + [GOOD] * 2)
    one.add([GOOD] * 2)
    assert one.numbers()["forked"] == 0.0


def test_warn_says_each_passed_limit_once_and_again_after_it_was_kept(caplog: pytest.LogCaptureFixture) -> None:
    bad, rule = replace(GOOD, verdict="forked: edited"), StopRule(forked=0.0, window=1, action="warn")
    with caplog.at_level(logging.WARNING, "tokentape.training"):
        for one in (bad, bad, GOOD, bad):
            rule.add([one])
    assert caplog.messages == ["stop rule: forked is 1, the limit is 0"] * 2


def test_the_ratio_is_seen_where_its_mean_says_nothing() -> None:
    """Tokens sampled from `q`, trained under `p`: the mean ratio is 1, and the policies are far apart."""
    p, q = np.array([0.1, 0.2, 0.7]), np.array([0.6, 0.3, 0.1])
    drawn = np.random.default_rng(0).choice(3, 20_000, p=q)
    assert np.exp(np.log(p) - np.log(q))[drawn].mean() == pytest.approx(1, abs=0.05)
    StopRule(log_ratio=0.02, window=1).add_logprobs(np.log(q)[drawn] + 0.01, np.log(q)[drawn])
    with pytest.raises(TrainingStopped, match="log_ratio"):
        StopRule(log_ratio=0.02, window=1).add_logprobs(np.log(p)[drawn], np.log(q)[drawn])
    with pytest.raises(TrainingStopped, match="log_ratio is inf"):
        StopRule(log_ratio=0.02, window=1).add_logprobs([np.nan, -1.0], [-1.0, -1.0])


def test_a_tracker_gets_the_numbers() -> None:
    seen: list[Any] = []
    rule = StopRule(window=2, tracker=seen.append)
    rule.add([GOOD, replace(GOOD, verdict="forked: edited")])
    rule.add([GOOD])
    assert [one["forked"] for one in seen] == [0.5, 0.5]
    assert seen[-1] == rule.numbers()


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="window 0"):
        StopRule(window=0)
    with pytest.raises(InvalidRequest, match="action 'stop'"):
        StopRule(action="stop")  # type: ignore[arg-type]


FORKS = 1
"""The number of the task of `live.agent` whose session forks."""


def no_forks() -> StopRule:
    return StopRule(forked=0.0, window=2)


SHARED_RULE = no_forks()


def test_in_verl(servers: test_verl.Servers) -> None:
    test_verl.ran(test_verl.loop_of(servers, stop_rule="tests.training.test_stop_rule.SHARED_RULE"), 0)
    with pytest.raises(TrainingStopped, match="forked"):
        test_verl.ran(test_verl.loop_of(servers, stop_rule="tests.training.test_stop_rule.SHARED_RULE"), FORKS)
    # Another loop, as verl makes one for each rollout.
    with pytest.raises(TrainingStopped, match="forked"):
        test_verl.ran(test_verl.loop_of(servers, stop_rule="tests.training.test_stop_rule.SHARED_RULE"), 0)


def test_in_slime(router: test_slime.Router) -> None:
    test_slime.ran([0], stop_rule=no_forks())
    with pytest.raises(TrainingStopped, match="forked"):
        test_slime.ran([FORKS], stop_rule=no_forks())


def test_in_skyrl(engines: live.SkyRlClient) -> None:
    test_skyrl.generated(engines, {"a": [0]}, stop_rule=no_forks())
    with pytest.raises(TrainingStopped, match="forked"):
        test_skyrl.generated(engines, {"a": [FORKS]}, stop_rule=no_forks())


def test_in_verifiers(ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_verifiers.Harness, "stop_rule", no_forks())
    test_verifiers.traces_of(ledger, 0)
    with pytest.raises(TrainingStopped, match="forked"):
        test_verifiers.traces_of(ledger, FORKS)


@pytest.fixture
def client(gateway_url: str) -> Iterator[Client]:
    with Client(gateway_url) as client:
        yield client


def test_in_trl(client: Client) -> None:
    GatewayRollouts(client, one_question, stop_rule=StopRule(truncated=1.0, window=1))(["a", "a"], trainer())
    with pytest.raises(TrainingStopped, match="forked"):
        GatewayRollouts(client, branching, branches="last", stop_rule=no_forks())(["a", "a"], trainer())


def test_in_trl_s_asynchronous_trainer(client: Client) -> None:
    worker = GatewayWorker(client, branching, [{"prompt": "a"}], num_generations=2, stop_rule=no_forks())
    worker.start()
    worker._thread.join()
    with pytest.raises(TokentapeError, match="forked"):
        worker.check_health(60.0)
