"""Capture: the inference server renders the messages, and the prompt ids that it reports become the turn's context.

Retries, parsing from ids, invariants and commits work as in other turns. If the prompt that the server rendered does
not continue the session's ids, the turn is recorded as a fork (a new branch) with the cause `drift`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import numpy as np

from tokentape.engines._base import ChatServer, SampleDelta, SamplingParams, StartedCompletion
from tokentape.errors import EngineContractError
from tokentape.gateway._events import TurnRequest
from tokentape.types import TokenIds

DRIFT = "drift"
"""Fork cause of a turn with a server-rendered prompt that does not continue the session's ids."""


def differs_at(context_ids: TokenIds, prompt_ids: TokenIds) -> int | None:
    """Return the index of the first token where `prompt_ids` differs from `context_ids`, both int32 [tokens].

    Return None if the prompt extends the context. A prompt that equals the context or is a prefix of it differs at the
    prompt's end.

    >>> differs_at(np.array([1, 2, 3]), np.array([1, 9, 3, 4]))
    1
    >>> differs_at(np.array([1, 2, 3]), np.array([1, 2, 3, 4]))
    """
    begins = prompt_ids[: len(context_ids)]
    different = np.flatnonzero(begins != context_ids[: len(begins)])
    if different.size:
        return int(different[0])
    return len(prompt_ids) if len(prompt_ids) <= len(context_ids) else None


class ServerRenderedCall:
    """Calls to a server that renders a request's messages itself. Call `begin` first, then `sample`."""

    def __init__(self, server: ChatServer, request: TurnRequest) -> None:
        self._server = server
        self._request = request
        self._first: StartedCompletion | None = None
        self.request_id = secrets.token_hex(12)
        """Request id of the first call."""

    async def begin(self, stack: AsyncExitStack, sampling: SamplingParams) -> TokenIds:
        """Begin the first call and return the server's prompt, int32 [tokens]. Closing `stack` aborts an unused call.

        Raises `InvalidRequest`, `EngineError` and their subclasses.
        """
        self._first = await self._ask(sampling, self.request_id)
        stack.push_async_callback(self._abandon)
        return self._first.prompt_ids

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Yield the deltas of the call that `begin` started, or of a new call if that one is already used."""
        call, self._first = self._first, None
        if call is None:
            call = await self._ask(params, request_id)
        async with aclosing(call.deltas) as deltas:
            if not np.array_equal(call.prompt_ids, prompt_ids):
                raise EngineContractError(
                    "the server rendered the same messages to different ids: check that its chat template does not use "
                    "the time, and that all replicas have the same template"
                )
            async for delta in deltas:
                yield delta

    async def _abandon(self) -> None:
        if self._first is not None:
            await self._first.deltas.aclose()

    async def _ask(self, params: SamplingParams, request_id: str) -> StartedCompletion:
        request = self._request
        return await self._server.begin(
            tuple(request.messages),
            request.tools,
            dict(request.template_kwargs),
            replace(params, payloads_from=None, supports=0),
            request_id=request_id,
        )
