"""SkyRL: run agents as its generator, on its inference engines. Written for SkyRL a9564572.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return AgentGenerator(agent, cfg.generator, inference_engine_client, tokenizer, max_seq_len=32768)

with `async def agent(base_url, api_key, task) -> float`. `task` has `prompt`, `env_class` and `env_extras`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._replies import finish_reason_of
from tokentape.errors import InvalidRequest
from tokentape.training._live import Agent, LiveGateway, Rollout, imported, live_gateway, version_between, vllm_fields
from tokentape.training._stop_rule import StopRule
from tokentape.training.exports import skyrl_generator_output

__all__ = ["AgentGenerator"]

_log = logging.getLogger("tokentape.training")

_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "stop_token_ids"})


class AgentGenerator:
    """A `GeneratorInterface` that runs agents. It does not derive from a SkyRL class.

    If one rollout's agent raises, takes longer than `seconds`, completes no model call or returns no reward, no rollout
    of that prompt is trained, as in SkyRL's own Harbor generator. Sessions are kept only if `directory` is set.
    """

    def __init__(
        self,
        agent: Agent | str,
        generator_cfg: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        *,
        max_seq_len: int,
        seconds: float | None = None,
        directory: Path | str | None = None,
        stop_rule: StopRule | None = None,
    ) -> None:
        self._agent = imported(agent, "agent")
        self._config = generator_cfg
        self._client = inference_engine_client
        self._model_dir = tokenizer.name_or_path
        self._max_seq_len = max_seq_len
        self._seconds = seconds
        self._directory = directory
        self._stop_rule = stop_rule

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """Run an agent for each prompt, and return a `GeneratorOutput` in the order of the prompts."""
        engine = self._config.inference_engine.engine_init_kwargs or {}
        gateway = await live_gateway(
            self._model_dir,
            AgentGenerator._sample,
            name="skyrl:vllm",
            sampling=_SAMPLING,
            max_context=self._max_seq_len,
            # vLLM's own default.
            logprobs_mode=engine.get("logprobs_mode", "raw_logprobs"),
            directory=self._directory,
        )
        names = input_batch["trajectory_ids"]
        if names is None:
            raise InvalidRequest("the batch has no trajectory_ids, which are needed to group the rollouts of a prompt")
        rollouts = await asyncio.gather(*(self._run(gateway, input_batch, n) for n in range(len(names))))
        by_name = list(zip(names, rollouts, strict=True))
        failed = {name.instance_id for name, rollout in by_name if not rollout.samples or rollout.error}
        about = input_batch.get("batch_metadata")
        scored = about is None or about.training_phase == "train"
        if scored and self._stop_rule is not None:
            succeeded = [rollout for name, rollout in by_name if name.instance_id not in failed]
            self._stop_rule.add(sample for rollout in succeeded for sample in rollout.samples)
        parts = [
            _without_loss() if name.instance_id in failed else self._made(rollout, scored=scored)
            for name, rollout in by_name
        ]

        def joined(key: str) -> list[Any]:
            return [value for part in parts for value in part[key]]

        several = bool(self._config.step_wise_trajectories)
        steps = [name for name, part in zip(names, parts, strict=True) for _ in part["response_ids"]]
        return {
            **{key: joined(key) for key in ("prompt_token_ids", "response_ids", "rewards", "loss_masks")},
            "rollout_logprobs": joined("rollout_logprobs") if scored else None,
            "stop_reasons": joined("stop_reasons"),
            "is_last_step": joined("is_last_step") if several else None,
            "trajectory_ids": steps if several else None,
            "rollout_metrics": {
                "generate/num_error_trajectories": sum(rollout.error is not None for rollout in rollouts),
                "generate/num_masked_instances": len(failed),
            },
            "trajectory_generation_times": None,
            "rollout_expert_indices": None,
        }

    async def _run(self, gateway: LiveGateway, batch: Mapping[str, Any], n: int) -> Rollout:
        name, default = batch["trajectory_ids"][n], self._config.sampling_params
        pinned = ("temperature", "top_p", "top_k", "min_p")
        sampling = batch.get("sampling_params") or {key: getattr(default, key) for key in pinned}
        task = {"prompt": batch["prompts"][n], "env_class": batch["env_classes"][n]}
        about = batch.get("batch_metadata")
        rollout = await gateway.run(
            self._agent,
            task | {"env_extras": (batch.get("env_extras") or {n: None})[n]},
            group=name.instance_id,
            handle=self,
            attempt=name.repetition_id,
            metadata=None if about is None else {"step": about.global_step, "phase": about.training_phase},
            pin={key: sampling[key] for key in pinned if sampling.get(key) is not None},
            default={"max_tokens": sampling.get("max_tokens") or default.max_generate_length},
            seconds=self._seconds,
        )
        if rollout.error is None and any(sample.reward is None for sample in rollout.samples):
            rollout = replace(
                rollout, error=InvalidRequest(f"session {rollout.session_id!r} has no reward: the agent must return it")
            )
        if rollout.error is not None:
            _log.warning("the agent of %s failed; its prompt is not trained", name.instance_id, exc_info=rollout.error)
        return rollout

    def _made(self, rollout: Rollout, *, scored: bool) -> dict[str, Any]:
        if len(rollout.samples) > 1 and not self._config.step_wise_trajectories:
            raise InvalidRequest(
                f"session {rollout.session_id!r} has {len(rollout.samples)} branches: set "
                "generator.step_wise_trajectories=true"
            )
        return skyrl_generator_output(rollout.samples, logprobs=scored)

    async def _sample(self, prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        before = getattr(self._client, "weight_version", None)
        request = {"prompt_token_ids": [prompt_ids], "session_ids": [params.session_id]}
        request["sampling_params"] = vllm_fields(params, _SAMPLING)
        output = await self._client.generate(request)
        (ids,), (reason,) = output["response_ids"], output["stop_reasons"]
        (logprobs,) = output["response_logprobs"] or [None]
        version = version_between(before, getattr(self._client, "weight_version", None))
        return SampleDelta(tuple(ids), tuple(logprobs or ()), finish_reason_of(reason), weight_version=version)


def _without_loss() -> dict[str, Sequence[Any]]:
    """Return one step of two ids without loss, as SkyRL's Harbor generator does."""
    return {
        "prompt_token_ids": [[0]],
        "response_ids": [[0]],
        "rewards": [0.0],
        "loss_masks": [[0]],
        "rollout_logprobs": [[0.0]],
        "stop_reasons": ["error"],
        "is_last_step": [True],
    }
