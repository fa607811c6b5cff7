"""Training steps of trainers' own code on a CPU, on recorded sessions of the tiny model that they train.

The engine samples with that model and records each call. These records alone are the reference: the gradient of the
policy loss over the calls, with the advantages of their sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training import live
from tests.training.interpreters import answered
from tokentape.demo import MODEL
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._kv import cache_name
from tokentape.testing._rows import Row
from tokentape.training import exports
from tokentape.training._collate import group_advantages
from tokentape.training._live import live_gateway
from tokentape.training._samples import Sample

pytestmark = pytest.mark.differential

END, PAD = 3993, 3991


@cache
def policy() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@dataclass
class PolicyLedger(live.Ledger):
    """Samples with the model, and aborts the second call. The gateway samples the rest later."""

    draws: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(11))

    @torch.no_grad()
    def sample(self, prompt: Any, max_tokens: int, session: str) -> live.Call:
        before = self.calls[-1] if self.calls else None
        resumed = before is not None and before.finish == "abort"
        abort = 4 if len(self.calls) == 1 and not resumed else max_tokens
        ids: list[int] = []
        logprobs: list[float] = []
        cache, unread, named = None, list(prompt), cache_name(policy())
        while len(ids) < min(abort, max_tokens) and ids[-1:] != [END]:
            made = policy()(input_ids=torch.tensor([unread]), use_cache=True, **{named: cache})
            cache, logits = made[named], made.logits[0, -1]
            ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=self.draws)))
            logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
            unread = ids[-1:]
        finish: Any = "stop" if ids[-1] == END else "length" if len(ids) == max_tokens else "abort"
        call = live.Call(session, list(prompt), ids, logprobs, finish, str(self.version))
        if resumed:
            assert before is not None
            assert call.prompt == before.prompt + before.ids
            self.calls.pop()
            whole = {"prompt": before.prompt, "ids": before.ids + ids, "logprobs": before.logprobs + logprobs}
            self.calls.append(replace(call, **whole))
        else:
            self.calls.append(call)
        self.version += self.changes_weights(prompt)
        return call


@dataclass(frozen=True)
class Recorded:
    """The engine's calls, and the samples recorded from them."""

    calls: list[live.Call]
    rewards: dict[str, float]
    samples: list[Sample]


@pytest.fixture(scope="module")
def recorded() -> Iterator[Recorded]:
    ledger = PolicyLedger()
    live.LEDGER.append(ledger)

    async def sample(_: None, prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        call = ledger.sample(prompt_ids, params.max_tokens, str(params.session_id))
        return SampleDelta(tuple(call.ids), tuple(call.logprobs), call.finish, weight_version=call.version)

    async def run() -> Recorded:
        names = frozenset({"stop_token_ids"})
        about: Any = {"name": "ledger", "sampling": names, "logprobs_mode": "processed_logprobs"}
        gateway = await live_gateway(MODEL, sample, max_context=500, **about)
        made = [await gateway.run(live.agent, {"number": n}, group="g", handle=None) for n in range(5)]
        assert [rollout.error for rollout in made] == [None] * 5
        rewards = dict(zip((rollout.session_id for rollout in made), live.REWARDS, strict=True))
        return Recorded(ledger.calls, rewards, [sample for rollout in made for sample in rollout.samples])

    yield asyncio.run(run())
    live.LEDGER.clear()


def verl(samples: list[Sample]) -> Any:
    return exports.verl_data_proto(samples, pad_id=PAD, vocab_size=4000)


def prime_rl(samples: list[Sample]) -> Any:
    return [exports.prime_rl_training_sample(sample, "e") for sample in group_advantages(samples)]


def moved(sample: Sample, name: str) -> Sample:
    """Plant an error: shift all values one token later."""
    values = getattr(sample, name)
    return replace(sample, **{name: np.concatenate([values[:1], values[:-1]])})


EXPORTS: dict[str, Callable[[list[Sample]], Any]] = {"verl": verl, "prime_rl": prime_rl}
SPREAD = {"verl": 1, "prime_rl": 0}
"""The degrees of freedom that each trainer subtracts in the standard deviation of rewards."""


@dataclass(frozen=True)
class Ran:
    """A trainer's result for a batch."""

    rows: list[dict[str, Any]]
    losses: list[float]
    gradient: dict[str, Any]


@pytest.fixture(scope="module", params=list(EXPORTS))
def ran(request: Any, recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Ran]]:
    trainer, folder = request.param, tmp_path_factory.mktemp("gradients")
    export = EXPORTS[trainer]
    batches = {"exported": export(recorded.samples)}
    batches |= {
        name: export([moved(sample, name) for sample in recorded.samples]) for name in ("loss_mask", "logprobs")
    }
    asked = {"model": str(MODEL), "gradients": str(folder), "batches": batches}
    made = answered(trainer, "trainer_steps", asked)
    return trainer, {
        name: Ran(run["rows"], run["losses"], dict(np.load(folder / f"{name}.npz"))) for name, run in made.items()
    }


def reference(recorded: Recorded, less: int) -> dict[str, Any]:
    """The gradient of the mean over sampled tokens of minus advantage times log-probability, call by call."""
    rewards = np.array([*recorded.rewards.values()])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=less) + 1e-6)
    of_session = dict(zip(recorded.rewards, advantages.tolist(), strict=True))
    tokens = sum(len(call.ids) for call in recorded.calls)
    model = policy()
    model.zero_grad()
    for call in recorded.calls:
        logits = model(input_ids=torch.tensor([call.prompt + call.ids])).logits[0, len(call.prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(call.ids)[:, None])
        (-of_session[call.session] * logprobs.sum() / tokens).backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def faults(recorded: Recorded, trainer: str, made: Ran) -> set[str]:
    """Return the errors in the inputs of a loss, its first ratio, and the gradient of the first step."""
    rows = [Row(**{name: value for name, value in row.items() if name != "new"}) for row in made.rows]
    golden = live.golden_of(recorded.calls, recorded.rewards)
    errors = set(live.findings_of(golden, rows))
    apart = [
        abs(new - old)
        for row in made.rows
        for weight, new, old in zip(row["weights"], row["new"], row["logprobs"], strict=True)
        if weight
    ]
    if max(apart) > 1e-4:
        errors.add("the first ratio is not 1")
    for name, expected in reference(recorded, SPREAD[trainer]).items():
        if np.abs(made.gradient[name] - expected).max() > 1e-3 * np.abs(expected).max():
            errors.add("another gradient")
    return errors


def test_the_session_was_aborted_and_resumed_forked_truncated_and_of_two_versions(recorded: Recorded) -> None:
    assert len(recorded.samples) == 6
    assert {version for sample in recorded.samples for _, _, version in sample.weight_spans} == {"7", "8"}
    assert sum("length" in sample.finish_reasons[:-1] for sample in recorded.samples) == 1
    assert sum(int(sample.loss_mask.sum()) for sample in recorded.samples) == sum(
        len(call.ids) for call in recorded.calls
    )


def test_a_training_step_is_over_each_sampled_token_once(ran: tuple[str, dict[str, Ran]], recorded: Recorded) -> None:
    trainer, made = ran
    assert faults(recorded, trainer, made["exported"]) == set()


def test_the_loss_falls(ran: tuple[str, dict[str, Ran]]) -> None:
    losses = ran[1]["exported"].losses
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1e-3


@pytest.mark.parametrize(("planted", "noticed"), [("loss_mask", "another gradient"), ("logprobs", "not 1")])
def test_planted_errors_are_noticed(
    ran: tuple[str, dict[str, Ran]], recorded: Recorded, planted: str, noticed: str
) -> None:
    trainer, made = ran
    errors = faults(recorded, trainer, made[planted])
    assert any(noticed in error for error in errors)
    # The kit sees it in the rows too.
    assert any(noticed not in error for error in errors)
