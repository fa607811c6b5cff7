"""Run TRL environments as agents through a gateway.

TRL's trainer renders, generates and parses an environment's turns by itself. If the same environment class runs as an
agent, the gateway records the exact ids, with any engine.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tokentape.client import ClientSession
from tokentape.errors import InvalidRequest
from tokentape.training.trl._agents import Row, awaited, messages_of, reply_of

_NOT_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True, slots=True)
class EnvironmentAgent:
    """An agent that runs a TRL environment, optionally with functions as further tools.

    An environment has a method `reset(**row)`; the text that it returns, if any, is appended to the last message. An
    optional `get_reward()` returns the reward. All other public methods are tools. Methods and tools can be coroutine
    functions. As in TRL, `transformers.utils.get_json_schema` makes tool schemas from signatures and docstrings.

    >>> GatewayRollouts(policy.client, EnvironmentAgent(ShopEnvironment), sync=policy.sync)     # doctest: +SKIP

    A call raises `InvalidRequest` if the environment has no `reset`, or if the row names an unknown environment.
    """

    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]]
    """Makes an environment (TRL's `environment_factory`). In a mapping, the row's column `environment` is the key."""
    tools: Sequence[Callable[..., Any]] = ()
    max_calls: int = 16
    """Maximum number of model calls per session."""
    request: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    """Fields of each chat completions request, such as `temperature` and `max_tokens`."""

    async def __call__(self, session: ClientSession, row: Row) -> float | None:
        """Run the model and its tool calls until a reply has none. Return the environment's reward, or None."""
        environment, row = self._environment(row)
        observation = await awaited(environment.reset(**row))
        messages = _with_observation(row.get("prompt", ""), observation)
        tools = {tool.__name__: tool for tool in [*self.tools, *_methods(environment)]}
        request = {**self.request, "model": "policy", **({"tools": _schemas(tools)} if tools else {})}
        headers = {"authorization": f"Bearer {session.api_key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=600.0) as http:
            for _ in range(self.max_calls):
                body = {**request, "messages": messages}
                reply = reply_of(await http.post(f"{session.base_url}/chat/completions", json=body))
                messages.append(reply)
                calls = reply.get("tool_calls") or []
                if not calls:
                    break
                messages += [await _called(tools, call) for call in calls]
        if not hasattr(environment, "get_reward"):
            return None
        return float(await awaited(environment.get_reward()))

    def _environment(self, row: Row) -> tuple[Any, dict[str, Any]]:
        rest = dict(row)
        factory = self.factory
        if isinstance(factory, Mapping):
            name = rest.pop("environment", None)
            if name not in factory:
                raise InvalidRequest(
                    f"unknown environment {name!r}; choose from {', '.join(sorted(factory))}", "environment"
                )
            factory = factory[name]
        environment = factory()
        if not hasattr(environment, "reset"):
            raise InvalidRequest(
                f"{type(environment).__name__} has no method `reset`, which TRL environments must have"
            )
        return environment, rest


def _methods(environment: Any) -> list[Callable[..., Any]]:
    # Inspect the class, because inspecting the instance would run its properties.
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _NOT_TOOLS and not name.startswith("_")]


def _schemas(tools: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    from transformers.utils import get_json_schema

    return [get_json_schema(tool) for tool in tools.values()]


def _with_observation(prompt: Any, observation: Any) -> list[dict[str, Any]]:
    messages = messages_of(prompt)
    if observation is None:
        return messages
    content = messages[-1]["content"]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    messages[-1]["content"] = content + observation
    return messages


async def _called(tools: Mapping[str, Callable[..., Any]], call: Mapping[str, Any]) -> dict[str, Any]:
    """Call a tool. Return a message with the result, or with the exception in TRL's format."""
    name = call["function"]["name"]
    try:
        if name not in tools:
            raise LookupError(f"unknown tool {name}")
        tool, arguments = tools[name], json.loads(call["function"]["arguments"])
        if inspect.iscoroutinefunction(tool):
            result = await tool(**arguments)
        else:
            result = await asyncio.to_thread(tool, **arguments)
    except Exception as error:
        result = {"error": str(error)}
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": str(result)}
