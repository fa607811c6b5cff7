"""TRL's `rollout_func`: agents in place of `generate`, and the ids that were sampled in place of their text.

The contract, as TRL 1.16 has it: the function gets the prompts of this process, each as often as completions of it are
wanted, and the trainer. It returns lists as long as `prompts`: `prompt_ids`, `completion_ids`, `logprobs`, an
`env_mask` that is 1 where the model sampled, and whatever else the reward functions are to see.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tokentape._canonical import digest_of
from tokentape.client import Client
from tokentape.engines._distributions import mode_of
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.training._live import Rollout
from tokentape.training._samples import MaxLength, Sample, Select
from tokentape.training._stop_rule import StopRule
from tokentape.training._trainers import served, temperature
from tokentape.training.exports import trl_rollouts
from tokentape.training.trl._agents import Agent, row_of, run_agent


@dataclass(frozen=True, slots=True)
class GatewayRollouts:
    """A `rollout_func` for TRL's `GRPOTrainer` that runs agents through a gateway.

    >>> rollouts = GatewayRollouts(policy.client, agent, sync=policy.sync)          # doctest: +SKIP
    >>> GRPOTrainer(model, recorded_reward, rollout_func=rollouts, ...)             # doctest: +SKIP

    The reward functions get `reward` (a number or None), `session_id`, `leaf`, `verdict` and `branches` besides TRL's
    own arguments. Calling it raises `InvalidRequest` for a temperature at which TRL's logprobs can't be the recorded
    ones, and for several branches where they are refused; `TokentapeError` for an agent that failed.
    """

    client: Client
    agent: Agent
    sync: Callable[[Any], None] | None = None
    """Called with the trainer before each batch: gives the engine the weights that it is to sample with."""
    concurrency: int = 32
    """Agents that run at once."""
    branches: Literal["refuse", "longest", "last"] = "refuse"
    """How to treat a session with several samples: TRL takes one sequence per rollout, so all others would not be
    trained. `longest`: the one with the most tokens that carry loss; `last`: the newest."""
    failures: Literal["raise", "mask"] = "raise"
    """How to treat an agent that raised, and a session in which nothing was sampled. `mask`: no reward, no loss;
    TRL leaves it out of its group's mean."""
    select: Sequence[Select] = ()
    """Which trajectories of a session stay, before `branches` is asked; see `tokentape.training._samples`."""
    max_length: MaxLength | None = None
    fields: Callable[[Sequence[Sample]], dict[str, Any]] = trl_rollouts
    """Makes TRL's fields of the samples, one per rollout. Another one is for experiments with other ids."""
    stop_rule: StopRule | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of all sessions. Each also has its `step`, `mode` and `prompt`, and unless you set one its `group`: the sessions
    of a step with the same prompt, in whichever process they ran."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Run an agent per prompt and return TRL's fields."""
        refuse_temperature(self.client, trainer.temperature)
        if self.sync is not None:
            self.sync(trainer)
        mode = "train" if trainer.model.training else "eval"
        generations = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        shared = {**self.metadata, "step": trainer.state.global_step, "mode": mode}

        def run(number: int) -> Rollout:
            group = f"{trainer.state.global_step}-{_digest(prompts[number])[:8]}"
            metadata = {"group": group, **shared, "prompt": number // generations}
            row = row_of(prompts[number])
            return run_agent(self.client, self.agent, row, metadata, select=self.select, max_length=self.max_length)

        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="tokentape-agent") as pool:
            rollouts = list(pool.map(run, range(len(prompts))))
        samples = self._sample_per_rollout(rollouts)
        if self.stop_rule is not None and mode == "train":
            self.stop_rule.add(samples)
        sampled_at = temperature(samples, "trl")
        if sampled_at != trainer.temperature and any(sample.loss_mask.any() for sample in samples):
            raise InvalidRequest(
                f"agents sampled at temperature {sampled_at:g}, TRL divides logits by {trainer.temperature:g}: "
                "have both the same",
                "temperature",
            )
        return {
            **self.fields(samples),
            "reward": [sample.reward for sample in samples],
            "session_id": [rollout.session_id for rollout in rollouts],
            "leaf": [sample.leaf for sample in samples],
            "verdict": [sample.verdict for sample in samples],
            "branches": [len(rollout.samples) for rollout in rollouts],
        }

    def _sample_per_rollout(self, rollouts: Sequence[Rollout]) -> list[Sample]:
        whole = [self._sample_of(rollout) for rollout in rollouts]
        stand_in = next((sample for rollout in rollouts for sample in rollout.samples), None)
        samples = []
        for sample, rollout in zip(whole, rollouts, strict=True):
            if sample is not None and rollout.error is None:
                samples.append(sample)
                continue
            if self.failures == "raise" or stand_in is None:
                what = "nothing was sampled" if rollout.error is None else f"its agent raised {rollout.error!r}"
                raise TokentapeError(
                    f"session {rollout.session_id!r} can't be trained: {what}; failures='mask' goes on without such "
                    "sessions, if others of the batch have something"
                ) from rollout.error
            # TRL wants a sequence. Where there is none, another one's stands in; no token of it carries loss.
            source = sample or stand_in
            samples.append(replace(source, loss_mask=np.zeros_like(source.loss_mask), reward=None))
        return samples

    def _sample_of(self, rollout: Rollout) -> Sample | None:
        branches = rollout.samples
        if len(branches) < 2:
            return branches[0] if branches else None
        if self.branches == "refuse":
            raise InvalidRequest(
                f"session {rollout.session_id!r} has {len(branches)} branches, and TRL takes one sequence per rollout: "
                "train the longest or the last with branches='longest' or 'last', leave retries out with "
                "select=[DropRetries()], or train all of them with TRL's asynchronous trainer",
                "branches",
            )
        if self.branches == "last":
            return max(branches, key=lambda sample: sample.leaf)
        return max(branches, key=lambda sample: int(sample.loss_mask.sum()))


def _digest(prompt: Any) -> str:
    """Return the digest of a prompt. It is the same in every process, also for what JSON can't hold, such as images."""
    text = json.dumps(prompt, sort_keys=True, default=lambda value: digest_of(pickle.dumps(value)))
    return digest_of(text.encode())


def refuse_temperature(client: Client, temperature: float) -> None:
    """Raise `InvalidRequest` if TRL divides logits by a temperature that the recorded logprobs know nothing of."""
    engine = str(client.engine().engine)
    check = served("trl", mode_of(engine), engine.split()[0])
    if temperature != 1.0 and check.status != "ok":
        raise InvalidRequest(
            f"{check.found}, and the trainer's is {temperature:g}: set temperature=1.0 in its config and sample with "
            f"it. {check.advice}",
            "temperature",
        )


def recorded_reward(reward: Sequence[float | None], branches: Sequence[int], **rest: Any) -> list[float | None]:
    """Return what agents returned or gave to their sessions: a reward function for TRL.

    It also logs `rollouts/left_out`, branches per rollout that are not trained, and `rollouts/without_reward`.
    """
    log = rest["log_metric"]
    log("rollouts/left_out", sum(max(0, number - 1) for number in branches) / len(branches))
    log("rollouts/without_reward", sum(value is None for value in reward) / len(reward))
    return list(reward)


def correct_by_recorded_logprobs(trainer: Any) -> None:
    """Have TRL's `GRPOTrainer` weigh tokens by its own probability over the recorded one, as it does with vLLM's.

    TRL takes the logprobs of a `rollout_func`, but its loss looks at them only where vLLM samples: without this call a
    policy that is not the one that sampled goes unnoticed. With it, `vllm_importance_sampling_mode` and its bounds in
    the config apply, and `sampling/sampling_logp_difference/*` and `sampling/importance_sampling_ratio/*` are logged.
    It costs a forward pass per batch. Call it before `train`. Where vLLM samples it changes nothing.

    Raises `InvalidRequest` if the config turns the correction off.
    """
    if not trainer.vllm_importance_sampling_correction:
        raise InvalidRequest("the trainer's config has vllm_importance_sampling_correction=False; leave that out")
    if trainer.use_vllm:
        return
    trainer.use_vllm = True
    trainer.vllm_generation = _SyncedElsewhere()
    trainer._last_loaded_step = -1


class _SyncedElsewhere:
    """What TRL calls before a rollout where vLLM samples; here `GatewayRollouts.sync` has the weights in place."""

    def sync_weights(self) -> None:
        pass
