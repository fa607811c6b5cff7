"""A stop rule reports each planted fault and nothing else, and every live adapter obeys it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.session.trajectory_cases import make_trajectory
from tests.training import live, test_skyrl, test_slime, test_tinker, test_verifiers, test_verl
from tests.training.test_trl_async import taken
from tests.training.test_trl_rollouts import ask_once, branching, trainer
from tokentape import Client
from tokentape.client import ClientSession
from tokentape.errors import InvalidRequest, TokentapeError, TrainingStopped
from tokentape.training import StopRule
from tokentape.training.trl import GatewayRollouts, GatewayWorker, Row
from tokentape.types import Trajectory

ledger, servers, engines = test_verifiers.ledger, test_verl.servers, test_skyrl.engines
router, tinker_ledger = test_slime.router, test_tinker.ledger

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
def test_share_above_its_limit_halts_but_at_its_limit_does_not(name: str) -> None:
    bad = replace(GOOD, **PLANTED[name])
    others = {limit: None if limit == "not_exact" else share for limit, share in LIMITS.items()} | {name: 0.25}
    StopRule(**others, window=4).add(samples(bad, 1))
    rule = StopRule(**others, window=4)
    with pytest.raises(TrainingStopped, match=rf"^{name} is 0\.5, the limit is 0\.25 \("):
        rule.add(samples(bad, 2))
    # A halted rule stays halted.
    with pytest.raises(TrainingStopped):
        rule.add([GOOD] * 8)


def test_a_bridge_that_differs_counts_as_unchecked() -> None:
    rule = StopRule(unchecked_bridges=0.0, window=1)
    with pytest.raises(TrainingStopped, match="unchecked_bridges"):
        rule.add([replace(GOOD, verdict="closed, bridge differs")])


def test_rule_waits_for_a_full_window_and_drops_the_oldest_samples() -> None:
    bad, rule = replace(GOOD, verdict="forked: edited"), StopRule(forked=0.5, window=4)
    rule.add([bad] * 3)
    assert rule.numbers()["forked"] == 1.0
    windowed = StopRule(forked=0.5, window=4)
    windowed.add([bad] * 2 + [GOOD] * 2)
    windowed.add([GOOD] * 2)
    assert windowed.numbers()["forked"] == 0.0


def test_each_passed_limit_is_warned_once_until_it_is_kept_again(caplog: pytest.LogCaptureFixture) -> None:
    bad, rule = replace(GOOD, verdict="forked: edited"), StopRule(forked=0.0, window=1, action="warn")
    with caplog.at_level(logging.WARNING, "tokentape.training"):
        for sample in (bad, bad, GOOD, bad):
            rule.add([sample])
    assert caplog.messages == ["stop rule: forked is 1, the limit is 0"] * 2


def test_ratio_limit_triggers_where_the_mean_is_unremarkable() -> None:
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
    assert [entry["forked"] for entry in seen] == [0.5, 0.5]
    assert seen[-1] == rule.numbers()


def test_failing_tracker_is_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    def track(_: object) -> None:
        raise RuntimeError("no disk")

    rule = StopRule(forked=0.0, window=1, tracker=track)
    rule.add([GOOD])
    rule.add([GOOD])
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no disk"]
    with pytest.raises(TrainingStopped):
        rule.add([replace(GOOD, verdict="forked: edited")])


def test_a_batch_is_judged_at_each_step_of_the_window() -> None:
    bad = replace(GOOD, verdict="forked: edited")
    with pytest.raises(TrainingStopped, match=r"forked is 0\.75"):
        StopRule(forked=0.5, window=4).add([GOOD, *[bad] * 3, *[GOOD] * 4])


def test_samples_without_loss_do_not_count() -> None:
    rule = StopRule(forked=0.0, window=1)
    rule.add([replace(GOOD, verdict="forked: edited", loss_mask=np.zeros_like(GOOD.loss_mask))])
    assert rule.numbers() == {}


@pytest.mark.parametrize("bad", [{"forked": 20.0}, {"truncated": float("nan")}, {"log_ratio": float("inf")}])
def test_impossible_limits_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=rf"{next(iter(bad))} is .*: expected a "):
        StopRule(**bad)  # type: ignore[arg-type]
    StopRule(forked=1.0, truncated=0.0, log_ratio=5.0)


def test_logprobs_of_other_shapes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"shape \(\), recorded logprobs \(2,\)"):
        StopRule(log_ratio=1.0).add_logprobs(-1.0, [-1.0, -2.0])


def test_logprobs_may_be_tensors() -> None:
    torch = pytest.importorskip("torch")
    rule = StopRule(window=1)
    rule.add_logprobs(torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True), [-1.5, -2.0])
    assert rule.numbers() == {"log_ratio": 0.25}


def test_values_that_are_not_rules_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="window 0"):
        StopRule(window=0)
    with pytest.raises(InvalidRequest, match="action 'stop'"):
        StopRule(action="stop")  # type: ignore[arg-type]


FORKS = 1
"""Number of the task of `live.agent` with a session that forks."""

FAILS = 5
"""Number of the task with an agent that fails after a call."""


def no_forks() -> StopRule:
    return StopRule(forked=0.0, window=2)


SHARED_RULE = no_forks()


def test_in_verl(servers: test_verl.Servers) -> None:
    test_verl.ran(test_verl.loop_of(servers, stop_rule="tests.training.test_stop_rule.SHARED_RULE"), 0)
    with pytest.raises(TrainingStopped, match="forked"):
        test_verl.ran(test_verl.loop_of(servers, stop_rule="tests.training.test_stop_rule.SHARED_RULE"), FORKS)
    # Sampling with settings other than the trainer's is a validation.
    greedy = test_verl.SAMPLING | {"temperature": 0.0}
    test_verl.ran(test_verl.loop_of(servers, stop_rule="tests.training.test_stop_rule.SHARED_RULE"), FORKS, greedy)
    # verl makes a new loop for each rollout.
    with pytest.raises(TrainingStopped, match="forked"):
        test_verl.ran(test_verl.loop_of(servers, stop_rule="tests.training.test_stop_rule.SHARED_RULE"), 0)


def test_in_slime(router: test_slime.Router) -> None:
    test_slime.ran([0], stop_rule=no_forks())
    with pytest.raises(TrainingStopped, match="forked"):
        test_slime.ran([FORKS], stop_rule=no_forks())
    rule = StopRule(window=1)
    test_slime.ran([FAILS], stop_rule=rule)
    test_slime.ran([FORKS], evaluation=True, stop_rule=rule)
    assert rule.numbers() == {}


def test_in_skyrl(engines: live.SkyRlClient) -> None:
    test_skyrl.generated(engines, {"a": [0]}, stop_rule=no_forks())
    with pytest.raises(TrainingStopped, match="forked"):
        test_skyrl.generated(engines, {"a": [FORKS]}, stop_rule=no_forks())
    # These are not trained.
    test_skyrl.generated(engines, {"a": [FORKS]}, phase="eval", stop_rule=no_forks())
    test_skyrl.generated(engines, {"a": [FORKS, FAILS]}, stop_rule=no_forks())


def test_in_verifiers(ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_verifiers.Harness, "stop_rule", no_forks())
    test_verifiers.traces_of(ledger, 0)
    with pytest.raises(TrainingStopped, match="forked"):
        test_verifiers.traces_of(ledger, FORKS)
    # A halted rule does not halt evaluation.
    test_verifiers.traces_of(ledger, FORKS, client="eval")


def test_in_the_tinker_cookbook(tinker_ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_tinker.Rollouts, "stop_rule", no_forks())
    test_tinker.trajectories_of(tinker_ledger, 0)
    strategy = test_tinker.Rollouts()
    with pytest.raises(RuntimeError, match="the agent failed"):
        test_tinker.trajectories_of(tinker_ledger, FORKS, FAILS, strategy=strategy)
    # The cookbook skips a failing group while this is set, and then continues.
    assert strategy.catches_group_errors
    with pytest.raises(TrainingStopped, match="forked"):
        test_tinker.trajectories_of(tinker_ledger, FORKS, strategy=strategy)
    assert not strategy.catches_group_errors


@pytest.fixture
def client(gateway_url: str) -> Iterator[Client]:
    with Client(gateway_url) as client:
        yield client


def test_in_trl(client: Client) -> None:
    GatewayRollouts(client, ask_once, stop_rule=StopRule(truncated=1.0, window=1))(["a", "a"], trainer())
    with pytest.raises(TrainingStopped, match="forked"):
        GatewayRollouts(client, branching, branches="last", stop_rule=no_forks())(["a", "a"], trainer())
    rule, evaluating = StopRule(window=1), trainer(model=SimpleNamespace(training=False))
    GatewayRollouts(client, branching, branches="last", stop_rule=rule)(["a", "a"], evaluating)
    assert rule.numbers() == {}


def test_in_trl_s_asynchronous_trainer(client: Client) -> None:
    worker = GatewayWorker(client, branching, [{"prompt": "a"}], num_generations=2, stop_rule=no_forks())
    worker.start()
    worker._thread.join()
    with pytest.raises(TokentapeError, match="forked"):
        worker.check_health(60.0)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:You are importing from 'trl.experimental'")
def test_in_trl_s_asynchronous_trainer_without_failing_agents(client: Client) -> None:
    def agent(session: ClientSession, row: Row) -> float:
        if row["prompt"] != "bad":
            return ask_once(session, row)
        branching(session, row)
        raise RuntimeError("tool broke")

    rule, rows = StopRule(window=4), [{"prompt": "bad"}, {"prompt": "a"}]
    about: Any = {"num_generations": 2, "concurrency": 1, "failures": "skip", "stop_rule": rule}
    taken(GatewayWorker(client, agent, rows, **about), 2)
    assert rule.numbers()["forked"] == 0.0
