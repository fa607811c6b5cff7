"""Run trials on an engine, store results in a file from which a stopped probe continues, and count them.

A phantom edit may be sampled again with its ids banned. This needs only top logprobs, and is exact: up to the first id
of the phantom edit, greedy decoding gives the same ids with a ban as without. At that position the likeliest id that is
not banned is used, and decoding continues after it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from tokentape.audit._probe.trials import KINDS, Outcome, Trial, outcome
from tokentape.audit._report import Bars, Block, Details, Facts, Heading, Paragraph, Report, Table, rate_bar
from tokentape.audit._statistics import Rate, Shares
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import Engine, SamplingParams
from tokentape.errors import InvalidRequest
from tokentape.types import Setup

ALTERNATIVES = 8

MOST_BANS = 8

FORMAT = 1
_HEAD = b'{"format": %d,' % FORMAT
_EDITS = ("phantom", "spacing")
_EXAMPLES = 40

Header = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Sampling settings for a probe. With `ban`, phantom edits are sampled again with their ids banned."""

    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    ban: bool = False
    concurrency: int = 8


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of one trial."""

    trial: Trial
    completion: tuple[int, ...]
    outcome: Outcome
    banned: Outcome | None = None
    """The outcome with the phantom edit's ids banned; None if no phantom edit was sampled again."""
    bans: tuple[tuple[int, int], ...] = ()
    """Pairs of a position in the completion and the id banned there."""


def header(engine: Engine, renderer: Renderer, setup: Setup, settings: ProbeSettings) -> Header:
    """Return a result file's first line: the settings that results must share to be counted together."""
    how = asdict(settings)
    del how["concurrency"]
    return {
        "format": FORMAT,
        "engine": str(engine.info),
        "model": Path(engine.info.model).name,
        "fingerprint": renderer.fingerprint,
        "template_kwargs": dict(setup.template_kwargs),
        **how,
    }


async def run_trials(
    trials: Sequence[Trial], engine: Engine, renderer: Renderer, setup: Setup, settings: ProbeSettings
) -> AsyncGenerator[ProbeResult, None]:
    """Yield results as they arrive. At most `settings.concurrency` trials run at a time.

    Raises `InvalidRequest` if `settings.ban` is set but decoding is not greedy or the engine returns no top logprobs,
    `TemplateRefused` if the template refuses a question, and `EngineError` as `Engine.sample` does.
    """
    if settings.ban and settings.temperature:
        raise InvalidRequest("banning ids needs greedy decoding: set temperature 0", "ban")
    if settings.ban and "top_logprobs" not in engine.info.sampling:
        raise InvalidRequest(
            f"the engine {engine.info.name} returns no top logprobs, which banning ids needs; probe without bans, or "
            "use an engine that returns them",
            "ban",
        )
    room = asyncio.Semaphore(settings.concurrency)

    async def run(trial: Trial) -> ProbeResult:
        async with room:
            return await _run(trial, engine, renderer, setup, settings)

    tasks = [asyncio.create_task(run(trial)) for trial in trials]
    try:
        for future in asyncio.as_completed(tasks):
            yield await future
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(trial: Trial, engine: Engine, renderer: Renderer, setup: Setup, settings: ProbeSettings) -> ProbeResult:
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

    def read(ids: Sequence[int]) -> Outcome:
        return outcome(trial, ids[:-1] if ids and ids[-1] in stops else ids, renderer.tokenizer)

    ids, tops = await _sample(engine, prompt, params, trial.name)
    reading = read(ids)
    result = ProbeResult(trial, tuple(ids), reading)
    if not settings.ban or reading.kind not in _EDITS:
        return result
    banned: dict[int, set[int]] = {}
    for _ in range(MOST_BANS):
        position = reading.at
        if reading.kind not in _EDITS or not 0 <= position < len(ids):
            break
        banned.setdefault(position, set()).add(ids[position])
        likeliest = next((token_id for token_id, _ in tops[position] if token_id not in banned[position]), None)
        if likeliest is None:
            break
        # Drop bans at later positions: they belonged to a different continuation.
        banned = {place: refused for place, refused in banned.items() if place <= position}
        ids, tops = [*ids[:position], likeliest], tops[: position + 1]
        if likeliest not in stops and len(ids) < settings.max_tokens:
            remaining = replace(params, max_tokens=settings.max_tokens - len(ids))
            more, more_tops = await _sample(engine, [*prompt, *ids], remaining, trial.name)
            ids, tops = ids + more, tops + more_tops
        reading = read(ids)
    bans = tuple((place, token_id) for place, refused in sorted(banned.items()) for token_id in sorted(refused))
    return replace(result, banned=reading, bans=bans)


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


class ProbeFile:
    """A JSONL file of a header and results. Drops an incomplete last line, refuses results with other settings."""

    def __init__(self, path: str | Path, expected: Header) -> None:
        path = Path(path)
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        try:
            head, *rows = [json.loads(line) for line in content[:whole].splitlines()] or [expected]
            if not whole and not _HEAD.startswith(content[: len(_HEAD)]):
                raise ValueError("its only line is not a header")
            if head.get("format") != expected["format"]:
                raise ValueError(f"its first line is not the header of a probe file of format {FORMAT}")
            self.results = msgspec.convert(rows, list[ProbeResult])
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"{path} is not a probe's result file: {error}; pass a different file") from None
        if differing := [key for key, value in expected.items() if head.get(key) != value]:
            raise InvalidRequest(
                f"{path} has results of a different probe (other {', '.join(differing)}); pass a different file, "
                "or move this file away"
            )
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "xb")
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._write(expected)

    def __enter__(self) -> ProbeFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def missing(self, trials: Sequence[Trial]) -> list[Trial]:
        done = {result.trial.name for result in self.results}
        return [trial for trial in trials if trial.name not in done]

    def add(self, result: ProbeResult) -> None:
        self._write(asdict(result))
        self.results.append(result)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts over all trials."""

    trials: int
    outcomes: Mapping[str, Rate]
    strict: Rate
    """Phantom edits with the same bytes, as a share of the trials that returned the sentence."""
    normalized: Rate
    """Phantom edits with the same bytes apart from white space, as a share of the same trials."""
    classes: Mapping[str, Rate]
    """The share of each artifact among the phantom edits of `normalized`."""
    noncanonical: Rate
    """Completions whose ids change if their text is encoded again."""
    banned: Mapping[str, Rate]
    """Outcomes, by kind, of phantom edits that were sampled again with banned ids; empty without bans."""


def summarise(results: Sequence[ProbeResult]) -> Summary:
    """Count results. Trials of one sentence are not independent, so intervals are over sentences."""
    back = [result for result in results if result.outcome.kind != "other"]
    edits = [result for result in back if result.outcome.kind in _EDITS]
    again = [result for result in results if result.banned is not None]
    classes = {name: _share(edits, [result.outcome.artifact == name for result in edits]) for name in ARTIFACTS}
    banned = {kind: _share(again, [result.banned.kind == kind for result in again if result.banned]) for kind in KINDS}
    return Summary(
        trials=len(results),
        outcomes={kind: _share(results, [result.outcome.kind == kind for result in results]) for kind in KINDS},
        strict=_share(back, [result.outcome.kind == "phantom" for result in back]),
        normalized=_share(back, [result.outcome.kind in _EDITS for result in back]),
        classes={name: rate for name, rate in classes.items() if rate.changed},
        noncanonical=_share(results, [not result.outcome.canonical for result in results]),
        banned={kind: rate for kind, rate in banned.items() if rate.changed},
    )


def _share(results: Sequence[ProbeResult], which: Sequence[bool]) -> Rate:
    shares = Shares()
    for result, matches in zip(results, which, strict=True):
        shares.add(result.trial.text, [((), matches, 1)])
    return shares.rate(())


def probe_layout(head: Header, results: Sequence[ProbeResult], tokenizer: Tokenizer) -> Report:
    summary = summarise(results)
    blocks: list[Block] = [
        Paragraph(f"{summary.trials} trials"),
        Paragraph(
            "A model is asked to replace one word of a sentence. A phantom edit returns the same word with different "
            "ids: the ids changed, and the text did not."
        ),
        Facts({key: head[key] for key in ("model", "engine", "temperature")}),
        Heading("Outcomes"),
        _bars(summary.outcomes),
        Details("What they mean", [Facts({str(kind): meaning for kind, meaning in KINDS.items()})]),
        Heading("Phantom edits, of the sentences that came back"),
        _bars({"byte-strict": summary.strict, "whitespace-normalized": summary.normalized}),
    ]
    if summary.classes:
        rows = [[name, ARTIFACTS[name].phantom or "", ARTIFACTS[name].meaning] for name in summary.classes]
        blocks += [
            Heading("Classes of phantom edits"),
            _bars(summary.classes),
            Details("What they mean", [Table(["class", "number in arXiv 2601.14658", "meaning"], rows, {1})]),
        ]
    if summary.banned:
        blocks += [
            Heading("With the ids of phantom edits banned"),
            Paragraph("Greedy decoding continued with the likeliest id that is not banned."),
            _bars(summary.banned),
        ]
    blocks += [Heading("Completions"), _bars({"not canonical": summary.noncanonical})]
    edits = [result for result in results if result.outcome.kind in _EDITS][:_EXAMPLES]
    if edits:
        examples = [block for result in edits for block in _example(result, tokenizer)]
        blocks.append(Details(f"The first {len(edits)} phantom edits", examples))
    return Report(f"Tokenization probe of {head['model']}", blocks)


def _bars(rates: Mapping[str, Rate]) -> Bars:
    bars = [rate_bar(f"{name} ({rate.changed} of {rate.total})", rate) for name, rate in rates.items()]
    return Bars(bars, unit="share", highest=1.0)


def _example(result: ProbeResult, tokenizer: Tokenizer) -> list[Block]:
    edit = result.outcome
    rows: list[list[object]] = []
    for name, ids in (("prompt", edit.source), ("sampled", edit.found)):
        spelled = " | ".join(tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids)
        rows.append([name, list(ids), spelled])
    heading = Heading(f"{result.trial.target}: {edit.artifact}", 3)
    return [heading, Paragraph(result.trial.text), Table(["", "ids", "tokens"], rows)]
