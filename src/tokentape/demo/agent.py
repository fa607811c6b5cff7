"""A tool-using agent for the OpenAI API. It does not depend on Tokentape."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Task, call_tool

MAX_CALLS = 8
"""Largest number of model calls per question. A model that still calls tools then will not finish."""

MAX_TOKENS = 160
"""Sampled tokens per model call, several times as many as the longest correct reply needs."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of an agent, and its result."""

    messages: Sequence[Mapping[str, Any]]
    model_calls: int
    final_text: str
    """The reply to the last question; empty if the model gave none."""


async def solve(client: AsyncOpenAI, task: Task, *, temperature: float, seed: int, stream: bool) -> Conversation:
    """Ask the questions of `task` in order, and run the tools that the model calls."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
    model_calls = 0
    text = ""
    for prompt in task.prompts:
        messages.append({"role": "user", "content": prompt})
        text = ""
        for _ in range(MAX_CALLS):
            reply = await _complete(client, messages, temperature, seed + model_calls, stream)
            model_calls += 1
            messages.append(reply)
            calls = reply.get("tool_calls")
            if not calls:
                text = reply.get("content") or ""
                break
            for call in calls:
                result = call_tool(task, call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return Conversation(messages, model_calls, text)


async def _complete(
    client: AsyncOpenAI, messages: Sequence[Mapping[str, Any]], temperature: float, seed: int, stream: bool
) -> dict[str, Any]:
    sampling = {"temperature": temperature, "seed": seed, "max_tokens": MAX_TOKENS}
    request: dict[str, Any] = {"model": "demo", "messages": messages, "tools": TOOLS, **sampling}
    if stream:
        return await _assembled(await client.chat.completions.create(stream=True, **request))
    reply = await client.chat.completions.create(**request)
    message: dict[str, Any] = reply.choices[0].message.model_dump(exclude_none=True)
    return message


async def _assembled(chunks: AsyncIterable[ChatCompletionChunk]) -> dict[str, Any]:
    """Return the message that a stream's deltas add up to."""
    text = ""
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                begun = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part.index, begun)
                call["id"] += part.id or ""
                if part.function is not None:
                    call["function"]["name"] += part.function.name or ""
                    call["function"]["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    return {**message, "tool_calls": [calls[index] for index in sorted(calls)]} if calls else message
