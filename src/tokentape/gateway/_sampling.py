"""Sample completions, each with one engine call, or with further calls after the engine aborts one.

An engine may end its calls with `abort` when its weights change. The gateway then sends the ids sampled so far as
context and samples the rest. Some parameters would change the distribution of the rest: `resume_obstacle` returns such
a parameter, `rest_params` returns the parameters for the next call.
A call that ends without a `finish_reason` is not resumed, because its ids can't be checked: the data to check them with
(counts, prompt, weight versions) arrive at the end of a reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from prometheus_client import Counter

from tokentape._session.invariants import check_ids
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import PER_TOKEN, Engine, EngineInfo, Interruptible, SampleDelta, SamplingParams
from tokentape.engines._pool import EnginePool
from tokentape.errors import EngineAborted, EngineUnavailable
from tokentape.gateway._choices import Choice
from tokentape.gateway._completion_checks import check_json, check_stop_strings, limited_by_server
from tokentape.gateway._events import TurnDelta
from tokentape.gateway._limits import Limits, OnAbort
from tokentape.gateway._pausing import Gate

_log = logging.getLogger("tokentape.gateway")


_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}

RETRY_SECONDS = 1.0

_LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8. An id has at least one byte."""


def resume_obstacle(params: SamplingParams, engine: EngineInfo) -> str | None:
    """Return a parameter that would change the distribution of a resumed completion; None if no parameter would.

    A schema or a structural tag would begin again from its start. Tokens sampled before an abort are in the prompt of
    the next call, so a penalty is safe only if the engine counts prompt and completion tokens alike.
    """
    if params.json_schema is not None:
        return "json_schema"
    if params.structural_tag is not None:
        return "structural_tag"
    changed = [name for name, off in _PENALTIES.items() if getattr(params, name) != off]
    return next((name for name in changed if name not in engine.prompt_penalties), None)


def rest_params(params: SamplingParams, sampled: int, payloads_from: int | None = None) -> SamplingParams:
    """Return the parameters to sample the rest of a completion, after `sampled` ids were sampled with `params`.

    `max_tokens` and `min_tokens` decrease by `sampled`. A seed is replaced by a hash of it and `sampled`, because with
    the same seed an engine would reuse the first call's random numbers. Other parameters don't depend on the position.

    >>> rest_params(SamplingParams(max_tokens=10, min_tokens=2), 3).max_tokens
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


class SplitStopFinder:
    """Finds stop strings that begin before an abort and end after it, which the engine can't find.

    `spell` returns the bytes of an id. `sampled` are the ids before the abort. Pass each later id to `push`. With
    `whole` it finds all stop strings, so that the engine need not.
    """

    def __init__(
        self,
        spell: Callable[[int], bytes],
        strings: Sequence[str],
        sampled: Sequence[int],
        min_tokens: int,
        *,
        whole: bool = False,
    ) -> None:
        self._spell = spell
        self.whole = whole
        self._strings = {string: string.encode() for string in strings}
        self._longest = max(map(len, self._strings.values()), default=1)
        self._count, self._min_tokens = len(sampled), min_tokens
        # Each id has at least one byte, so the last ids suffice.
        self._text = b"".join(map(spell, sampled[max(len(sampled) - self._longest + 1, 0) :]))
        self._ends = len(self._text) + self._longest - 1 if sampled else 0

    @property
    def passed(self) -> bool:
        """Whether no stop string can begin before the abort any more, and the engine finds the others."""
        return not self._strings or (not self.whole and len(self._text) >= self._ends)

    def push(self, token_id: int) -> str | None:
        """Append an id. Return the stop string that it completes; the earliest if there are several."""
        if self.passed:
            return None
        self._count += 1
        before = len(self._text)
        self._text += self._spell(token_id)
        if self._count <= self._min_tokens:
            return None
        offsets = {
            string: offset
            for string, data in self._strings.items()
            if (offset := self._text.find(data, max(before - len(data) + 1, 0))) >= 0
        }
        return min(offsets, key=lambda string: offsets[string], default=None)


@dataclass(frozen=True, slots=True)
class CompletionSampler:
    """Samples completions, each with one engine call or, after aborts, several calls.

    With `on_abort="resume"` an aborted completion is kept as it is after `limits.resumes` resumes, or if the rest would
    come from a different distribution. A call that was aborted before its first token is always repeated.
    """

    engine: Engine
    tokenizer: Tokenizer
    vocab_size: int
    """Ids greater than or equal to this are refused."""
    gate: Gate
    """The gate that each engine call must pass."""
    on_abort: OnAbort
    limits: Limits
    aborts: Counter
    """Metric that counts aborts by outcome and reason."""

    async def sample(self, choice: Choice) -> AsyncGenerator[TurnDelta, None]:
        """Sample a completion to its end, and yield its deltas.

        Raises `EngineError` or a subclass; `EngineAborted` if the completion was aborted and must be sampled again.
        """
        now, aborts = asyncio.get_running_loop().time, 0
        until = now() + self.limits.pause_patience
        while True:
            try:
                async with aclosing(self._call(choice, aborts)) as events:
                    async for event in events:
                        yield event
            except EngineUnavailable as error:
                # A paused server may refuse calls until it is resumed; not every server says why.
                if not (aborts or error.paused) or len(choice.ids) > choice.part or now() > until:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if choice.finish_reason is None:
                raise EngineUnavailable("the engine stopped answering before it finished; send it again")
            if choice.finish_reason != "abort":
                break
            aborts, until = aborts + 1, now() + self.limits.pause_patience
            if not self._resumes(choice, aborts):
                break
        choice.end()
        self._check_end(choice)

    async def _call(self, choice: Choice, aborts: int) -> AsyncGenerator[TurnDelta, None]:
        """Make the engine call that follows `aborts` aborts. Yield its deltas; `choice` gets the finish reason."""
        task, cancelled = asyncio.current_task(), False
        assert task is not None

        def interrupt() -> None:
            nonlocal cancelled
            if not (isinstance(self.engine, Interruptible) and self.engine.interrupt(_request_id(choice, aborts))):
                cancelled = True
                task.cancel()

        try:
            if not choice.captured:
                await self.gate.opened()
            # A captured call has already passed the gate.
            with nullcontext() if choice.captured else self.gate.passed(interrupt):
                finder = self._stop_finder(choice, choice.ids)
                async with aclosing(self._ask(choice, aborts, finder)) as deltas:
                    async for delta in deltas:
                        event = self._append(choice, delta, finder)
                        if delta.token_ids or delta.finish_reason != "abort":
                            yield event
                        if choice.finish_reason is not None:
                            break
                    if isinstance(choice.stop, str) and not finder.passed:
                        # The call is closed before its end, where the data to check arrive, so check the engine.
                        await self._check_engine(choice, aborts)
        except asyncio.CancelledError:
            if not cancelled or task.uncancel():
                raise
            choice.finish_reason, choice.lost = "abort", not choice.stream

    def _append(self, choice: Choice, delta: SampleDelta, finder: SplitStopFinder) -> TurnDelta:
        """Check what the engine sent and append it, up to a stop string that `finder` finds."""
        check_ids(delta.token_ids, self.vocab_size)
        ended = delta.finish_reason in ("stop", "length")
        if choice.sampling.stop_strings and ended and not finder.whole:
            self._check_stops(choice, delta)
        event = choice.append(delta if finder.passed else _up_to_stop(delta, finder))
        if ended:
            self._check_weights(choice)
        return event

    def _check_weights(self, choice: Choice) -> None:
        """Make the weight version unknown if this call's server reports no version, although a server has reported one.

        A server that restarts loses the version that the trainer gave it, and loads the weights it began with.
        """
        if choice.names_weights:
            self.gate.reported = True
        elif self.gate.reported and choice.sampling.adapter is None:
            choice.set_weights((0, "unknown"))

    async def _check_engine(self, choice: Choice, aborts: int) -> None:
        """Check the engine of a running call, and note its name if there are several. Raises `EngineUnavailable`."""
        if isinstance(self.engine, EnginePool):
            choice.engines[-1] = await self.engine.check_call(_request_id(choice, aborts))
        else:
            await self.engine.check()

    def _check_stops(self, choice: Choice, last: SampleDelta) -> None:
        """Raise `EngineContractError` if an engine call that ends with `last` disregarded the stop strings."""
        ids, min_tokens = (*choice.ids[choice.part :], *last.token_ids), choice.sampling.min_tokens - choice.part
        late = self.engine.info.late_stops
        check_stop_strings(self.tokenizer, ids, last.stop, choice.sampling.stop_strings, min_tokens, late)

    def _check_end(self, choice: Choice) -> None:
        """Raise `EngineContractError` if the reply is not the requested JSON. Note a limit of the server."""
        sampling, sampled = choice.sampling, len(choice.ids)
        if sampling.json_schema is not None and choice.finish_reason == "stop" and choice.reply is not None:
            check_json(self.tokenizer, choice.ids, choice.reply, choice.stop)
        limited = limited_by_server(choice.finish_reason, sampled, len(choice.prompt_ids), sampling, self.engine.info)
        if limited and "aborted" not in choice.notes:
            choice.notes["server_limit"] = sampled
            _log.warning(
                "the engine ended a completion after %d tokens; max_tokens is %d. Check the server's own limit",
                sampled,
                sampling.max_tokens,
            )

    def _resumes(self, choice: Choice, aborts: int) -> bool:
        """Return whether to sample the rest of an aborted completion. If False, the completion ends here."""
        cause = "paused" if self.gate.closed else "engine_abort"
        if self._is_over(choice):
            return False
        may_resume = aborts <= self.limits.resumes and not choice.captured
        if may_resume and len(choice.ids) == choice.part:
            # If the cancelled call was not streamed, its tokens are lost, so sample them again.
            self._note(choice, "resampled" if choice.lost else "again", cause, "not streamed" if choice.lost else "")
            choice.go_on(None)
            return True
        if self.on_abort != "resume":
            why = "on_abort"
        elif choice.captured:
            why = "captured"
        else:
            why = (resume_obstacle(choice.sampling, self.engine.info) or "") if may_resume else "resumes"
        if not choice.ids or self.on_abort == "resample":
            self._note(choice, "resampled", cause, why or "resumes")
            raise EngineAborted("the engine aborted this call before it finished; send it again", cause)
        if why:
            self._note(choice, "kept", cause, why)
            choice.finish_reason = "length"
            return False
        self._note(choice, "resumed", cause, "")
        choice.go_on(cause)
        return True

    def _is_over(self, choice: Choice) -> bool:
        """Set the finish reason if the aborted completion's last token already ends it. Return whether it does."""
        sampling, ids = choice.sampling, choice.ids
        if ids and len(ids) > sampling.min_tokens and ids[-1] in sampling.stop_token_ids:
            choice.finish_reason, choice.stop = "stop", ids[-1]
        elif ids and (stop := self._stop_finder(choice, ids[:-1]).push(ids[-1])):
            choice.finish_reason, choice.stop = "stop", stop
        elif len(ids) >= sampling.max_tokens:
            choice.finish_reason = "length"
        return choice.finish_reason != "abort"

    def _stop_finder(self, choice: Choice, sampled: Sequence[int]) -> SplitStopFinder:
        sampling, spell, whole = choice.sampling, self.tokenizer.token_bytes, False
        if sampling.stop_strings:
            # After a prompt that ends inside a character, vLLM 0.32 finds stop strings in the prompt's text too.
            tail = [*choice.prompt_ids[-_LONGEST_CHARACTER:].tolist(), *choice.ids][-_LONGEST_CHARACTER:]
            whole = b"".join(map(spell, tail)).decode("utf-8", "replace").endswith("\ufffd")
            whole |= self.engine.info.early_stops and len(sampled) < sampling.min_tokens
        return SplitStopFinder(spell, sampling.stop_strings, sampled, sampling.min_tokens, whole=whole)

    def _note(self, choice: Choice, outcome: str, cause: str, why: str) -> None:
        """Count and log the outcome of an abort. Record it with the turn unless the completion is resumed."""
        self.aborts.labels(outcome, why).inc()
        if outcome in ("kept", "resampled"):
            choice.notes["aborted"] = {"cause": cause, "outcome": outcome, "why": why}
        level = logging.INFO if outcome in ("resumed", "again") else logging.WARNING
        _log.log(level, "%s after %d tokens: %s%s", cause, len(choice.ids), outcome, f" ({why})" if why else "")

    def _ask(self, choice: Choice, aborts: int, finder: SplitStopFinder) -> AsyncGenerator[SampleDelta, None]:
        """Call the engine; after an abort, for the rest of the completion."""
        ids, params, stream = choice.prompt_ids, choice.sampling, choice.stream
        if choice.ids:
            ids = np.concatenate([ids, np.array(choice.ids, dtype=np.int32)])
            params = rest_params(params, len(choice.ids), choice.payloads_due())
            if params.seed is not None:
                # One per resume: a paused server may refuse the call several times.
                choice.notes.setdefault("resume_seeds", [])[len(choice.resumes) - 1 :] = [params.seed]
            # Stream, because the engine would not stop at a stop string that begins before the abort.
            stream = stream or not finder.passed
        if finder.whole:
            params, stream = replace(params, stop_strings=()), True
        return choice.sample_ids(ids, params, stream=stream, request_id=_request_id(choice, aborts))


def _request_id(choice: Choice, aborts: int) -> str:
    return f"{choice.request_id}-{aborts}" if aborts else choice.request_id


def _up_to_stop(delta: SampleDelta, finder: SplitStopFinder) -> SampleDelta:
    """Drop what follows a stop string that starts before an abort and ends in this delta."""
    for end, token_id in enumerate(delta.token_ids, 1):
        stop = finder.push(token_id)
        if stop is not None:
            fields: dict[str, Any] = {name: getattr(delta, name)[:end] for name in PER_TOKEN}
            return replace(delta, **fields, finish_reason="stop", stop=stop, weight_spans=(), payloads=())
    return delta
