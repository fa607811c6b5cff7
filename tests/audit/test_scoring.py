"""Sessions scored by an engine: each sampled token once, a few sessions at a time, and on from where it was cut off."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

import tokentape
from tests.audit.planted import forward, load
from tests.conftest import ServeTiny
from tests.test_client import talk
from tokentape.audit._scoring import ScoreReport, SessionToScore, open_and_score, recorded_sessions, score_sessions
from tokentape.engines._base import EngineInfo
from tokentape.engines._scoring import Scores
from tokentape.errors import EngineUnavailable, InvalidRequest
from tokentape.store import SqliteStore
from tokentape.types import MediaSpan, TokenIds, TurnColumn


class CountingScorer:
    """Scores every id with minus its value over 1000; fails at the call with the given number."""

    def __init__(self, fails_at: int | None = None, error: Exception | None = None) -> None:
        self.info = EngineInfo("counting", "1", "m", 4000, 10_000, "raw_logprobs", frozenset())
        self.calls: list[tuple[int, int]] = []
        """Tokens and start of each."""
        self.together = self.most = 0
        self._fails_at = fails_at
        self._error = error or EngineUnavailable("gone")

    async def score(self, ids: TokenIds, start: int, *, top: int = 0) -> Scores:
        self.calls.append((len(ids), start))
        if len(self.calls) - 1 == self._fails_at:
            raise self._error
        self.together += 1
        self.most = max(self.most, self.together)
        for _ in range(5):
            await asyncio.sleep(0)
        self.together -= 1
        return Scores(-ids[start:].astype(np.float32) / 1000, np.empty((len(ids) - start, 0), np.float32))

    async def close(self) -> None:
        pass


def go_on(base_url: str, store: SqliteStore, session_id: str, turns: int) -> None:
    """Ask another question after the first `turns` turns of a session."""
    known = store.load_session(session_id).turns[:turns]
    history: Any = [message for turn in known for message in (*turn.messages, turn.reply)]
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as agent:
        question = {"role": "user", "content": "And what do pears cost?"}
        agent.chat.completions.create(model="any", messages=[*history, question], max_tokens=12, seed=0)


@pytest.fixture(scope="module")
def made(serve_tiny: ServeTiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sessions of three turns each; `b` has a second branch from its second turn on."""
    directory = tmp_path_factory.mktemp("made")
    with serve_tiny(directory) as (url, store), tokentape.Client(url) as client:
        for name in "abc":
            talk(client.session(name).base_url, turns=3)
        go_on(client.session("b").base_url, store, "b", 1)
    return directory


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Iterator[SqliteStore]:
    shutil.copytree(made, tmp_path / "data")
    with SqliteStore.open(tmp_path / "data") as store:
        yield store


@pytest.fixture
def recorded(store: SqliteStore) -> SqliteStore:
    return store


def scored(store: SqliteStore, scorer: Any, **options: Any) -> ScoreReport:
    settings = {"column": "teacher", "precision": None, "concurrency": 1} | options
    again = settings.pop("again", False)
    sessions = recorded_sessions(store, settings["column"], again=again)
    return asyncio.run(score_sessions(sessions, scorer, lambda columns: store.write(*columns), **settings))


def turns_of(store: SqliteStore) -> int:
    return sum(len(stored.turns) for stored in store.iter_sessions())


def test_each_sampled_token_is_scored_once(recorded: SqliteStore) -> None:
    scorer = CountingScorer()
    report = scored(recorded, scorer)
    assert (report.sessions, report.turns, report.had_it) == (3, turns_of(recorded), 0)
    assert report.tokens == sum(
        len(turn.completion_ids) for session in recorded.iter_sessions() for turn in session.turns
    )
    branches = recorded.load_session("b").trajectories()
    assert [branch.turns for branch in branches] == [(0, 1, 2), (0, 3)]
    # One call per branch, each from its first turn that no branch before has.
    expected, seen = [], set[int]()
    for path in branches:
        new = next(n for n, turn in enumerate(path.turns) if turn not in seen)
        expected.append((len(path.token_ids), int(path.completion_starts[new])))
        seen.update(path.turns)
    assert scorer.calls[1:-1] == expected
    for stored in recorded.iter_sessions(per_token=True):
        for trajectory in stored.trajectories():
            np.testing.assert_allclose(
                trajectory.columns["teacher"][trajectory.loss_mask],
                -trajectory.token_ids[trajectory.loss_mask] / 1000,
                rtol=1e-6,
            )


def test_interrupted_run_resumes(recorded: SqliteStore) -> None:
    with pytest.raises(EngineUnavailable):
        scored(recorded, CountingScorer(fails_at=1))
    scorer = CountingScorer()
    report = scored(recorded, scorer)
    assert (report.had_it, report.had_it + report.turns) == (3, turns_of(recorded))
    assert scored(recorded, CountingScorer()).turns == 0
    assert scored(recorded, CountingScorer(), again=True).turns == turns_of(recorded)
    assert scored(recorded, CountingScorer(), column="other").turns == turns_of(recorded)


def test_only_new_turns_of_a_session_are_scored(gateway_url: str, recorded: SqliteStore) -> None:
    scored(recorded, CountingScorer())
    with tokentape.Client(gateway_url) as client:
        go_on(client.session("a").base_url, recorded, "a", 3)
    scorer = CountingScorer()
    report = scored(recorded, scorer)
    assert (report.turns, report.had_it) == (1, turns_of(recorded) - 1)
    (trajectory,) = recorded.load_session("a").trajectories()
    assert scorer.calls == [(len(trajectory.token_ids), trajectory.completion_starts[3])]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_number_of_concurrent_sessions_is_limited(recorded: SqliteStore, concurrency: int) -> None:
    scorer = CountingScorer()
    scored(recorded, scorer, concurrency=concurrency)
    assert scorer.most == concurrency


def test_turns_refused_by_the_engine_are_counted_and_the_rest_scored(recorded: SqliteStore) -> None:
    report = scored(recorded, CountingScorer(fails_at=0, error=InvalidRequest("too long", "ids")))
    assert dict(report.not_scored) == {"too long": 3}
    assert report.turns == turns_of(recorded) - 3


def test_turns_after_an_image_are_not_scored(recorded: SqliteStore) -> None:
    (trajectory,) = recorded.load_session("a").trajectories()
    seen = replace(trajectory, media=(MediaSpan(int(trajectory.completion_ends[0]) + 1, 1, "", ""),))
    written: list[TurnColumn] = []

    async def write(columns: Sequence[TurnColumn]) -> None:
        written.extend(columns)

    report = asyncio.run(
        score_sessions([SessionToScore("a", [seen], (), {})], CountingScorer(), write, column="c", precision=None)
    )
    assert ([column.turn for column in written], report.not_scored.total()) == ([0], 2)


def test_scoring_with_the_sampler_gives_the_recorded_logprobs(recorded: SqliteStore, model_dir: Path) -> None:
    sessions = recorded_sessions(recorded, "sampler")
    report = asyncio.run(
        open_and_score(
            sessions,
            lambda columns: recorded.write(*columns),
            "transformers",
            model_dir,
            column="sampler",
            precision="float32",
        )
    )
    assert report.causes == ()
    assert report.numeric.tokens == report.tokens > 0
    assert report.numeric.max < 1e-4
    model = load(model_dir)
    for stored in recorded.iter_sessions(per_token=True):
        for trajectory in stored.trajectories():
            rows = forward(model, trajectory.token_ids)
            at = np.flatnonzero(trajectory.loss_mask)
            np.testing.assert_allclose(
                trajectory.columns["sampler"][at], rows[at - 1, trajectory.token_ids[at]], atol=1e-4
            )
