"""A tool-calling agent that uses the OpenAI client and does not depend on Tokentape."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Task, call_tool

MAX_CALLS = 8
"""Maximum number of model calls per question. A model that needs more will probably never answer."""

MAX_TOKENS = 160
"""Maximum number of sampled tokens per model call. The longest correct reply needs far fewer."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of an agent's conversation, and the result."""

    messages: Sequence[Mapping[str, Any]]
    model_calls: int
    final_text: str
    """The reply to the last question; empty if the model gave none."""


async def solve(client: AsyncOpenAI, task: Task, *, temperature: float, seed: int, stream: bool) -> Conversation:
    """Send the questions of `task` to the model in order, and run the tools that it calls."""
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
    text = ""
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part.index, empty)
                call["id"] += part.id or ""
                if part.function is not None:
                    call["function"]["name"] += part.function.name or ""
                    call["function"]["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    return {**message, "tool_calls": [calls[index] for index in sorted(calls)]} if calls else message
