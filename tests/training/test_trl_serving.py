"""A gateway in this process whose weights are pushed while it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from tests.waiting import PATIENCE
from tokentape.client import ClientSession
from tokentape.errors import EngineError, EngineUnavailable
from tokentape.training._logprob_check import check_logprobs
from tokentape.training.trl import GatewayTransfer, Policy, PolicyTransfer, serving
from tokentape.types import Logprobs, TokenIds


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Iterator[Policy]:
    with serving(model_dir, threads=1) as policy:
        yield policy


@pytest.fixture
def model(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def ask(session: ClientSession, max_tokens: int = 8) -> httpx2.Response:
    body = {"model": "any", "messages": [{"role": "user", "content": "Tell me."}], "max_tokens": max_tokens}
    return httpx2.post(f"{session.base_url}/chat/completions", json=body, timeout=PATIENCE)


@torch.no_grad()
def moved(model: Any, by: float) -> dict[str, torch.Tensor]:
    """Return the model's weights, each changed a little."""
    torch.manual_seed(0)
    for value in model.parameters():
        value.add_(torch.randn_like(value), alpha=by)
    return dict(model.state_dict())


def logprobs_of(model: Any) -> Any:
    @torch.no_grad()
    def forward(ids: TokenIds) -> Logprobs:
        row = torch.from_numpy(ids.astype(np.int64))[None]
        logprobs = model(input_ids=row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]
        return np.concatenate([[np.nan], logprobs.numpy()]).astype(np.float32)

    return forward


def test_pushed_weights_sample_and_their_version_is_recorded(policy: Policy, model: Any) -> None:
    policy.push(moved(model, 0.02), "moved")
    session = policy.client.session()
    assert ask(session, 16).is_success
    (path,) = session.trajectories()
    assert path.weight_versions == ("moved",)
    assert check_logprobs([path], forward=logprobs_of(model)).numeric.max < 1e-3
    # The trainer's weights change further; the pushed weights do not.
    moved(model, 0.02)
    session = policy.client.session()
    assert ask(session, 16).is_success
    assert check_logprobs(session.trajectories(), forward=logprobs_of(model)).numeric.max > 1e-2


def test_mismatched_weights_change_nothing(policy: Policy, model: Any) -> None:
    policy.push(model.state_dict(), "good")
    weights = dict(model.state_dict())
    for wrong, why in (
        ({**weights, "lm_head.bias": torch.zeros(3)}, "no such tensor"),
        ({**weights, "model.norm.weight": torch.zeros(3)}, r"shape \(3,\) does not fit"),
        ({name: value for name, value in weights.items() if name != "model.norm.weight"}, "1 parameters have no new"),
    ):
        with pytest.raises(EngineError, match=why):
            policy.push(wrong, "bad")
    assert policy.client.engine().weight_version == "good"
    session = policy.client.session()
    assert ask(session).is_success
    (path,) = session.trajectories()
    assert path.weight_versions == ("good",)
    assert check_logprobs([path], forward=logprobs_of(model)).numeric.max < 1e-3


def test_running_calls_finish_first_or_continue_with_new_weights(policy: Policy, model: Any) -> None:
    policy.push(model.state_dict(), "old")
    session = policy.client.session()
    # So hot that no token is likely, not even the end of turn.
    body = {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "temperature": 2.0}
    changed = moved(model, 0.05)
    with httpx2.stream(
        "POST", f"{session.base_url}/chat/completions", json={**body, "seed": 1, "stream": True}, timeout=PATIENCE
    ) as reply:
        reply.raise_for_status()
        arriving = reply.iter_lines()
        next(arriving)
        with pytest.raises(EngineUnavailable, match="still in flight after 0 s, so the weights were not changed"):
            policy.push(changed, "refused", wait=0.0)
        policy.push(changed, "new", wait=None)
        list(arriving)
    (path,) = session.trajectories()
    (old, new) = path.weight_spans
    assert (old[2], new[2]) == ("old", "new")
    assert old[1] == new[0]
    assert policy.client.engine().paused is False


class Trainer:
    """The parts of a trainer that are read."""

    def __init__(self, model: Any, step: int) -> None:
        self.model = model
        self.state = SimpleNamespace(global_step=step)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)


def sampled_by(policy: Policy, model: Any) -> bool:
    session = policy.client.session()
    assert ask(session, 16).is_success
    return check_logprobs(session.trajectories(), forward=logprobs_of(model)).numeric.max < 1e-3


def test_sync_follows_the_trainer_s_step(policy: Policy, model: Any) -> None:
    trainer = Trainer(model, 3)
    policy.sync(trainer)
    assert policy.client.engine().weight_version == "3"
    moved(model, 0.02)
    policy.sync(trainer)
    assert not sampled_by(policy, model)
    trainer.state.global_step = 4
    policy.sync(trainer)
    assert sampled_by(policy, model)


def test_sync_ignores_the_step_of_another_trainer(policy: Policy, model: Any) -> None:
    first, second = Trainer(model, 3), Trainer(copy.deepcopy(model), 3)
    policy.sync(first)
    moved(second.model, 0.02)
    policy.sync(second)
    assert sampled_by(policy, second.model)
    policy.push(model.state_dict(), "elsewhere")
    policy.sync(second)
    assert sampled_by(policy, second.model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_merged_for_the_engine_and_the_model_stays_bit_for_bit(policy: Policy, model: Any) -> None:
    torch.manual_seed(0)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "down_proj"], modules_to_save=["norm"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    policy.sync(Trainer(adapted, 70))
    session = policy.client.session()
    assert ask(session, 16).is_success
    (path,) = session.trajectories()
    assert path.weight_versions == ("70",)
    assert check_logprobs([path], forward=logprobs_of(adapted)).numeric.max < 1e-3
    with adapted.disable_adapter():
        assert check_logprobs([path], forward=logprobs_of(adapted)).numeric.max > 1e-2
    after = adapted.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_weights_that_a_transfer_leaves_out_stay(policy: Policy, model: Any) -> None:
    policy.push(model.state_dict(), "whole")
    left_out = "model.norm.weight"
    old = model.state_dict()[left_out].clone()
    changed = moved(model, 0.02)
    PolicyTransfer(policy).send_weights((name, changed[name]) for name in changed if name != left_out)
    session = policy.client.session()
    assert ask(session, 16).is_success
    assert check_logprobs(session.trajectories(), forward=logprobs_of(model)).numeric.max > 1e-3
    model.load_state_dict({**changed, left_out: old})
    assert check_logprobs(session.trajectories(), forward=logprobs_of(model)).numeric.max < 1e-3


class Transfer:
    """A weight transfer that records its calls and whether the gateway was paused."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.asked: list[Any] = []

    def tell(self, name: str) -> None:
        self.asked.append((name, self.policy.client.engine().paused))

    def init_weight_transfer(self) -> None:
        self.tell("init")

    def pause(self) -> None:
        self.tell("pause")

    def send_weights(self, iterator: Iterator[Any]) -> None:
        self.tell(f"send {next(iterator)}")

    def resume(self) -> None:
        self.tell("resume")

    def destroy(self) -> None:
        self.tell("destroy")


def test_transfer_by_another_client_happens_while_calls_wait(policy: Policy) -> None:
    other = Transfer(policy)
    transfer = GatewayTransfer(policy.client, other)
    transfer.init_weight_transfer()
    for _ in range(2):
        transfer.pause()
        transfer.send_weights(iter([1]))
        transfer.resume()
    transfer.destroy()
    once = [("pause", True), ("send 1", True), ("resume", True)]
    assert other.asked == [("init", False), *once, *once, ("destroy", False)]
    assert policy.client.engine().weight_version == "2"


def test_embedded_engine_versions_follow_the_trainer_s_steps(policy: Policy, model: Any) -> None:
    transfer = PolicyTransfer(policy)
    for count in ("1", "2"):
        transfer.pause()
        assert policy.client.engine().paused is True
        transfer.send_weights(iter(model.state_dict().items()))
        transfer.resume()
        session = policy.client.session()
        assert ask(session).is_success
        (path,) = session.trajectories()
        assert path.weight_versions == (count,)


def test_agents_do_not_wait_after_a_failed_transfer(policy: Policy) -> None:
    class Broken(Transfer):
        def send_weights(self, iterator: Iterator[Any]) -> None:
            raise RuntimeError("no connection")

        def resume(self) -> None:
            raise RuntimeError("no connection")

    for transfer, error in (
        (PolicyTransfer(policy), EngineError),
        (GatewayTransfer(policy.client, Broken(policy)), RuntimeError),
    ):
        transfer.pause()
        with pytest.raises(error):
            transfer.send_weights(iter([("nowhere", torch.zeros(2))]))
        assert policy.client.engine().paused is False
    other = GatewayTransfer(policy.client, Broken(policy))
    other.pause()
    with pytest.raises(RuntimeError):
        other.resume()
    assert policy.client.engine().paused is False
