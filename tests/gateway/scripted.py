"""An engine that samples scripted replies token by token, and fails or stalls where a test wants."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import fields

from tokentape.chat._renderer import Renderer
from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams
from tokentape.gateway._events import TurnEvent, TurnRequest
from tokentape.gateway._turns import Turns
from tokentape.types import TokenIds

_CONTROL_TOKENS = re.compile(r"(?:<\|?[\w/]+\|?>\s*)*")


async def run_turn(turns: Turns, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
    """Yield the events of a call; closing the iterator leaves the call."""
    async with aclosing(await turns.begin(request)) as events:
        async for event in events:
            yield event


class ScriptedEngine:
    """Answers each call with the next of `replies`, text in which control tokens are spelled out.

    `fail_after` raises `error` after that many tokens of a reply, `stall_after` waits there until the call is aborted,
    `pause_after` until `go_on` is set.
    `sampling` are the parameters that it claims to honour: all but the penalties if not given.
    """

    EVERYTHING = frozenset(field.name for field in fields(SamplingParams))

    def __init__(
        self,
        renderer: Renderer,
        replies: Sequence[str],
        *,
        fail_after: int | None = None,
        error: Exception | None = None,
        stall_after: int | None = None,
        pause_after: int | None = None,
        weight_version: str | None = "7",
        sampling: frozenset[str] = frozenset({"temperature", "top_p", "top_k", "seed", "stop_token_ids"}),
    ) -> None:
        self._tokenizer = renderer.tokenizer
        self.replies = list(replies)
        self.fail_after = fail_after
        self.error = error
        self.stall_after = stall_after
        self.pause_after = pause_after
        self.go_on = threading.Event()
        """Ends the wait at `pause_after`."""
        self._weight_version = weight_version
        self.requests: list[tuple[list[int], SamplingParams]] = []
        """Per call the prompt ids and the parameters."""
        self.stalled = threading.Event()
        """A call waits at `stall_after`."""
        self.aborted = threading.Event()
        """A call was closed before it was finished, or failed."""
        self.closed = False
        self.cached_tokens: int | None = None
        """The number of cached tokens that it reports for each prompt."""
        self.split_next = False
        """The next reply begins with its first characters one by one, as a model may sample them."""
        self.gate: threading.Event | None = None
        """Calls wait until it is set."""
        self.called = threading.Event()
        """A call has come."""
        self.info = EngineInfo(
            name="scripted",
            version="1",
            model="script",
            vocab_size=self._tokenizer.vocab_size,
            max_context=1 << 20,
            logprobs_mode="raw_logprobs",
            sampling=sampling | {"max_tokens"},
        )

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        self.requests.append((prompt_ids.tolist(), params))
        ids = self.reply_ids(prompt_ids)
        finished = False
        self.called.set()
        try:
            # The gate is opened from another thread, which can't set an asyncio.Event.
            while self.gate is not None and not self.gate.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for at, token_id in enumerate(ids):
                if at == self.fail_after and self.error is not None:
                    raise self.error
                if at == self.stall_after:
                    self.stalled.set()
                    await asyncio.Event().wait()
                if at == self.pause_after:
                    self.stalled.set()
                    while not self.go_on.is_set():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                last = at == len(ids) - 1
                finished = finished or last
                stop = token_id if token_id in params.stop_token_ids else None
                finish = None if not last else "length" if stop is None else "stop"
                tops = tuple((token_id + other, -0.5 - other) for other in range(params.top_logprobs))
                top_logprobs = (tops,) if tops else ()
                yield SampleDelta(
                    (token_id,),
                    (-0.5,),
                    finish,
                    stop if last else None,
                    top_logprobs,
                    self._weight_version,
                    cached_tokens=self.cached_tokens if last else None,
                )
        finally:
            if not finished:
                self.aborted.set()

    def reply_ids(self, prompt_ids: TokenIds) -> list[int]:
        """Return the ids of the next reply."""
        reply = self.replies.pop(0)
        if not self.split_next:
            return self._tokenizer.encode_plain(reply)
        self.split_next = False
        start = _CONTROL_TOKENS.match(reply).end()  # type: ignore[union-attr]
        parts = [reply[:start], *reply[start : start + 3], reply[start + 3 :]]
        return [token_id for part in parts for token_id in self._tokenizer.encode_plain(part)]

    async def check(self) -> None:
        if self.error is not None and self.fail_after is None:
            raise self.error

    async def close(self) -> None:
        self.closed = True
