"""Tinker cookbook: run agents as its rollout strategy, with its sampling client. For tinker-cookbook 0.6.1.

    class Rollouts(AgentRollouts, RolloutStrategy):
        agent = staticmethod(agent)         # async def agent(base_url, api_key, task) -> float | None
        model_dir = "path/to/model"         # tokenizer and chat template of the model that is trained
        max_context = 32768

    Config(..., rollout_error_tolerance=Rollouts())

`task` has the attributes of an environment that `EnvGroupBuilder.make_envs` makes; its class does not matter.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest, TrainingStopped
from tokentape.training._live import Rollout, imported, live_gateway
from tokentape.training._stop_rule import StopRule
from tokentape.training._trainers import temperature
from tokentape.training.exports import agent_lightning_triplets

__all__ = ["AgentRollouts"]


class AgentRollouts:
    """Base class of a strategy, to list before the cookbook's own. Runs an agent for each environment of a group.

    A rollout becomes one trajectory with a transition per turn; where branches part, the cookbook begins a new datum.
    If an agent raises, takes longer than `seconds` or completes no model call, the group is skipped. Sessions are
    recorded in `directory`; without one, they are not kept.
    """

    catches_group_errors = True
    agent: ClassVar[Any]
    """An `Agent` as a static method, or its `package.module.name`. If it returns None, the reward is 0."""
    model_dir: ClassVar[Path | str]
    max_context: ClassVar[int]
    seconds: ClassVar[float | None] = None
    directory: ClassVar[Path | str | None] = None
    stop_rule: ClassVar[StopRule | None] = None
    """Also gets samples from evaluation, because the cookbook does not say which groups are for evaluation."""

    async def execute(self, env_group_builder: Any, policy: Any) -> Any:
        """Run the agents of a group and return a `RolloutResult`."""
        from tinker_cookbook.rl.rollout_strategy import RolloutResult

        gateway = await live_gateway(
            self.model_dir,
            _sample,
            name="tinker",
            sampling=frozenset({"temperature", "stop_token_ids"}),
            max_context=self.max_context,
            # Only temperature 1 is trained, at which all modes are the same.
            logprobs_mode="processed_logprobs",
            directory=self.directory,
        )
        envs = [*await env_group_builder.make_envs()]
        about: dict[str, Any] = {"group": uuid4().hex, "handle": policy, "seconds": self.seconds}
        about |= {"pin": {"temperature": policy.temperature}, "default": {"max_tokens": policy.max_tokens}}
        agent = imported(self.agent, "agent")
        rollouts = await asyncio.gather(*(gateway.run(agent, vars(env), **about) for env in envs))
        trajectories = [_trajectory(rollout) for rollout in rollouts]
        if self.stop_rule is not None:
            try:
                self.stop_rule.add(sample for rollout in rollouts for sample in rollout.samples)
            except TrainingStopped:
                # The cookbook would skip the group and go on.
                self.catches_group_errors = False
                raise
        return RolloutResult(trajectories=trajectories, envs=envs, errors=[])


async def _sample(policy: Any, prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
    from tinker import ModelInput

    stop = list(params.stop_token_ids)
    sampled = await policy(ModelInput.from_ints(prompt_ids), stop, max_tokens=params.max_tokens)
    return SampleDelta(tuple(sampled.tokens), tuple(sampled.logprobs), sampled.stop_reason)


def _trajectory(rollout: Rollout) -> Any:
    """Return a `Trajectory` with the reward at its last transition. Raises the agent's exception."""
    from tinker import ModelInput
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import StopReason, Trajectory, Transition

    if rollout.error is not None:
        raise rollout.error
    if not rollout.samples:
        raise InvalidRequest(f"the agent of session {rollout.session_id!r} completed no model call: it must make one")
    temperature(rollout.samples, "tinker")
    transitions = [
        Transition(
            ob=ModelInput.from_ints(triplet["prompt"]["token_ids"]),
            ac=TokensWithLogprobs(triplet["response"]["token_ids"], triplet["response"]["logprobs"]),
            reward=0.0,
            episode_done=False,
        )
        for sample in rollout.samples
        for triplet in agent_lightning_triplets(sample)
    ]
    cut = any(sample.truncated for sample in rollout.samples)
    stop = StopReason.MAX_TOKENS if cut else StopReason.COMPLETED
    last = transitions[-1]
    last.reward, last.episode_done = rollout.samples[0].reward or 0.0, True
    last.metrics[f"stop/{stop.value}"] = 1.0
    return Trajectory(transitions, ModelInput.from_ints([]), stop_reason=stop)
