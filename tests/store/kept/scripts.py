"""Engines with scripted completions, in splits unlike any tokenizer, with numbers computed from the ids."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tokentape.chat._renderer import Renderer
from tokentape.engines._base import CAPTURED, EngineInfo, Payload, SampleDelta, SamplingParams, StartedCompletion
from tokentape.errors import EngineUnavailable
from tokentape.types import TokenIds

_SPECIAL = re.compile(r"(<\|\w+\|>|</?think>|</?tool_call>)")


@dataclass(frozen=True)
class Completion:
    """A completion to sample."""

    text: str
    """Special tokens are spelled out; the text between them is cut into odd pieces that are encoded separately."""
    weights: tuple[tuple[int, str], ...] = ()
    """Offsets from which other weights sample."""
    stall_after: int | None = None
    """Wait at this offset until the call is aborted."""
    fail_after: int | None = None
    """Fail at this offset."""


class OddEngine:
    """Answers each call with the next completion of `script`."""

    def __init__(
        self, renderer: Renderer, script: Sequence[Completion | str], *, media: bool = False, version: str | None = "1"
    ) -> None:
        self._tokenizer = renderer.tokenizer
        self.script = [Completion(entry) if isinstance(entry, str) else entry for entry in script]
        self.stalled = threading.Event()
        self.weight_version = version
        self.info = EngineInfo(
            name="odd",
            version="1",
            model="script",
            vocab_size=self._tokenizer.vocab_size,
            max_context=1 << 16,
            logprobs_mode="raw_logprobs",
            sampling=frozenset(field.name for field in fields(SamplingParams)),
            capabilities=("routed_experts",),
            media=frozenset({"image"} if media else ()),
        )

    def odd_ids(self, text: str) -> list[int]:
        """Return ids of `text`, its words cut after one to three characters."""
        ids: list[int] = []
        for n, part in enumerate(_SPECIAL.split(text)):
            if n % 2:
                ids += self._tokenizer.encode_plain(part)
                continue
            at = 0
            while at < len(part):
                width = 1 + (at * 7 + len(part)) % 3 if (at // 9) % 2 else 9
                ids += self._tokenizer.encode_plain(part[at : at + width])
                at += width
        return ids

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str, media: Any = ()
    ) -> AsyncGenerator[SampleDelta, None]:
        completion = self.script.pop(0)
        ids = self.odd_ids(completion.text)
        version = self.weight_version
        for at, token_id in enumerate(ids):
            if at == completion.stall_after:
                self.stalled.set()
                await asyncio.Event().wait()
            if at == completion.fail_after:
                raise EngineUnavailable("the script breaks down here")
            version = dict(completion.weights).get(at, version)
            text = self._tokenizer.decode(ids[: at + 1])
            stop: int | str | None = next(
                (stop_string for stop_string in params.stop_strings if stop_string in text), None
            )
            stop = token_id if token_id in params.stop_token_ids else stop
            ended = stop is not None or at + 1 == params.max_tokens or at == len(ids) - 1
            tops = tuple((token_id + n, self.logprob(token_id, at) - n) for n in range(params.top_logprobs))
            delta = SampleDelta(
                (token_id,),
                (self.logprob(token_id, at),),
                None if not ended else "length" if stop is None else "stop",
                stop,
                (tops,) if tops else (),
                version,
            )
            if ended and params.payloads_from is not None:
                rows = self.experts(np.concatenate([prompt_ids, np.array(ids[:at], np.int32)]))
                payload = Payload("routed_experts", params.payloads_from, rows[params.payloads_from :])
                delta = replace(delta, payloads=(payload,))
            yield delta
            if ended:
                return

    @staticmethod
    def logprob(token_id: int, at: int) -> float:
        """Return a number that changes with any rounding, and sometimes 0."""
        return -((token_id * 7919 + at * 104729) % 9973) / 1997.0 if at % 11 else -0.0

    @staticmethod
    def experts(ids: TokenIds) -> np.ndarray:
        """Return rows [tokens, 2 layers, 2 experts] that depend on all ids so far."""
        sums = np.cumsum(ids.astype(np.int64))
        return (
            np.stack([sums % 64, sums % 61, sums % 59, np.arange(len(ids)) % 53], 1).astype(np.int32).reshape(-1, 2, 2)
        )

    async def check(self) -> None:
        """Always ready."""

    async def close(self) -> None:
        """Has no resources to release."""


class RenderingEngine(OddEngine):
    """A chat server that rerenders all messages, with a different first id from call `drifts_at` on."""

    def __init__(self, renderer: Renderer, script: Sequence[Completion | str], drifts_at: int) -> None:
        super().__init__(renderer, script)
        self._renderer = renderer
        self._calls = 0
        self._drifts_at = drifts_at

    async def begin(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any],
        template_kwargs: dict[str, Any],
        params: SamplingParams,
        *,
        request_id: str,
    ) -> StartedCompletion:
        ids = render(self._renderer, messages)
        if self._calls >= self._drifts_at:
            ids = np.concatenate([np.array([5], np.int32), ids])
        self._calls += 1
        return StartedCompletion(ids, self._named(ids, params, request_id))

    async def _named(self, ids: TokenIds, params: SamplingParams, request_id: str) -> AsyncGenerator[SampleDelta, None]:
        async with aclosing(self.sample(ids, params, stream=True, request_id=request_id)) as deltas:
            async for delta in deltas:
                yield replace(delta, engine=f"{self.info} {CAPTURED}")


def render(renderer: Renderer, messages: Sequence[Any]) -> TokenIds:
    """Return ids of messages without tools, by the renderer of commit d0a8210, which took a whole setup."""
    from tokentape._session.chain import setup_digest
    from tokentape.types import Setup

    setup_fields = ((), {}, "2026-01-01", renderer.fingerprint)
    return renderer.render(messages, Setup(*setup_fields, setup_digest(*setup_fields))).ids
