"""The choices of one call: sampled side by side, read as they come."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from tokentape.chat.parse import Reply, ReplyDelta, ToolCall
from tokentape.engines.base import Payload, SampleDelta, SamplingParams
from tokentape.errors import EngineUnavailable, TokentapeError
from tokentape.gateway.events import TurnDelta
from tokentape.session.invariants import check_ids
from tokentape.types import FinishReason, TokenIds


class ReplyReader(Protocol):
    """Reads one completion: as chat, or as nothing but text."""

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Take newly sampled ids; return what can be told of the reply already."""
        ...

    def finish(self) -> tuple[ReplyDelta, Reply]:
        """Say that sampling ended; return the rest and the whole reply."""
        ...


class Sampler(Protocol):
    """What is needed of an engine here."""

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """As `Engine.sample`."""
        ...


@dataclass(slots=True)
class Choice:
    """One completion as far as it has come."""

    index: int
    sampling: SamplingParams
    reader: ReplyReader
    weights_now: Callable[[], str | None] = lambda: None
    """The version that samples now, for engines that don't tell."""
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    engine: str | None = None
    """Which of several engines sampled it."""
    weight_version: str = "unknown"
    """Of the first token."""
    weight_changes: list[tuple[int, str]] = field(default_factory=list)
    payloads: tuple[Payload, ...] = ()
    reply: Reply | None = None
    rest: ReplyDelta = field(default_factory=ReplyDelta)
    told_calls: int = 0

    def take(self, delta: SampleDelta) -> TurnDelta:
        """Add newly sampled tokens and say what they told."""
        version = delta.weight_version or self.weights_now()
        if version is not None:
            newest = self.weight_changes[-1][1] if self.weight_changes else self.weight_version
            if not self.ids:
                self.weight_version = version
            elif version != newest and delta.token_ids:
                self.weight_changes.append((len(self.ids), version))
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.top_logprobs += delta.top_logprobs
        self.engine = delta.engine
        self.finish_reason = delta.finish_reason
        self.stop = delta.stop
        self.payloads = delta.payloads
        if delta.weight_spans:
            # What a server says at the end covers all tokens, and corrects what it said in between.
            self.weight_version = delta.weight_spans[0].version
            self.weight_changes = [(span.start, span.version) for span in delta.weight_spans[1:]]
        told = self.reader.feed(delta.token_ids)
        return TurnDelta(self.index, delta, self._named(told) if told.tool_calls else told)

    def end(self) -> None:
        """Read what there is as the whole completion."""
        rest, reply = self.reader.finish()
        self.rest = self._named(rest) if rest.tool_calls else rest
        self.reply = replace(reply, tool_calls=name_calls(reply.tool_calls, self.request_id))

    def _named(self, delta: ReplyDelta) -> ReplyDelta:
        calls = name_calls(delta.tool_calls, self.request_id, self.told_calls)
        self.told_calls += len(calls)
        return replace(delta, tool_calls=calls)


def name_calls(calls: Sequence[ToolCall], request_id: str, start: int = 0) -> tuple[ToolCall, ...]:
    """Calls with an id each: the model's own, else nine letters and digits, which every template takes."""
    named, told = [], start
    for call in calls:
        own = hashlib.sha256(f"{request_id} {told}".encode()).hexdigest()[:9]
        named.append(call if call.id else replace(call, id=own))
        told += call.status != "unclosed"
    return tuple(named)


def sample_choices(
    engine: Sampler, prompt_ids: TokenIds, choices: Sequence[Choice], *, vocab_size: int, stream: bool
) -> AsyncGenerator[TurnDelta, None]:
    """Sample all `choices` from one context; yields deltas as they come. One that fails ends them all.

    Raises `EngineError` and its kinds. Closing the iterator aborts what is still being sampled.
    """
    if len(choices) == 1:
        return _sample(engine, prompt_ids, choices[0], vocab_size, stream)
    return _sample_all(engine, prompt_ids, choices, vocab_size, stream)


async def _sample_all(
    engine: Sampler, prompt_ids: TokenIds, choices: Sequence[Choice], vocab_size: int, stream: bool
) -> AsyncGenerator[TurnDelta, None]:
    events: asyncio.Queue[TurnDelta | None] = asyncio.Queue()

    async def run(choice: Choice) -> None:
        async with aclosing(_sample(engine, prompt_ids, choice, vocab_size, stream)) as deltas:
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


async def _sample(
    engine: Sampler, prompt_ids: TokenIds, choice: Choice, vocab_size: int, stream: bool
) -> AsyncGenerator[TurnDelta, None]:
    sampled = engine.sample(prompt_ids, choice.sampling, stream=stream, request_id=choice.request_id)
    async with aclosing(sampled) as deltas:
        async for delta in deltas:
            check_ids(delta.token_ids, vocab_size)
            yield choice.take(delta)
    if choice.finish_reason is None:
        raise EngineUnavailable("the engine stopped answering before it was finished; send it again")
    if choice.finish_reason == "abort":
        raise EngineUnavailable("the engine aborted this call before it was finished; send it again")
    choice.end()
