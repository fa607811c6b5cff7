"""Trials on an engine: sampled, read, and, where a phantom edit came, sampled again with its ids banned.

A ban is exact and needs nothing of the engine but alternatives per token. Up to the first id of the phantom edit greedy
decoding is the same with a ban as without; there the likeliest other id is taken, and decoding goes on behind it. An
engine that reports no alternatives gets no ban, which the results say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from tokentape.audit.probe.outcomes import Outcome, outcome
from tokentape.audit.probe.trials import Trial
from tokentape.chat.renderer import Renderer
from tokentape.engines.base import Engine, SamplingParams
from tokentape.errors import InvalidRequest
from tokentape.types import Setup

ALTERNATIVES = 8
"""Asked for per token, of which the likeliest that is not banned is taken."""

MOST_BANS = 8
"""In one completion. What is a phantom edit still is counted as one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How trials are sampled."""

    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    ban: bool = False
    concurrency: int = 8


@dataclass(frozen=True, slots=True)
class Result:
    """One trial's outcome."""

    trial: Trial
    completion: tuple[int, ...]
    outcome: Outcome
    banned: Outcome | None = None
    """With the phantom edit's ids banned; None where there was none, or no ban."""
    bans: tuple[tuple[int, int], ...] = ()
    """What was banned: (position in the completion, id)."""


def refuse_settings(engine: Engine, settings: Settings) -> None:
    """Raise `InvalidRequest` for a ban that would not be exact here."""
    if not settings.ban:
        return
    if settings.temperature:
        raise InvalidRequest("ids are banned in greedy decoding only: set temperature 0", "ban")
    if "top_logprobs" not in engine.info.sampling:
        raise InvalidRequest(
            f"the engine {engine.info.name} reports no alternatives per token, so it can't be probed with ids banned",
            "ban",
        )


async def run_trials(
    trials: Sequence[Trial], engine: Engine, renderer: Renderer, setup: Setup, settings: Settings
) -> AsyncGenerator[Result, None]:
    """Yield the result of each trial as soon as it is there, `settings.concurrency` at a time.

    Raises `InvalidRequest` as `refuse_settings`, `TemplateRefused` if the template does not take a question, and
    `EngineError` as `Engine.sample`: what was yielded before then holds.
    """
    refuse_settings(engine, settings)
    room = asyncio.Semaphore(settings.concurrency)

    async def one(trial: Trial) -> Result:
        async with room:
            return await _run(trial, engine, renderer, setup, settings)

    tasks = [asyncio.create_task(one(trial)) for trial in trials]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(trial: Trial, engine: Engine, renderer: Renderer, setup: Setup, settings: Settings) -> Result:
    prompt = renderer.render(trial.messages, setup).ids.tolist()
    stops = tuple(sorted(renderer.stop_ids(setup)))
    params = SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        stop_token_ids=stops,
        top_logprobs=ALTERNATIVES if settings.ban else 0,
    )
    if settings.temperature and "seed" in engine.info.sampling:
        params = replace(params, seed=settings.seed + trial.repetition)
    ids, tops = await _sample(engine, prompt, params, trial.name)
    first = _read(trial, ids, stops, renderer)
    result = Result(trial, tuple(ids), first)
    if not settings.ban or first.kind not in ("phantom", "spacing"):
        return result
    banned: dict[int, set[int]] = {}
    found = first
    for _ in range(MOST_BANS):
        if found.kind not in ("phantom", "spacing") or found.at < 0 or found.at >= len(ids):
            break
        refused = banned.setdefault(found.at, set())
        refused.add(ids[found.at])
        other = next((one for one, _ in tops[found.at] if one not in refused), None)
        if other is None:
            break
        kept, kept_tops = [*ids[: found.at], other], tops[: found.at + 1]
        # A ban behind this place was one behind other ids.
        banned = {at: refused for at, refused in banned.items() if at <= found.at}
        more: list[int] = []
        more_tops: list[tuple[tuple[int, float], ...]] = []
        if other not in stops and len(kept) < settings.max_tokens:
            left = replace(params, max_tokens=settings.max_tokens - len(kept))
            more, more_tops = await _sample(engine, [*prompt, *kept], left, trial.name)
        ids, tops = kept + more, kept_tops + more_tops
        found = _read(trial, ids, stops, renderer)
    bans = tuple((at, one) for at, refused in sorted(banned.items()) for one in sorted(refused))
    return replace(result, banned=found, bans=bans)


def _read(trial: Trial, ids: Sequence[int], stops: Sequence[int], renderer: Renderer) -> Outcome:
    said = ids[:-1] if ids and ids[-1] in stops else ids
    return outcome(trial, said, renderer.tokenizer)


async def _sample(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, name: str
) -> tuple[list[int], list[tuple[tuple[int, float], ...]]]:
    ids: list[int] = []
    tops: list[tuple[tuple[int, float], ...]] = []
    deltas = engine.sample(np.array(prompt, np.int32), params, stream=False, request_id=f"tokentape-probe-{name}")
    async with aclosing(deltas) as sampled:
        async for delta in sampled:
            ids += delta.token_ids
            tops += delta.top_logprobs
    return ids, tops
