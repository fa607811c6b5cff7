"""Use OpenEnv environments as agents in any adapter, and run agents in TRL's `HarnessRolloutWorker`.

Written for OpenEnv 0.10.0 and TRL 1.16.0. To make an agent from an environment's session factory:

    agent = HarnessAgent(factory, MCPHarnessAdapter())

TRL's worker runs agents in a process that it spawns. So pass a module-level function, or its name:

    HarnessRolloutWorker(harness_session_factory=GatewaySessions("http://127.0.0.1:8800", "my_module.agent"), ...)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx2

from tokentape.client import Client
from tokentape.training._live import Agent, Rollout, Task, imported
from tokentape.training.exports import agent_lightning_triplets
from tokentape.training.trl._agents import reply_of, row_of, run_agent

__all__ = ["GatewaySessions", "HarnessAgent"]


@dataclass(frozen=True, slots=True)
class HarnessAgent:
    """An agent that runs an OpenEnv white-box harness in an environment session."""

    factory: Any
    """A `ResourceSessionFactory`. Its `create` is called with the task."""
    adapter: Any
    """A `HarnessAdapter` with `run_white_box`, for example `MCPHarnessAdapter`."""
    limits: Any = None
    """`HarnessRunLimits`. Its `sampling` fields are sent with each chat completion."""

    async def __call__(self, base_url: str, api_key: str, task: Task) -> float | None:
        """Run the harness, and return the environment's reward, or None if there is no reward."""
        return await asyncio.to_thread(self._run, base_url, api_key, task)

    def _run(self, base_url: str, api_key: str, task: Task) -> float | None:
        session = self.factory.create(task)
        try:
            headers = {"authorization": f"Bearer {api_key}"}
            with httpx2.Client(headers=headers, timeout=600.0) as http:
                step = partial(_step, http, f"{base_url}/chat/completions")
                episode = self.adapter.run_white_box(step, session, self.limits)
            reward = session.verify(episode.messages).env_reward
        finally:
            session.close()
        return None if reward is None else float(reward)


def _step(http: httpx2.Client, url: str, messages: list[Any], tools: list[Any], sampling: Mapping[str, Any]) -> Any:
    """Sample a turn, as OpenEnv's `ModelStep`."""
    from openenv.core.harness import ModelStepResult
    from openenv.core.llm_client import LLMResponse, ToolCall

    specs = [{"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in tools]
    body = {"model": "policy", "messages": messages, **sampling}
    body |= {"tools": [{"type": "function", "function": spec} for spec in specs]} if specs else {}
    reply = reply_of(http.post(url, json=body))
    calls = [
        ToolCall(call["id"], call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in reply.get("tool_calls") or ()
    ]
    response = LLMResponse(reply.get("content") or "", calls)
    # The next call then sends back the gateway's message unchanged.
    response.to_message_dict = lambda: reply
    return ModelStepResult(response)


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments. As in TRL, there are none if the model did not write a JSON object."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


@dataclass(frozen=True, slots=True)
class GatewaySessions:
    """A `harness_session_factory` for TRL's `HarnessRolloutWorker` that runs an agent in each session of a gateway.

    The worker's sampling parameters are pinned. `task` is the dataset row if you made the dataset with
    `trl.carry_rows`; otherwise it only has `prompt`. If an agent raises an exception, its rollout is not scored. If it
    raises `TimeoutError`, TRL trains on what was sampled before.
    """

    gateway: str
    """The gateway's URL, as TRL's worker process reaches it."""
    agent: Agent | str
    """An agent, or its name as `package.module.name`. The agent returns the reward."""
    api_key: str | None = None
    pin: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *, sampling: Mapping[str, Any]) -> GatewaySessions:
        """Return a copy that pins these sampling parameters."""
        return replace(self, pin={**self.pin, **sampling})

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> _AgentSession:
        """Make a session. The seed becomes its group, because the worker passes one seed to all sessions of a group."""
        return _AgentSession(self, row_of(task), {"group": str(seed), "attempt": episode_id})


class _AgentSession:
    """A `TrainableSession`."""

    def __init__(self, sessions: GatewaySessions, row: Task, metadata: Mapping[str, Any]) -> None:
        self._agent: Agent = imported(sessions.agent, "agent")
        self._client = Client(sessions.gateway, api_key=sessions.api_key, timeout=600.0)
        self._row, self._metadata, self._pin = row, metadata, sessions.pin
        self._rollout: Rollout | None = None

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Run the agent, and raise the exception that it raised, if any."""
        self._rollout = run_agent(
            self._client,
            lambda session, row: self._agent(session.base_url, session.api_key, row),
            self._row,
            self._metadata,
            pin=self._pin,
        )
        if self._rollout.error is not None:
            raise self._rollout.error
        return 0

    def fetch_training_trace(self) -> Any:
        """Return each trained turn once, with its full context as the prompt."""
        from openenv.core.harness import TrainingTrace

        triplets = [triplet for sample in self._samples() for triplet in agent_lightning_triplets(sample)]
        entries = [
            {
                "prompt_token_ids": triplet["prompt"]["token_ids"],
                "completion_token_ids": triplet["response"]["token_ids"],
                "per_token_logps": triplet["response"]["logprobs"],
                "loss_mask": [0] * len(triplet["prompt"]["token_ids"]) + [1] * len(triplet["response"]["token_ids"]),
                "metadata": {**triplet["metadata"], "node_id": str(triplet["metadata"]["turn"])},
            }
            for triplet in triplets
        ]
        return TrainingTrace.from_entries(entries)

    def verify(self, transcript: Any, final_state: Any = None) -> Any:
        """Return the session's reward."""
        from openenv.core.harness import VerifyResult

        rewards = [sample.reward for sample in self._samples()]
        return VerifyResult(env_reward=rewards[0] if rewards else None, done=True)

    def close(self) -> None:
        """Close the client. A call in flight fails."""
        self._client.close()

    def _samples(self) -> Any:
        return () if self._rollout is None else self._rollout.samples
