"""The figures of a run against slow references: loops over the record, `measure_drift`, GRPO's advantages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.records import SETUP, make_turn
from tests.viewer.runs import SESSIONS, record_run
from tokentape._session.arrow import write_parquet
from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._id_rows import store_rows
from tokentape.chat._renderer import Renderer
from tokentape.store import SqliteStore
from tokentape.store._listing import Listing
from tokentape.training import assemble, group_advantages
from tokentape.types import Reward, SessionInfo, Turn
from tokentape.viewer._comparing import RecordReader
from tokentape.viewer._run import Measures, run_of
from tokentape.viewer._source import FileSource, StoreSource, ViewerSource


def summed(source: ViewerSource, renderer: Renderer | None = None, group: str = "", **more: Any) -> dict[str, Any]:
    reader = RecordReader() if renderer is None else RecordReader(renderer.tokenizer, renderer)
    found = Measures(source, reader).measured(source.versions(Listing(limit=1000)))
    return run_of(list(found[0].values()), group, **more)


def started(store: SqliteStore, turn: Turn) -> float:
    stored = store.load_session(turn.session_id)
    return stored.info.created_at if turn.parent is None else stored.turns[turn.parent].created_at


def by_version(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["weights"]: one for one in run["weights"]}


@pytest.fixture
def run(store: SqliteStore, renderer: Renderer) -> dict[str, Any]:
    asyncio.run(record_run(store, renderer))
    return summed(StoreSource(store, ""), renderer)


def test_weights_are_in_the_order_of_their_first_turns(run: dict[str, Any], store: SqliteStore) -> None:
    first: dict[str, float] = {}
    for turn in sorted((turn for one in store.iter_sessions() for turn in one.turns), key=lambda turn: turn.created_at):
        first.setdefault(turn.weight_version, turn.created_at)
    assert [(one["weights"], one["first_at"]) for one in run["weights"]] == list(first.items())
    assert len(first) == 3


def test_figures_of_turns_are_those_of_the_record(run: dict[str, Any], store: SqliteStore, renderer: Renderer) -> None:
    turns = [turn for stored in store.iter_sessions() for turn in stored.turns]
    strata = measure_drift(store_rows(store), renderer.tokenizer).strata
    drift = {one.value: one.tokens.share for one in strata if one.dimension == "weights"}
    for version, numbers in by_version(run).items():
        mine = sorted((turn for turn in turns if turn.weight_version == version), key=lambda turn: turn.created_at)
        ended = [turn for turn in mine if turn.finish_reason != "abort"]
        assert numbers["drift"] == pytest.approx(drift[version])
        assert numbers["truncated"] == sum(turn.finish_reason == "length" for turn in ended) / len(ended)
        assert sum(numbers["forks"].values()) == sum(turn.fork is not None for turn in mine)
        assert sum(numbers["aborts"].values()) == len(mine) - len(ended)
        assert numbers["resumes"] == {}
        begun = min(started(store, turn) for turn in mine)
        tokens = sum(len(turn.completion_ids) for turn in mine)
        assert numbers["tokens_per_second"] == pytest.approx(tokens / (mine[-1].created_at - begun))


def test_ratios_are_exp_of_the_differences(run: dict[str, Any], store: SqliteStore) -> None:
    apart: dict[str, list[float]] = {}
    for stored in store.iter_sessions(per_token=True):
        for one in stored.trajectories():
            for i in np.flatnonzero(one.loss_mask & np.isfinite(one.columns.get("trainer_logprobs", np.nan))):
                version = next(name for start, end, name in one.weight_spans if start <= i < end)
                difference = float(one.columns["trainer_logprobs"][i]) - float(one.logprobs[i])
                apart.setdefault(version, []).append(difference)
    for version, numbers in by_version(run).items():
        assert numbers["ratio_tokens"] == len(apart[version])
        assert numbers["ratio"] == pytest.approx(np.exp(apart[version]).mean())


def test_rewards_and_lengths_are_of_the_sessions_that_weights_began(run: dict[str, Any], store: SqliteStore) -> None:
    sessions = list(store.iter_sessions())
    rewards = {one.session_id: one.reward for stored in sessions for one in stored.trajectories()}
    for version, numbers in by_version(run).items():
        mine = [stored for stored in sessions if stored.turns[0].weight_version == version]
        given = [rewards[one.info.session_id] for one in mine]
        values = [one for one in given if one is not None]
        assert (numbers["sessions"], numbers["rewarded"]) == (len(mine), len(values))
        assert numbers["mean"] == (pytest.approx(np.mean(values)) if values else None)
        lengths = [sum(len(turn.completion_ids) for turn in one.turns) for one in mine]
        assert numbers["length"] == (pytest.approx(np.mean(lengths)) if mine else None)


def test_groups_have_the_mean_and_spread_that_advantages_are_made_with(run: dict[str, Any], store: SqliteStore) -> None:
    exported = [one for stored in store.iter_sessions() for one in stored.trajectories() if one.reward is not None]
    samples = group_advantages(assemble(exported, group="task").samples)
    assert run["group"] == "task"
    assert run["keys"] == {"task": 4}
    groups = {one["value"]: one for one in run["groups"]}
    assert sum(one["sessions"] for one in groups.values()) == SESSIONS
    spreads = set()
    for sample in samples:
        numbers = groups[str(sample.group)]
        expected = (sample.reward - numbers["mean"]) / (numbers["sd"] + 1e-6)
        spreads.add(numbers["sd"])
        assert sample.columns["advantages"][sample.loss_mask] == pytest.approx(expected, abs=1e-4)
    assert len(samples) > 4


def test_what_is_not_recorded_is_none(store: SqliteStore, tmp_path: Path, renderer: Renderer) -> None:
    asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, make_turn("s", 0, fork=None)))
    run = summed(StoreSource(store, ""))
    (numbers,) = run["weights"]
    for name in ("mean", "sd", "drift", "ratio", "k3", "ess"):
        assert numbers[name] is None
    assert numbers["tokens_per_second"] == 4 / 999.5
    assert (numbers["rewarded"], numbers["ratio_tokens"], numbers["truncated"]) == (0, 0, 0.0)
    assert run["groups"] == []
    write_parquet(store.load_session("s").trajectories(), tmp_path / "one.parquet")
    (numbers,) = summed(FileSource(tmp_path / "one.parquet"), aborts_recorded=False)["weights"]
    for name in ("aborts", "resumes", "first_at", "tokens_per_second"):
        assert numbers[name] is None
    assert numbers["truncated"] == 0.0


def test_a_file_says_what_the_record_says(store: SqliteStore, tmp_path: Path, renderer: Renderer) -> None:
    asyncio.run(record_run(store, renderer))
    write_parquet(
        [one for stored in store.iter_sessions(per_token=True) for one in stored.trajectories()],
        tmp_path / "all.parquet",
    )
    recorded = by_version(summed(StoreSource(store, ""), renderer))
    filed = by_version(summed(FileSource(tmp_path / "all.parquet"), renderer))
    for version, numbers in filed.items():
        for name in ("drift", "ratio", "k3", "sessions", "mean", "sd"):
            assert numbers[name] == pytest.approx(recorded[version][name])


def test_sessions_at_the_same_time_count_from_their_beginning(store: SqliteStore) -> None:
    turns = [make_turn(f"s{n}", 0, created_at=110.0 + n / 1e5) for n in range(50)]
    asyncio.run(store.write(SETUP, *(SessionInfo(one.session_id, 100.0) for one in turns), *turns))
    (numbers,) = summed(StoreSource(store, ""))["weights"]
    assert numbers["tokens_per_second"] == pytest.approx(50 * 4 / 10, rel=1e-3)


def test_groups_name_their_best_and_their_worst_session(run: dict[str, Any], store: SqliteStore) -> None:
    rewards = {one.session_id: one.reward for stored in store.iter_sessions() for one in stored.trajectories()}
    for group in run["groups"]:
        assert [rewards[one] for one in group["best_and_worst"]] == [group["most"], group["least"]]


def test_equal_rewards_have_no_spread(store: SqliteStore) -> None:
    turns = [make_turn(f"s{n}", 0) for n in range(3)]
    infos = [SessionInfo(one.session_id, 1.0, {"task": "t"}) for one in turns]
    rewards = [Reward(one.session_id, None, 0.1, 9.0) for one in turns]
    asyncio.run(store.write(SETUP, *infos, *turns, *rewards))
    (group,) = summed(StoreSource(store, ""))["groups"]
    assert (group["rewarded"], group["least"], group["most"], group["sd"]) == (3, 0.1, 0.1, 0.0)
