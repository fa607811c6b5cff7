"""Capture: a server renders the messages itself, and the prompt that it says it sampled from becomes the context.

Everything else is as usual: retries, parsing from ids, the invariants, the commit. But the context is not made here, so
it may not continue the session's last turn. Such a turn is a fork: `drift`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import numpy as np

from tokentape.engines._base import ChatCall, ChatServer, SampleDelta, SamplingParams
from tokentape.errors import EngineContractError
from tokentape.gateway._events import TurnRequest
from tokentape.types import TokenIds

DRIFT = "drift"
"""Fork cause of a turn whose prompt, made by the server, does not continue the session's ids."""


def differs_at(context_ids: TokenIds, prompt_ids: TokenIds) -> int | None:
    """Return the first token at which `prompt_ids` does not continue `context_ids`, int32 [tokens]; None if it does.

    A prompt that ends with the context, or within it, differs at its own end.

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
    """Calls of a server from one request's messages; `begin` begins the first of them. Samples like an `Engine`."""

    def __init__(self, server: ChatServer, request: TurnRequest) -> None:
        self._server = server
        self._request = request
        self._first: ChatCall | None = None
        self.request_id = secrets.token_hex(12)
        """The first call's."""

    async def begin(self, held: AsyncExitStack, sampling: SamplingParams) -> TokenIds:
        """Begin the first call, which ends with `held`, and return the server's prompt, int32 [tokens].

        Raises `InvalidRequest`, `EngineError` and kinds.
        """
        named = self._request.session_id if "session_id" in self._server.info.sampling else None
        self._first = await self._ask(replace(sampling, session_id=named), self.request_id)
        held.push_async_callback(self._abandon)
        return self._first.prompt_ids

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Yield the deltas of the call that has begun, or else of another one from the same prompt."""
        call, self._first = self._first, None
        if call is None:
            call = await self._ask(params, request_id)
        async with aclosing(call.deltas) as deltas:
            if not np.array_equal(call.prompt_ids, prompt_ids):
                raise EngineContractError(
                    "the server rendered the same messages to different ids: does its chat template use the time, "
                    "or do its replicas have different templates?"
                )
            async for delta in deltas:
                yield delta

    async def _abandon(self) -> None:
        if self._first is not None:
            await self._first.deltas.aclose()

    async def _ask(self, params: SamplingParams, request_id: str) -> ChatCall:
        request = self._request
        return await self._server.begin(
            tuple(request.messages),
            request.tools,
            dict(request.template_kwargs),
            replace(params, payloads_from=None, supports=0),
            request_id=request_id,
        )
