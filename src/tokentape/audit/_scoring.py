"""Score the recorded ids of sessions with an engine, as a column of the record. An interrupted run can be continued."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokentape.audit._mismatch import LOOK_TOP, Attribution, Mismatch
from tokentape.audit._rescaling import other_adapter
from tokentape.audit._served import same_tokenizer
from tokentape.audit._statistics import Numbers
from tokentape.chat._renderer import Renderer
from tokentape.engines._scoring import Scorer
from tokentape.errors import InvalidRequest
from tokentape.store._base import Store
from tokentape.types import TokenDistribution, Trajectory, TurnColumn

SCORED = TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
"""The distribution of scores: the model's own. No engine offers another distribution."""


@dataclass(frozen=True, slots=True)
class SessionToScore:
    """A session's trajectories, and which of their turns are already scored."""

    session_id: str
    trajectories: Sequence[Trajectory]
    done: Collection[int]
    """The `seq` of turns that already have the column."""
    sampling: Mapping[int, Mapping[str, Any]]


@dataclass
class ScoreReport:
    """The result of scoring, and of comparing recorded logprobs with the scores."""

    engine: str
    model: str
    column: str
    distribution: TokenDistribution = SCORED
    sessions: int = 0
    turns: int = 0
    """Turns that were scored in this run."""
    tokens: int = 0
    had_it: int = 0
    """Turns that already had the column."""
    not_scored: Counter[str] = field(default_factory=Counter)
    """Turns that could not be scored, by reason."""
    numeric: Numbers = field(default_factory=Numbers)
    not_comparable: Mapping[str, int] = field(default_factory=dict)
    """Tokens that were not compared with the record, by reason."""
    causes: tuple[Attribution, ...] = ()
    """Causes of differences beyond rounding; empty if there are none, or if nothing was compared."""


Write = Callable[[Sequence[TurnColumn]], Awaitable[None]]


async def score_sessions(
    sessions: Iterable[SessionToScore],
    scorer: Scorer,
    write: Write,
    *,
    column: str,
    precision: str | None,
    concurrency: int = 4,
    adapter: str | None = None,
) -> ScoreReport:
    """Score every sampled token of `sessions` and pass the columns to `write`, one call per session.

    A turn that several branches share is scored once. Turns that already have the column are skipped. At most
    `concurrency` sessions are in memory at a time. With `precision`, a key of `PRECISIONS`, recorded logprobs are
    compared with the scores, which makes sense only if the engine has the weights that sampled them. Then only turns
    that were sampled with `adapter`, the LoRA adapter that the engine scores with, are scored.

    Raises `EngineError` as `Scorer.score` does. Columns that were already written stay.
    """
    report = ScoreReport(str(scorer.info), scorer.info.model, column)
    compared = None if precision is None else Mismatch(precision, scorer.info.vocab_size, adapter)
    running: set[asyncio.Future[None]] = set()
    try:
        for session in sessions:
            if len(running) >= concurrency:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            running.add(asyncio.create_task(_score(session, scorer, write, report, compared)))
        for task in asyncio.as_completed(running):
            await task
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if compared is not None:
        for doubt in compared.doubts():
            compared.look(doubt, await scorer.score(doubt.trajectory.token_ids[: doubt.end], doubt.start, top=LOOK_TOP))
        report.numeric, report.causes = compared.numbers(), compared.causes()
        report.not_comparable = dict(compared.not_comparable)
    return report


async def _score(
    session: SessionToScore, scorer: Scorer, write: Write, report: ScoreReport, compared: Mismatch | None
) -> None:
    done = set(session.done)
    columns: list[TurnColumn] = []
    report.had_it += len({turn for trajectory in session.trajectories for turn in trajectory.turns} & done)
    for trajectory in session.trajectories:
        due = [(turn, start, end) for turn, start, end in trajectory.completions() if turn not in done and end > start]
        # A text model can't score tokens that follow an image.
        before_images = min((span.start for span in trajectory.media), default=len(trajectory.token_ids))
        scorable = []
        adapters = dict(zip(trajectory.turns, trajectory.adapters, strict=True))
        for turn, start, end in due:
            why = None if compared is None else other_adapter(adapters[turn], compared.adapter)
            if why is None and end > before_images:
                why = "an image comes before the turn"
            if why is None:
                scorable.append((turn, start, end))
            else:
                report.not_scored[why] += 1
        done.update(turn for turn, _, _ in due)
        if not scorable:
            continue
        # The first token of a sequence has no context.
        start, end = max(scorable[0][1], 1), scorable[-1][2]
        top = 0 if compared is None else compared.top_for(trajectory, session.sampling)
        try:
            scores = await scorer.score(trajectory.token_ids[:end], start, top=top)
        except InvalidRequest as error:
            report.not_scored[str(error)] += len(scorable)
            continue
        mask = np.zeros(len(trajectory.token_ids), bool)
        for turn, first, last in scorable:
            values = np.zeros(last - first, np.float32)
            values[max(start - first, 0) :] = scores.logprobs[max(first, start) - start : last - start]
            # Columns accept finite numbers only. Logprobs of sampled tokens do not come near this bound.
            columns.append(TurnColumn(session.session_id, turn, report.column, np.maximum(values, -1e4), time.time()))
            mask[first:last] = True
        report.turns += len(scorable)
        report.tokens += int(mask.sum())
        if compared is not None:
            compared.add(trajectory, mask, start, scores, session.sampling)
    if columns:
        await write(columns)
    report.sessions += 1


def recorded_sessions(store: Store, column: str, *, again: bool = False) -> Iterable[SessionToScore]:
    """Yield the sessions of a store, one at a time. With `again`, turns that have the column are scored too."""
    for stored in store.iter_sessions():
        session_id = stored.info.session_id
        done = frozenset() if again else store.turns_with_column(session_id, column)
        sampling = {turn.seq: turn.sampling for turn in stored.turns}
        yield SessionToScore(session_id, stored.trajectories(), done, sampling)


async def open_and_score(
    sessions: Iterable[SessionToScore],
    write: Write,
    kind: str,
    model: Path | str,
    url: str | None = None,
    *,
    engine_model: str | None = None,
    options: Mapping[str, Any] | None = None,
    adapter: tuple[str, Path] | None = None,
    **arguments: Any,
) -> ScoreReport:
    """Open an engine, and pass it with the remaining `arguments` to `score_sessions`.

    `kind` is `transformers`, with the weights in the folder `model`, or `vllm` or `sglang` at `url`. The recorded ids
    must come from the tokenizer in `model`; a server with a different tokenizer is refused. `engine_model` is the name
    of the model if the server serves several. `adapter` is the name and folder of a LoRA adapter to score with, only
    with `transformers`. `options` are passed to `TransformersEngine.open` or `open_engine`.

    Raises `InvalidRequest` and `EngineError`, as opening and scoring do.
    """
    scorer: Any
    if kind == "transformers":
        from tokentape.engines._transformers import TransformersEngine

        scorer = TransformersEngine.open(model, prefix_cache_bytes=0, merged=adapter and adapter[1], **(options or {}))
    elif adapter is not None:
        raise InvalidRequest("a server can't score with a LoRA adapter: pass the kind transformers", "adapter")
    elif url is None:
        raise InvalidRequest(f"an engine of kind {kind} is a server: pass its URL", "url")
    else:
        from tokentape.engines._kinds import open_engine

        renderer = Renderer.load(model)
        size = renderer.tokenizer.vocab_size
        scorer = await open_engine(kind, url, vocab_size=size, model=engine_model, **(options or {}))
    try:
        if url is not None:
            check = await same_tokenizer(kind, scorer.http, scorer.info.model, renderer)
            if check.status == "fail":
                raise InvalidRequest(f"the engine's tokenizer is not the one in {model}: {check.found}", "url")
        return await score_sessions(sessions, scorer, write, adapter=adapter and adapter[0], **arguments)
    finally:
        await scorer.close()
