"""Run an agent through a gateway for a row of the dataset, and make samples from its session."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx2

from tokentape.client import Client, ClientSession
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.training._live import Rollout
from tokentape.training._samples import MaxLength, Select, assemble

if TYPE_CHECKING:
    from datasets import Dataset

Row: TypeAlias = Mapping[str, Any]
"""A row of the dataset: `prompt` and other columns."""

Agent: TypeAlias = Callable[[ClientSession, Row], float | Awaitable[float | None] | None]
"""A function `agent(session, row)` that does one task and returns the reward. It calls the model with an OpenAI client
for `session.base_url` and `session.api_key`. It may also return None and call `session.reward`, or leave the reward to
the trainer. A coroutine function runs in its own event loop, so it must create its async clients itself."""

_ROW = "tokentape_row"


def carry_rows(dataset: Dataset, columns: Sequence[str] | None = None) -> Dataset:
    """Write each row of the dataset into its own prompt, because TRL passes only prompts to a rollout function.

    The row is stored as JSON in the prompt's first message, under a key that chat templates don't read. `columns` are
    the columns to store, by default all. A prompt that is a string becomes a user message; a row without a prompt gets
    an empty user message.

    Raises `InvalidRequest` if a value can't be written as JSON.
    """
    names = [name for name in dataset.column_names if name != "prompt"] if columns is None else list(columns)

    def carried(row: dict[str, Any]) -> dict[str, Any]:
        messages = messages_of(row.get("prompt", ""))
        try:
            messages[0][_ROW] = json.dumps({name: row[name] for name in names})
        except TypeError as error:
            raise InvalidRequest(
                f"a row can't be written as JSON: {error}. Pass `columns` without that column", "columns"
            ) from None
        return {"prompt": messages}

    return dataset.map(carried)


def row_of(prompt: Any) -> dict[str, Any]:
    """Return the row that `carry_rows` wrote into a prompt. It always has `prompt`."""
    if isinstance(prompt, str) or not prompt:
        return {"prompt": prompt}
    messages = [{key: value for key, value in message.items() if key != _ROW} for message in prompt]
    return {**json.loads(prompt[0].get(_ROW) or "{}"), "prompt": messages}


def run_agent(
    client: Client,
    agent: Agent,
    row: Row,
    metadata: Mapping[str, Any],
    *,
    select: Sequence[Select] = (),
    max_length: MaxLength | None = None,
    group: str | None = None,
    pin: Mapping[str, Any] | None = None,
) -> Rollout:
    """Run an agent in a new session, and return its samples and the exception that it raised, if any."""
    session = client.session(metadata=metadata, pin=pin)
    error: Exception | None = None
    try:
        result = agent(session, row)
        reward = asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
        if reward is not None:
            session.reward(float(reward))
    except Exception as raised:
        error = raised
    assembled = assemble(session.trajectories(), select=select, max_length=max_length, group=group)
    return Rollout(session.session_id, tuple(assembled.samples), error)


def reply_of(answer: httpx2.Response) -> dict[str, Any]:
    """Return the message of a chat completion. Raises `TokentapeError` if the gateway refused the call."""
    if answer.is_error:
        raise TokentapeError(f"the gateway refused a call, status {answer.status_code}: {answer.text}")
    reply: dict[str, Any] = answer.json()["choices"][0]["message"]
    return reply


async def awaited(value: Any) -> Any:
    """Return `value`, or its result if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """Return a prompt of a dataset as messages. A string becomes a user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
