"""verl: run agents as agent loops, on the servers that verl samples with. Written for verl 0.9.1.

In the file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names:

    - name: tokentape
      _target_: tokentape.training.verl.AgentLoop
      agent: my_package.my_module.agent

and in that module, write `async def agent(base_url, api_key, task) -> float | None`; `task` is a row of the dataset. It
returns the reward, or None to have verl's reward function compute it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokentape.engines._base import UNKNOWN_MODE, SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest
from tokentape.training._live import Agent, imported, live_gateway, sampling_fields, version_between
from tokentape.training._stop_rule import StopRule
from tokentape.training.exports import verl_agent_loop_output
from tokentape.types import FinishReason

__all__ = ["AgentLoop"]

_SAMPLING = frozenset({"temperature", "top_p", "top_k", "repetition_penalty", "stop_token_ids"})


class AgentLoop:
    """The agent loop that verl creates per rollout. It skips `AgentLoopBase`'s constructor, which loads a tokenizer.

    If an agent raises, or takes longer than `seconds`, its rollout fails, and verl drops the prompt's whole group.
    Sessions are recorded in `directory`; without one, they are not kept. `stop_rule` may be `package.module.name`:
    verl creates a loop per rollout, and all loops in a process share the rule.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        *,
        agent: Agent | str,
        seconds: float | None = None,
        directory: Path | str | None = None,
        stop_rule: StopRule | str | None = None,
        **_: Any,
    ) -> None:
        self._config = trainer_config.config
        self._rollout = self._config.actor_rollout_ref.rollout
        self._servers = server_manager
        self._model_dir = tokenizer.name_or_path
        self._agent = imported(agent, "agent")
        self._seconds = seconds
        self._directory = directory
        self._stop_rule = imported(stop_rule, "stop_rule")
        if self._config.actor_rollout_ref.model.get("custom_chat_template") is not None:
            raise InvalidRequest("model.custom_chat_template is not used: save that template in the model's folder")

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Run the agent and return an `AgentLoopOutput` per branch of its session; for the old trainer, only one."""
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        config = self._rollout
        room = config.prompt_length + config.response_length
        modes = {"vllm": config.get("logprobs_mode"), "sglang": "scaled_logprobs"}
        gateway = await live_gateway(
            self._model_dir,
            AgentLoop._sample,
            name=f"verl:{config.name}",
            sampling=_SAMPLING,
            # SGLang's server reserves one token.
            max_context=min(room, config.get("max_model_len") or room) - (config.name == "sglang"),
            logprobs_mode=modes.get(config.name) or UNKNOWN_MODE,
            directory=self._directory,
        )
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        # verl doesn't tell the loop whether it validates or samples a baseline. It does both with different sampling
        # settings, trains on neither, and could not compute their logprobs.
        trained = all(sampling_params.get(name) == config.get(name) for name in names[:3])
        rollout = await gateway.run(
            self._agent,
            row,
            group=str(row.get("uid", row.get("index"))),
            handle=self,
            attempt=row.get("session_id"),
            metadata={"step": row.get("global_steps")},
            pin={name: sampling_params[name] for name in names if name in sampling_params},
            seconds=self._seconds,
            stop_rule=self._stop_rule if trained else None,
        )
        if rollout.error is not None:
            raise rollout.error
        scored = bool(sampling_params.get("logprobs")) and trained
        limits = {"prompt_length": config.prompt_length, "response_length": config.response_length}
        fields = [verl_agent_loop_output(sample, **limits, logprobs=scored) for sample in rollout.samples]
        outputs = [AgentLoopOutput(**output) for output in fields]
        if self._config.trainer.get("use_v1", True):
            return outputs
        if len(outputs) != 1:
            raise InvalidRequest(
                f"session {rollout.session_id!r} has {len(outputs)} branches, and verl's old trainer accepts only one: "
                "set trainer.use_v1=true"
            )
        return outputs[0]

    async def _sample(self, prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        output = await self._servers.generate(
            # Turns with the same id go to the same server, which has their prefix cached.
            request_id=str(params.session_id),
            prompt_ids=prompt_ids,
            sampling_params=sampling_fields(params, _SAMPLING) | {"max_tokens": params.max_tokens, "logprobs": True},
        )
        ids = tuple(output.token_ids)
        return SampleDelta(
            ids,
            tuple(output.log_probs or ()),
            _end(output.stop_reason, ids, params),
            weight_version=version_between(*map(output.extra_fields.get, ("min_global_steps", "max_global_steps"))),
        )


def _end(stop_reason: str | None, ids: tuple[int, ...], params: SamplingParams) -> FinishReason:
    """Return how a completion ended: verl's vLLM server reports `completed` for both stop and length."""
    match stop_reason:
        case "abort" | "aborted":
            return "abort"
        case "stop" | "length":
            return stop_reason
    return "stop" if (ids and ids[-1] in params.stop_token_ids) or len(ids) < params.max_tokens else "length"
