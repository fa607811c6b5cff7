"""Run agents as TRL's `rollout_func`, and return the sampled ids.

TRL 1.16 calls a `rollout_func` with the trainer and the prompts of this process; each prompt is repeated once per
generation. The function returns lists of the same length as `prompts`: `prompt_ids`, `completion_ids`, `logprobs`,
`env_mask` (1 for sampled tokens, 0 for other tokens), and further fields for the reward functions.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
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

    In addition to TRL's arguments, reward functions get `reward` (a number or None), `session_id`, `leaf`, `verdict`
    and `branches`, the number of samples of the session.

    A call raises `InvalidRequest` if TRL can't compute the recorded logprobs at its temperature, and if a session has
    several branches and `branches` is `refuse`. It raises `TokentapeError` if an agent fails and `failures` is `raise`.
    """

    client: Client
    agent: Agent
    sync: Callable[[Any], None] | None = None
    """Called with the trainer before each batch, to copy its weights to the engine; see `Policy.sync`."""
    concurrency: int = 32
    """Number of agents that run at once."""
    branches: Literal["refuse", "longest", "last"] = "refuse"
    """What to do with a session of several samples. TRL takes one sequence per rollout, so only one can be trained.
    `refuse`: raise an error; `longest`: train the sample with the most tokens with loss; `last`: train the newest."""
    failures: Literal["raise", "mask"] = "raise"
    """What to do if an agent raised an exception, or if a session has no sampled tokens. `raise`: raise an error;
    `mask`: give the rollout no reward and no loss, so that TRL leaves it out of its group's mean."""
    select: Sequence[Select] = ()
    """Which trajectories of a session to keep, applied before `branches`; see `assemble`."""
    max_length: MaxLength | None = None
    fields: Callable[[Sequence[Sample]], dict[str, Any]] = trl_rollouts
    """Makes TRL's fields from the samples, one per rollout. Replace it only for experiments with other ids."""
    stop_rule: StopRule | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata for all sessions. `step`, `mode` (`train` or `eval`) and `prompt` (its index) are added to it. So is
    `group`, unless you set it: sessions of the same step and prompt have the same group in all processes."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Run an agent for each prompt, and return TRL's fields."""
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
                f"the agents sampled at temperature {sampled_at:g}, but TRL divides logits by {trainer.temperature:g}: "
                "use the same temperature in the agents and in the trainer's config",
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
        chosen = [self._sample_of(rollout) for rollout in rollouts]
        stand_in = next((sample for rollout in rollouts for sample in rollout.samples), None)
        samples = []
        for sample, rollout in zip(chosen, rollouts, strict=True):
            if sample is not None and rollout.error is None:
                samples.append(sample)
                continue
            if self.failures == "raise" or stand_in is None:
                problem = "nothing was sampled" if rollout.error is None else f"its agent raised {rollout.error!r}"
                raise TokentapeError(
                    f"session {rollout.session_id!r} can't be trained, because {problem}. With failures='mask', "
                    "training goes on without such sessions, unless no session of the batch has a sample"
                ) from rollout.error
            # TRL needs a sequence for every rollout. If there is none, use another rollout's sequence without loss.
            source = sample or stand_in
            samples.append(replace(source, loss_mask=np.zeros_like(source.loss_mask), reward=None))
        return samples

    def _sample_of(self, rollout: Rollout) -> Sample | None:
        branches = rollout.samples
        if len(branches) < 2:
            return branches[0] if branches else None
        if self.branches == "refuse":
            raise InvalidRequest(
                f"session {rollout.session_id!r} has {len(branches)} branches, but TRL takes one sequence per rollout: "
                "train only one with branches='longest' or branches='last', leave out retried calls with "
                "select=[DropRetries()], or train all branches with TRL's asynchronous trainer",
                "branches",
            )
        if self.branches == "last":
            return max(branches, key=lambda sample: sample.leaf)
        return max(branches, key=lambda sample: int(sample.loss_mask.sum()))


def _digest(prompt: Any) -> str:
    """Return the digest of a prompt, the same in every process. Values that JSON lacks (images) are pickled."""
    text = json.dumps(prompt, sort_keys=True, default=lambda value: digest_of(pickle.dumps(value)))
    return digest_of(text.encode())


def refuse_temperature(client: Client, temperature: float) -> None:
    """Raise `InvalidRequest` if the trainer's temperature is not 1 and the recorded logprobs don't include it."""
    engine = str(client.engine().engine)
    check = served("trl", mode_of(engine), engine.split()[0])
    if temperature != 1.0 and check.status != "ok":
        raise InvalidRequest(
            f"{check.found}, but the trainer's temperature is {temperature:g}: set temperature=1.0 in the trainer's "
            f"config and in the agent's calls. {check.advice}",
            "temperature",
        )


def recorded_reward(reward: Sequence[float | None], branches: Sequence[int], **rest: Any) -> list[float | None]:
    """Return the rewards that agents returned or set with `session.reward`. Pass it to TRL as a reward function.

    It also logs `rollouts/left_out`, the mean number of branches per rollout that are not trained, and
    `rollouts/without_reward`, the share of rollouts without a reward.
    """
    log = rest["log_metric"]
    log("rollouts/left_out", sum(max(0, number - 1) for number in branches) / len(branches))
    log("rollouts/without_reward", sum(value is None for value in reward) / len(reward))
    return list(reward)


def correct_by_recorded_logprobs(trainer: Any) -> None:
    """Turn on the importance sampling correction of TRL's `GRPOTrainer` for the recorded logprobs.

    TRL accepts logprobs from a `rollout_func`, but its loss uses them only if vLLM samples. Without this call, you do
    not notice if the trainer's policy is not the policy that sampled. With it, the loss weights each token by the
    trainer's probability over the recorded probability. The config's `vllm_importance_sampling_mode` and its bounds
    apply, and TRL logs `sampling/sampling_logp_difference/*` and `sampling/importance_sampling_ratio/*`. The correction
    costs one forward pass per batch. Call this function before `train`. It changes nothing if vLLM samples. Raises
    `InvalidRequest` if the config turns the correction off.
    """
    if not trainer.vllm_importance_sampling_correction:
        raise InvalidRequest("the trainer's config has vllm_importance_sampling_correction=False: remove this setting")
    if trainer.use_vllm:
        return
    trainer.use_vllm = True
    # TRL calls this before a rollout, but `GatewayRollouts.sync` syncs the weights.
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1
