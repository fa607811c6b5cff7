"""Sample the choices of one call concurrently, and parse them as they arrive. The server may render the prompt."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from tokentape.chat._parse import Reply, ReplyDelta, ReplyParser, ToolCall
from tokentape.engines._base import ChatServer, Payload, SampleDelta, SamplingParams, StartedCompletion, common_prefix
from tokentape.errors import EngineContractError, TokentapeError
from tokentape.gateway._events import TurnDelta, TurnRequest
from tokentape.types import FinishReason, TokenIds

Sample: TypeAlias = Callable[..., AsyncGenerator[SampleDelta, None]]
"""`Engine.sample` or a function with the same signature."""


@dataclass(slots=True)
class Choice:
    index: int
    sampling: SamplingParams
    reader: ReplyParser
    sample_ids: Sample
    prompt_ids: TokenIds
    """The context, int32 [tokens]."""
    stream: bool = False
    """Whether the engine should stream tokens."""
    captured: bool = False
    """Whether the server renders, so that it can't continue a completion; the call has already passed the gate."""
    weights_now: Callable[[], str | None] = lambda: None
    """Returns the current weight version, for engines that don't report it."""
    call_prefix: str = ""
    """Prefix of the ids that the gateway assigns to tool calls."""
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    """The ids that truncation kept, one entry per id; empty until the engine reports some."""
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    engines: list[str | None] = field(default_factory=lambda: [None])
    """The engine that served each engine call of this completion; None unless there are several engines."""
    resumes: list[tuple[int, str]] = field(default_factory=list)
    """For each resume after an abort, the number of tokens before it and the abort's cause."""
    part: int = 0
    """Number of tokens before the newest engine call."""
    lost: bool = False
    """Whether the newest engine call was cancelled before any of its tokens arrived."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Facts about the sampling, recorded with the sampling parameters."""
    weight_version: str = "unknown"
    """Weight version of the first token; `weight_changes` has the later versions."""
    weight_changes: list[tuple[int, str]] = field(default_factory=list)
    names_weights: bool = False
    """Whether the newest engine call has reported a weight version."""
    payloads: tuple[Payload, ...] = ()
    cached_tokens: int | None = None
    """Number of prompt tokens that the engine had cached, if it reports it."""
    reply: Reply | None = None
    rest: ReplyDelta = field(default_factory=ReplyDelta)
    named_calls: int = 0

    def append(self, delta: SampleDelta) -> TurnDelta:
        """Append newly sampled tokens. Return them with the parsed text and calls that they add to the reply."""
        version = delta.weight_version or self.weights_now()
        if version is not None and delta.token_ids:
            self._weights(len(self.ids), version)
        self.names_weights |= bool(delta.weight_version or delta.weight_spans)
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.top_logprobs += delta.top_logprobs
        if delta.supports or self.supports:
            without = len(self.ids) - len(self.supports) - len(delta.supports)
            self.supports += [b""] * without + [*delta.supports]
        self.engines[-1] = delta.engine or self.engines[-1]
        self.finish_reason = delta.finish_reason
        self.stop = delta.stop
        if delta.payloads:
            self.payloads = _joined(self.payloads, delta.payloads)
        if not self.part:
            # Only from the first engine call, because the prompts of later calls contain sampled tokens.
            self.cached_tokens = delta.cached_tokens
        if delta.weight_spans:
            # Spans come at the end of a call, cover all of its tokens and replace earlier reports.
            self.set_weights(*((span.start, span.version) for span in delta.weight_spans))
        parsed = self.reader.feed(delta.token_ids)
        return TurnDelta(self.index, delta, self._named(parsed) if parsed.tool_calls else parsed)

    def set_weights(self, *changes: tuple[int, str]) -> None:
        """Replace the weight versions of the newest engine call: the offset in it of each version's first token."""
        self.weight_changes = [change for change in self.weight_changes if change[0] < self.part]
        for start, version in changes:
            self._weights(self.part + start, version)

    def _weights(self, start: int, version: str) -> None:
        """Record that `version` sampled the tokens from `start` on."""
        newest = self.weight_changes[-1][1] if self.weight_changes else self.weight_version
        if not start:
            self.weight_version = version
        elif version != newest:
            self.weight_changes.append((start, version))

    def payloads_due(self) -> int | None:
        """Return the first index in prompt + completion without payloads; None if payloads were not requested."""
        due = self.sampling.payloads_from
        if due is None:
            return None
        return min([payload.start + len(payload.rows) for payload in self.payloads], default=due)

    def go_on(self, cause: str | None) -> None:
        """Prepare for another engine call, which samples the rest.

        `cause` is why the last call was aborted; None if that call sampled nothing, which is not recorded.
        """
        if cause is not None:
            self.resumes.append((len(self.ids), cause))
            self.engines.append(None)
        self.part, self.finish_reason, self.stop, self.lost = len(self.ids), None, None, False
        self.names_weights = False

    def end(self) -> None:
        """End the completion after the current tokens, and parse the reply."""
        rest, reply = self.reader.finish()
        self.rest = self._named(rest) if rest.tool_calls else rest
        if reply.tool_calls:
            reply = replace(reply, tool_calls=name_calls(reply.tool_calls, self.request_id, 0, self.call_prefix))
        self.reply = reply

    def _named(self, delta: ReplyDelta) -> ReplyDelta:
        calls = name_calls(delta.tool_calls, self.request_id, self.named_calls, self.call_prefix)
        self.named_calls += len(calls)
        return ReplyDelta(delta.content, delta.reasoning, calls)


def _joined(payloads: tuple[Payload, ...], later: tuple[Payload, ...]) -> tuple[Payload, ...]:
    """Append the payload rows of a later engine call to the earlier rows, by name."""
    before = {payload.name: payload for payload in payloads}
    joined = []
    for payload in later:
        first = before.get(payload.name)
        joined.append(payload if first is None else replace(first, rows=np.concatenate([first.rows, payload.rows])))
    return tuple(joined)


def name_calls(calls: Sequence[ToolCall], request_id: str, start: int = 0, prefix: str = "") -> tuple[ToolCall, ...]:
    """Assign ids to tool calls without an id from the model: `prefix` and nine hex digits, which all templates accept.

    The id depends only on `request_id` and the call's number, counted from `start`. For `prefix` see
    `PromptBuilder.call_prefix`.
    """
    calls_with_ids, number = [], start
    for call in calls:
        if not call.id:
            digits = hashlib.sha256(f"{request_id} {number}".encode()).hexdigest()[:9]
            call = ToolCall(call.name, call.arguments, call.status, call.span, prefix + digits)
        calls_with_ids.append(call)
        number += call.status != "unclosed"
    return tuple(calls_with_ids)


async def sample_together(
    choices: Sequence[Choice], sample: Callable[[Choice], AsyncGenerator[TurnDelta, None]]
) -> AsyncGenerator[TurnDelta, None]:
    """Sample all `choices` concurrently with `sample`. Yield their deltas as they arrive.

    If a choice fails, the others are aborted and its error is raised. Closing the iterator aborts all choices.
    """
    events: asyncio.Queue[TurnDelta | None] = asyncio.Queue()

    async def run(choice: Choice) -> None:
        async with aclosing(sample(choice)) as deltas:
            async for delta in deltas:
                events.put_nowait(delta)

    async def run_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(run(choice))
        except* TokentapeError as errors:
            raise errors.exceptions[0] from None
        finally:
            events.put_nowait(None)

    running = asyncio.create_task(run_all())
    try:
        while (event := await events.get()) is not None:
            yield event
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])


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
    common = common_prefix(context_ids, prompt_ids)
    return None if common == len(context_ids) < len(prompt_ids) else common


class ServerRenderedCall:
    """Capture: the server renders a request's messages, and the prompt ids that it reports become the turn's context.

    Retries, parsing from ids, invariants and commits work as in other turns. If the prompt does not continue the
    session's ids, the turn is recorded as a fork (a new branch) with the cause `drift`. Call `begin`, then `sample`.
    """

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
