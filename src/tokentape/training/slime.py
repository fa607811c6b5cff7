"""slime and Miles: run agents in place of `generate`, on the servers of the rollout's router.

Written for slime 624b824a8 and Miles 31f1ca961. In a module of your own:

    generate = generating(agent)        # async def agent(base_url, api_key, task) -> float | None

Then pass `--custom-generate-function-path my_module.generate`. `task` has the fields of the sample; the agent returns
the reward, or None to have the trainer's reward model compute it from the response.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokentape._hub import find_model
from tokentape.chat._tokenizer_files import read_json
from tokentape.engines._base import SampleDelta, SamplingParams, WeightSpan
from tokentape.errors import EngineUnavailable, InvalidRequest
from tokentape.training._live import Agent, Rollout, imported, live_gateway, sampling_fields, version_between
from tokentape.training._stop_rule import StopRule
from tokentape.training.exports import slime_sample

_log = logging.getLogger("tokentape.training")

__all__ = ["generating", "normalized_rewards"]

_SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "stop_strings"}
)


def generating(
    agent: Agent | str,
    *,
    seconds: float | None = None,
    directory: Path | str | None = None,
    stop_rule: StopRule | None = None,
) -> Callable[..., Awaitable[Any]]:
    """Return a function for the trainers' `--custom-generate-function-path` that runs the agent.

    The function makes a `Sample` for each branch of the agent's session.

    If the agent raised, took longer than `seconds`, completed no model call or was aborted, its rollout becomes one
    sample without loss, with status `aborted` and `remove_sample`, as in slime's own coding agent. Sessions are kept
    in `directory`; without one they are deleted once they are read. `stop_rule` gets the samples to train.
    """
    run_agent = imported(agent, "agent")

    async def run(args: Any, sample: Any, sampling_params: Any, evaluation: bool, state: Any = None) -> list[Any]:
        _refuse(args, sample, sampling_params)
        model_dir, server = find_model(Path(args.hf_checkpoint), weights=False), _Router(args, sample, state)
        gateway = await live_gateway(
            model_dir,
            _Router.sample,
            name=f"{server.package}:sglang",
            sampling=_SAMPLING,
            max_context=_max_context(args, model_dir),
            logprobs_mode="scaled_logprobs",
            directory=directory,
        )
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
        rollout = await gateway.run(
            run_agent,
            {name: value for name, value in vars(sample).items() if name != "tokens"},
            group=str(sample.group_index),
            handle=server,
            attempt=sample.index,
            metadata={"evaluation": evaluation},
            pin={name: sampling_params[name] for name in names if sampling_params.get(name) is not None},
            default={"max_tokens": sampling_params["max_new_tokens"]},
            seconds=seconds,
            stop_rule=None if evaluation else stop_rule,
        )
        if rollout.error is not None or not rollout.samples:
            return [_without_loss(sample, rollout)]
        # Greedy sampling has no logprobs, and a rollout that is evaluated counts once.
        counted = rollout.samples[:1] if evaluation else rollout.samples
        decode, about = gateway.renderer.tokenizer.decode, (sample.index, sample.group_index)
        return [_filled(sample, slime_sample(branch, *about, decode, logprobs=not evaluation)) for branch in counted]

    async def generate(*call_args: Any, evaluation: bool = False) -> Any:
        """Accept slime's arguments (args, sample, sampling parameters), or Miles' `GenerateFnInput`."""
        if len(call_args) == 3:
            return await run(*call_args, evaluation)
        (whole,) = call_args
        samples = await run(whole.args, whole.sample, whole.sampling_params, whole.evaluation, whole.state)
        return sys.modules[type(whole).__module__].GenerateFnOutput(samples=samples)

    return generate


def normalized_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the raw and the normalized reward of each sample.

    Rewards are normalized as in slime, but each rollout counts once, even if it has several samples. Pass this function
    to slime's `--custom-reward-post-process-path`. If rollouts have several samples, slime's default treats the whole
    batch as one group. Samples with `remove_sample` get 0 and do not count in their group. In Miles' default, they
    count with a reward of 0.

    Raises `InvalidRequest` for rewards that are not finite, and if samples of one rollout have different rewards.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    centered = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    if args.advantage_estimator not in centered or not args.rewards_normalization:
        return raw, raw
    groups: dict[Any, dict[Any, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        if not sample.remove_sample:
            if not np.isfinite(reward):
                raise InvalidRequest(f"the reward of rollout {_rollout_of(sample)} is {reward}: set a finite number")
            counted = groups.setdefault(sample.group_index, {}).setdefault(_rollout_of(sample), reward)
            if counted != reward:
                raise InvalidRequest(
                    f"samples of rollout {_rollout_of(sample)} have rewards {counted:g} and {reward:g}: set one for all"
                )
    scaled = args.grpo_std_normalization and args.advantage_estimator != "reinforce_plus_plus_baseline"
    out = []
    for sample, reward in zip(samples, raw, strict=True):
        counted_once = [*groups.get(sample.group_index, {}).values()]
        if sample.remove_sample:
            out.append(0.0)
            continue
        spread = float(np.std(counted_once, ddof=1)) if len(counted_once) > 1 else 0.0
        out.append((reward - float(np.mean(counted_once))) / (spread + 1e-6 if scaled else 1.0))
    return raw, out


def _rollout_of(sample: Any) -> Any:
    return sample.index if sample.rollout_id is None else sample.rollout_id


class _Router:
    """Calls a rollout's servers as the trainer's own `generate` does."""

    def __init__(self, args: Any, sample: Any, state: Any) -> None:
        self._args, self._state = args, state
        self.package = type(sample).__module__.split(".")[0]
        self._post = importlib.import_module(f"{self.package}.utils.http_utils").post
        self._url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

    async def sample(self, prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        if self._ended():
            raise _aborted()
        policy = getattr(self._args, "router_policy", None) or getattr(self._args, "sglang_router_policy", None)
        routed = policy == "consistent_hashing" and params.session_id is not None
        sampling = sampling_fields(params, _SAMPLING) | {
            "max_new_tokens": params.max_tokens,
            "stop": list(params.stop_strings) or None,
            "stop_token_ids": [*params.stop_token_ids, *(getattr(self._args, "rollout_stop_token_ids", None) or ())],
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        output = await self._post(
            self._url,
            {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True},
            headers={"X-SMG-Routing-Key": params.session_id} if routed else None,
        )
        about = output["meta_info"]
        end = about["finish_reason"]
        # Otherwise it was aborted for new weights, and the gateway samples the rest of the completion with them.
        if end["type"] == "abort" and (end.get("status_code") or self._ended()):
            raise _aborted()
        sampled, version = about.get("output_token_logprobs") or (), about.get("weight_version")
        return SampleDelta(
            tuple(token_id for _, token_id, *_ in sampled),
            tuple(logprob for logprob, *_ in sampled),
            end["type"],
            stop=end.get("matched"),
            weight_version=version_between(version, version),
            weight_spans=tuple(WeightSpan(**span) for span in about.get("weight_versions") or ()),
        )

    def _ended(self) -> bool:
        """Return whether the trainer has all samples that it needs and aborts the remaining calls."""
        if self._state is None:
            module = sys.modules.get(f"{self.package}.rollout.sglang_rollout")
            self._state = module and module.GenerateState(self._args)
        return self._state is not None and bool(self._state.aborted)


def _max_context(args: Any, model_dir: Path) -> int:
    config = read_json(model_dir / "config.json")
    room = config.get("text_config", config).get("max_position_embeddings")
    room = getattr(args, "rollout_max_context_len", None) or room
    if room is None:
        raise InvalidRequest("the model's config.json has no max_position_embeddings; set --rollout-max-context-len")
    return int(room)


def _aborted() -> EngineUnavailable:
    error = EngineUnavailable("the trainer aborted the calls in flight; this rollout is over")
    error.retry = False
    return error


def _refuse(args: Any, sample: Any, sampling_params: dict[str, Any]) -> None:
    """Raise `InvalidRequest` for settings and samples that would be trained wrongly."""
    if getattr(args, "partial_rollout", False):
        raise InvalidRequest("an agent can't resume a partial rollout: remove --partial-rollout")
    if sampling_params.get("custom_params"):
        raise InvalidRequest("for top-p below 1, slime needs data that sessions don't have: use --rollout-top-p 1.0")
    if any(value is not None for value in (sample.multimodal_inputs or {}).values()):
        raise InvalidRequest("samples with images can't be exported: leave them out of the dataset")
    if getattr(args, "lora_rank", 0) or getattr(args, "lora_adapter_path", None) or getattr(sample, "adapter", None):
        raise InvalidRequest("agents sample with the base model, not with an adapter: train without LoRA")


def _filled(base: Any, fields: dict[str, Any]) -> Any:
    sample = copy.deepcopy(base)
    if _rollout_of(base) is not None:
        fields["rollout_id"] = _rollout_of(base)
    fields["metadata"] = {**(base.metadata or {}), **fields["metadata"]}
    fields["status"] = type(base).Status(fields["status"])
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def _without_loss(base: Any, rollout: Rollout) -> Any:
    """Return a sample of two ids, because the trainers accept no sample without a response."""
    why = "the agent completed no model call" if rollout.error is None else f"the agent raised {rollout.error!r}"
    if isinstance(rollout.error, asyncio.TimeoutError):
        why = "the agent took too long"
    _log.warning("a rollout of group %s is not trained: %s", base.group_index, why)
    fields = {
        "tokens": [0, 0],
        "response": "",
        "response_length": 1,
        "loss_mask": [0],
        "rollout_log_probs": [0.0],
        "reward": 0.0,
        "remove_sample": True,
        "status": "aborted",
        "metadata": {"session_id": rollout.session_id, "abort_reason": why},
    }
    return _filled(base, fields)
