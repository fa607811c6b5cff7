"""Agent Lightning 1.0: run agents in the processes that its controller starts, with token ids through its proxy.

    class Rollout(AgentRollout):
        agent = staticmethod(agent)         # async def agent(base_url, api_key, task) -> float | None
        model_dir = "path/to/model"         # tokenizer and chat template of the model that is trained
        max_context = 32768

Name the class in `local.agent_class`, or call `asyncio.run(Rollout().run())` in the container. `task` has the process's
environment variables, including those of `env_map`. Agent Lightning's proxy records each call, and its trainer reads
the ids from these records.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar

import httpx2

from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import EngineContractError, EngineError, EngineUnavailable, InvalidRequest
from tokentape.training._live import imported, live_gateway, vllm_fields

__all__ = ["AgentRollout"]

_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids"})


class AgentRollout:
    """Base class of an agent's class. Runs the agent for this process's rollout, and reports its reward."""

    agent: ClassVar[Any]
    """An `Agent` as a static method, or its `package.module.name`. If it returns None, no reward is reported."""
    model_dir: ClassVar[Path | str]
    max_context: ClassVar[int]
    temperature: ClassVar[float] = 1.0
    """Set it to the temperature in `default_proxy.train`: the proxy samples with that, whatever a call asks for."""
    seconds: ClassVar[float | None] = None
    directory: ClassVar[Path | str | None] = None

    async def run(self) -> None:
        """Run the agent. Raises the agent's exception, and the controller then marks the rollout as failed."""
        url = os.environ["AGL_OPENAI_BASE_URL"]
        match = re.search(r"/rollout/([^/]+)/attempt/([^/]+)/", url)
        if match is None:
            raise InvalidRequest(f"AGL_OPENAI_BASE_URL is {url!r}; expected a rollout and an attempt in its path")
        headers = {"authorization": f"Bearer {os.environ.get('AGL_KEY', '')}"}
        async with httpx2.AsyncClient(headers=headers, timeout=600.0) as client:
            gateway = await live_gateway(
                self.model_dir,
                _sample,
                name="agent-lightning:vllm",
                sampling=_SAMPLING,
                max_context=self.max_context,
                logprobs_mode="processed_logprobs",
                directory=self.directory,
            )
            rollout = await gateway.run(
                imported(self.agent, "agent"),
                os.environ,
                group=match[1],
                handle=(client, url),
                attempt=match[2],
                pin={"temperature": self.temperature},
                seconds=self.seconds,
            )
            if rollout.error is not None:
                raise rollout.error
            if rollout.samples and rollout.samples[0].reward is not None:
                event = {"event_type": "reward", "data": {"value": rollout.samples[0].reward, "source": "agent"}}
                (await client.post(os.environ["AGL_EVENT_URL"], json=event)).raise_for_status()


async def _sample(proxy: tuple[httpx2.AsyncClient, str], prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
    """Sample through the proxy, which adds the model, its temperature and `return_token_ids`."""
    client, url = proxy
    body = {"prompt": prompt_ids, **vllm_fields(params, _SAMPLING)}
    try:
        answer = (await client.post(f"{url}/completions", json=body)).raise_for_status()
    except httpx2.HTTPError as error:
        status = error.response.status_code if isinstance(error, httpx2.HTTPStatusError) else 503
        # The proxy answers 429 while it is paused for new weights.
        kind = EngineUnavailable if status == 429 or status >= 500 else EngineError
        raise kind(f"Agent Lightning's proxy did not answer the call: {error!r}") from error
    (choice,) = answer.json()["choices"]
    if choice["prompt_token_ids"] != prompt_ids:
        raise EngineContractError("the server's prompt_token_ids differ from the requested prompt")
    return SampleDelta(
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        choice["finish_reason"],
        stop=choice["stop_reason"],
    )
