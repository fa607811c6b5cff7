"""Capture: a server renders the messages itself, and what it says that it sampled from becomes the context.

Everything else is as it always is: flights, retries, parsing from ids, the invariants, the commit. Only, here the
context is not made by us, so it may not go on where the session's last turn ended. Such a turn is a fork: `drift`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import numpy as np

from tokentape.chat.renderer import PromptTokens, Renderer
from tokentape.engines.base import ChatCall, ChatServer, SampleDelta, SamplingParams
from tokentape.errors import EngineContractError, TokentapeError
from tokentape.gateway.events import TurnRequest
from tokentape.gateway.preparing import Prepared, Preparer
from tokentape.session.tree import NO_IDS, Continuation, Session
from tokentape.types import Provenance, Setup, TokenIds

DRIFT = "drift"
"""Why a turn forks whose context the server made otherwise than the session has it."""


def differs_at(context_ids: TokenIds, prompt_ids: TokenIds) -> int | None:
    """The first token at which `prompt_ids` does not go on from `context_ids`, both int32 [tokens]; None if it does.

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


class Capture:
    """Begins calls at a server that renders."""

    def __init__(self, server: ChatServer, renderer: Renderer, preparer: Preparer) -> None:
        self._server = server
        self._renderer = renderer
        self._preparer = preparer

    async def begin(
        self, held: AsyncExitStack, request: TurnRequest, session: Session, setup: Setup, found: Continuation
    ) -> tuple[Prepared, Begun]:
        """The server's context as a prepared turn, and the call that it has begun, which ends with `held`.

        Raises `InvalidRequest`, `EngineError` and kinds.
        """
        sampling = self._preparer.sampling(request, setup, 0)
        first = replace(sampling, session_id=self._session_id(request))
        begun = Begun(self._server, request)
        prompt_ids = await begun.begin(first)
        held.push_async_callback(begun.aclose)
        prepared = await asyncio.to_thread(self._prepared, request, session, setup, found, prompt_ids)
        return replace(prepared, sampling=sampling), begun

    def _session_id(self, request: TurnRequest) -> str | None:
        return request.session_id if "session_id" in self._server.info.sampling else None

    def _prepared(
        self, request: TurnRequest, session: Session, setup: Setup, found: Continuation, prompt_ids: TokenIds
    ) -> Prepared:
        parent, messages, context = found.parent, found.new_messages, found.context_ids
        fork: str | None = None
        noted: dict[str, object] = {}
        at = differs_at(context, prompt_ids)
        if parent is not None and at is not None:
            fork, noted = DRIFT, {DRIFT: {"turn": parent.seq, "token": at}}
            parent, messages, context = None, request.messages, NO_IDS
        own = self._rendered_here(request, session, setup, None if fork else found)
        ids = prompt_ids[len(context) :]
        if own is not None and np.array_equal(own.ids, ids):
            added = own
        else:
            added = PromptTokens(ids, np.full(len(ids), Provenance.TEMPLATE, np.uint8))
        return Prepared(setup, parent, messages, context, added, prompt_ids, fork, request.sampling, noted)

    def _rendered_here(
        self, request: TurnRequest, session: Session, setup: Setup, found: Continuation | None
    ) -> PromptTokens | None:
        """What we would have added, which tells where each token is from if it is what the server added."""
        try:
            if found is None:
                return self._renderer.render(request.messages, setup)
            prepared = self._preparer.with_context(request, session, setup, found)
        except TokentapeError:
            return None
        return prepared.added if prepared.parent is found.parent else None


class Begun:
    """Calls to a server from one request's messages, the first of them begun already. What `sample_choices` needs."""

    def __init__(self, server: ChatServer, request: TurnRequest) -> None:
        self._server = server
        self._request = request
        self._first: ChatCall | None = None
        self.request_id = secrets.token_hex(12)
        """The first call's."""

    async def begin(self, params: SamplingParams) -> TokenIds:
        """Begin the first call; returns the server's prompt."""
        self._first = await self._ask(params, self.request_id)
        return self._first.prompt_ids

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """The deltas of the call that has begun; of another one, from the same prompt, where that is taken."""
        call, self._first = self._first, None
        if call is None:
            call = await self._ask(params, request_id)
        async with aclosing(call.deltas) as deltas:
            if not np.array_equal(call.prompt_ids, prompt_ids):
                raise EngineContractError("the server rendered the messages of one request in two ways")
            async for delta in deltas:
                yield delta

    async def aclose(self) -> None:
        """Abort what was begun and never read."""
        if self._first is not None:
            await self._first.deltas.aclose()

    async def _ask(self, params: SamplingParams, request_id: str) -> ChatCall:
        request = self._request
        return await self._server.begin(
            request.messages,
            request.tools,
            dict(request.template_kwargs),
            replace(params, payloads_from=None),
            request_id=request_id,
        )
