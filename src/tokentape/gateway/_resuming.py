"""Completions that continue over several engine calls, if the engine aborts some.

An engine whose weights are changed may end its calls with `abort`. What it sampled until then is the beginning of a
completion, so the gateway sends it back as context and has the rest sampled. That the rest is drawn from the same
distribution is not true of every request: `hindrance` says of which it is not, `rest` how each parameter changes.

A call that breaks off without a `finish_reason` is not resumed. What an engine says at the end of a reply (counts,
prompt, versions of the weights) is what the ids before it are checked with, so ids without it are no turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from prometheus_client import Counter

from tokentape._session.invariants import check_ids
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import Engine, EngineInfo, Interruptible, SampleDelta, SamplingParams
from tokentape.errors import EngineAborted, EngineUnavailable
from tokentape.gateway._choices import Choice
from tokentape.gateway._events import TurnDelta
from tokentape.gateway._limits import Limits, OnAbort
from tokentape.gateway._pausing import Gate

_log = logging.getLogger("tokentape.gateway")


_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}

_RETRY_SECONDS = 1.0


def hindrance(params: SamplingParams, engine: EngineInfo) -> str | None:
    """Return the parameter under which the rest of a completion would come from another distribution; None if none is.

    A schema would begin anew with the rest.

    A penalty counts what is in the completion. What was sampled before an abort is in the prompt of the call that goes
    on, so it counts only if the engine counts both alike.
    """
    if params.json_schema is not None:
        return "json_schema"
    changed = [name for name, off in _PENALTIES.items() if getattr(params, name) != off]
    return next((name for name in changed if name not in engine.prompt_penalties), None)


def rest(params: SamplingParams, sampled: int, payloads_from: int | None = None) -> SamplingParams:
    """Return the parameters for the rest of a completion of which so many ids were sampled with `params`.

    `max_tokens` and `min_tokens` are what is left of them. A seed becomes another one that depends on it and on where
    the rest begins: with the same one an engine would draw the rest with the random numbers that drew the beginning.
    The other parameters concern each token by itself.

    >>> rest(SamplingParams(max_tokens=10, min_tokens=2), 3).max_tokens
    7
    """
    seed = params.seed
    if seed is not None:
        drawn = hashlib.sha256(f"{seed} {sampled}".encode()).digest()
        seed = int.from_bytes(drawn[:4], "big") >> 1
    return replace(
        params,
        max_tokens=params.max_tokens - sampled,
        min_tokens=max(params.min_tokens - sampled, 0),
        seed=seed,
        payloads_from=payloads_from,
    )


class Seam:
    """Finds stop strings that begin before an abort and end after it: the engine sees only what it samples itself.

    `spell` gives the bytes of an id. `push` takes the ids after the abort one by one and returns the stop string that
    one completes, as long as one can reach over the seam.
    """

    def __init__(
        self, spell: Callable[[int], bytes], strings: Sequence[str], sampled: Sequence[int], min_tokens: int
    ) -> None:
        self._spell = spell
        self._strings = {string: string.encode() for string in strings}
        self._longest = max(map(len, self._strings.values()), default=1)
        self._count, self._min_tokens = len(sampled), min_tokens
        # An id has one byte at least.
        self._text = b"".join(map(spell, sampled[max(len(sampled) - self._longest + 1, 0) :]))
        self._ends = len(self._text) + self._longest - 1

    @property
    def passed(self) -> bool:
        """No stop string that begins before the abort can end after what was pushed."""
        return not self._strings or len(self._text) >= self._ends

    def push(self, token_id: int) -> str | None:
        """Take the next id; return the stop string that ends in it, of several the one that begins first."""
        if self.passed:
            return None
        self._count += 1
        before = len(self._text)
        self._text += self._spell(token_id)
        if self._count <= self._min_tokens:
            return None
        found = {
            string: at
            for string, data in self._strings.items()
            if (at := self._text.find(data, max(before - len(data) + 1, 0))) >= 0
        }
        return min(found, key=lambda string: found[string], default=None)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples completions, each over as many calls of the engine as it takes.

    Under the policy `resume` an aborted completion is kept as it is if it was continued `limits.resumes` times already,
    or if its rest would come from another distribution. Without any token it is sampled again in any case.
    """

    engine: Engine
    tokenizer: Tokenizer
    vocab_size: int
    """Ids at or above it are refused."""
    gate: Gate
    """What each call of the engine passes."""
    on_abort: OnAbort
    limits: Limits
    aborts: Counter
    """Metric: aborts by their outcome, and why."""

    async def sample(self, choice: Choice) -> AsyncGenerator[TurnDelta, None]:
        """Sample a completion to its end.

        Raises `EngineError` and kinds; `EngineAborted` if it was aborted and must be sampled again.
        """
        aborts = 0
        while True:
            calls = self._ask(choice, aborts) if choice.captured else self._passing(choice, aborts)
            async with aclosing(calls) as deltas:
                async for delta in deltas:
                    yield delta
            if choice.finish_reason is None:
                raise EngineUnavailable("the engine stopped answering before it was finished; send it again")
            if choice.finish_reason != "abort":
                break
            aborts += 1
            if not self._goes_on(choice, aborts):
                break
        choice.end()

    def _goes_on(self, choice: Choice, aborts: int) -> bool:
        """Return whether to ask the engine again for an aborted completion. If not, the completion ends here."""
        cause = "paused" if self.gate.closed else "engine_abort"
        if self._is_over(choice):
            return False
        more = aborts <= self.limits.resumes and not choice.captured
        if more and len(choice.ids) == choice.part:
            # What an engine that was not streaming had sampled when we left it is lost, and drawn again.
            self._note(choice, "resampled" if choice.lost else "again", cause, "not streamed" if choice.lost else "")
            choice.go_on(None)
            return True
        why = "on_abort" if self.on_abort != "resume" else self._obstacle(choice, more)
        if not choice.ids or self.on_abort == "resample":
            self._note(choice, "resampled", cause, why or "resumes")
            raise EngineAborted("the engine aborted this call before it was finished; send it again", cause)
        if why:
            self._note(choice, "kept", cause, why)
            choice.finish_reason = "length"
            return False
        self._note(choice, "resumed", cause, "")
        choice.go_on(cause)
        return True

    def _is_over(self, choice: Choice) -> bool:
        """Whether the last token ends the completion, though the engine came to say so as little as we."""
        sampling, ids = choice.sampling, choice.ids
        if ids and len(ids) > sampling.min_tokens and ids[-1] in sampling.stop_token_ids:
            choice.finish_reason, choice.stop = "stop", ids[-1]
        elif ids and (stop := self._seam(choice, ids[:-1]).push(ids[-1])):
            choice.finish_reason, choice.stop = "stop", stop
        elif len(ids) >= sampling.max_tokens:
            choice.finish_reason = "length"
        return choice.finish_reason != "abort"

    def _obstacle(self, choice: Choice, more: bool) -> str:
        """Return why a completion can't go on; empty if it can."""
        if choice.captured:
            return "captured"
        return (hindrance(choice.sampling, self.engine.info) or "") if more else "resumes"

    def _seam(self, choice: Choice, sampled: Sequence[int]) -> Seam:
        return Seam(self.tokenizer.token_bytes, choice.sampling.stop_strings, sampled, choice.sampling.min_tokens)

    def _note(self, choice: Choice, outcome: str, cause: str, why: str) -> None:
        """Count and log the outcome of an abort, and record it unless the completion is just continued."""
        self.aborts.labels(outcome, why).inc()
        if outcome in ("kept", "resampled"):
            choice.notes["aborted"] = {"cause": cause, "outcome": outcome, "why": why}
        level = logging.INFO if outcome in ("resumed", "again") else logging.WARNING
        _log.log(level, "%s after %d tokens: %s%s", cause, len(choice.ids), outcome, f" ({why})" if why else "")

    async def _passing(self, choice: Choice, aborts: int) -> AsyncGenerator[TurnDelta, None]:
        """Pass the gate and ask the engine; again and again if it refuses to go on with a call that it aborted."""
        task = asyncio.current_task()
        assert task is not None
        until = asyncio.get_running_loop().time() + self.limits.pause_patience
        left = False

        def interrupt() -> None:
            nonlocal left
            if not (isinstance(self.engine, Interruptible) and self.engine.interrupt(_request_id(choice, aborts))):
                left = True
                task.cancel()

        while True:
            try:
                async with self.gate.passing(interrupt), aclosing(self._ask(choice, aborts)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except asyncio.CancelledError:
                if not left or task.uncancel():
                    raise
                choice.finish_reason, choice.lost = "abort", not choice.stream
                return
            except EngineUnavailable:
                # A server that was paused after it had ended its calls may refuse others until it goes on.
                if not aborts or len(choice.ids) > choice.part or asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    async def _ask(self, choice: Choice, aborts: int) -> AsyncGenerator[TurnDelta, None]:
        ids, params, stream = choice.prompt_ids, choice.sampling, choice.stream
        seam = self._seam(choice, choice.ids)
        if choice.ids:
            ids = np.concatenate([ids, np.array(choice.ids, dtype=np.int32)])
            params = rest(params, len(choice.ids), choice.payloads_due())
            if params.seed is not None:
                choice.notes.setdefault("resume_seeds", []).append(params.seed)
            # After a stop string that the engine does not see, it would go on.
            stream = stream or not seam.passed
        sampled = choice.sample_ids(ids, params, stream=stream, request_id=_request_id(choice, aborts))
        async with aclosing(sampled) as deltas:
            async for delta in deltas:
                check_ids(delta.token_ids, self.vocab_size)
                if choice.part and not seam.passed:
                    delta = _up_to_stop(delta, seam)
                event = choice.append(delta)
                if delta.token_ids or delta.finish_reason != "abort":
                    yield event
                if choice.finish_reason is not None:
                    break
        if isinstance(choice.stop, str) and not seam.passed:
            # The call was left before its end, where the engine is looked at.
            await self.engine.check()


def _request_id(choice: Choice, aborts: int) -> str:
    return f"{choice.request_id}-{aborts}" if aborts else choice.request_id


def _up_to_stop(delta: SampleDelta, seam: Seam) -> SampleDelta:
    """Cut a delta after the token that completes a stop string over the seam, where sampling would have ended."""
    for end, token_id in enumerate(delta.token_ids, 1):
        stop = seam.push(token_id)
        if stop is not None:
            names = ("token_ids", "logprobs", "top_logprobs", "supports")
            kept: dict[str, Any] = {name: getattr(delta, name)[:end] for name in names}
            return replace(delta, **kept, finish_reason="stop", stop=stop, weight_spans=(), payloads=())
    return delta
