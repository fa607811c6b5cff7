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
    measured = Measures(source, reader).measured(source.versions(Listing(limit=1000)))
    return run_of(list(measured[0].values()), group, **more)


def started(store: SqliteStore, turn: Turn) -> float:
    stored = store.load_session(turn.session_id)
    return stored.info.created_at if turn.parent is None else stored.turns[turn.parent].created_at


def by_version(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {weight["weights"]: weight for weight in run["weights"]}


@pytest.fixture
def run(store: SqliteStore, renderer: Renderer) -> dict[str, Any]:
    asyncio.run(record_run(store, renderer))
    return summed(StoreSource(store, ""), renderer)


def test_weights_are_in_the_order_of_their_first_turns(run: dict[str, Any], store: SqliteStore) -> None:
    first: dict[str, float] = {}
    for turn in sorted(
        (turn for stored in store.iter_sessions() for turn in stored.turns), key=lambda turn: turn.created_at
    ):
        first.setdefault(turn.weight_version, turn.created_at)
    assert [(weight["weights"], weight["first_at"]) for weight in run["weights"]] == list(first.items())
    assert len(first) == 3


def test_figures_of_turns_match_the_record(run: dict[str, Any], store: SqliteStore, renderer: Renderer) -> None:
    turns = [turn for stored in store.iter_sessions() for turn in stored.turns]
    strata = measure_drift(store_rows(store), renderer.tokenizer).strata
    drift = {stratum.value: stratum.tokens.share for stratum in strata if stratum.dimension == "weights"}
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
        for trajectory in stored.trajectories():
            for i in np.flatnonzero(
                trajectory.loss_mask & np.isfinite(trajectory.columns.get("trainer_logprobs", np.nan))
            ):
                version = next(name for start, end, name in trajectory.weight_spans if start <= i < end)
                difference = float(trajectory.columns["trainer_logprobs"][i]) - float(trajectory.logprobs[i])
                apart.setdefault(version, []).append(difference)
    for version, numbers in by_version(run).items():
        assert numbers["ratio_tokens"] == len(apart[version])
        assert numbers["ratio"] == pytest.approx(np.exp(apart[version]).mean())


def test_rewards_and_lengths_belong_to_the_first_weights_of_a_session(run: dict[str, Any], store: SqliteStore) -> None:
    sessions = list(store.iter_sessions())
    rewards = {trajectory.session_id: trajectory.reward for stored in sessions for trajectory in stored.trajectories()}
    for version, numbers in by_version(run).items():
        mine = [stored for stored in sessions if stored.turns[0].weight_version == version]
        known = [rewards[stored.info.session_id] for stored in mine]
        values = [reward for reward in known if reward is not None]
        assert (numbers["sessions"], numbers["rewarded"]) == (len(mine), len(values))
        assert numbers["mean"] == (pytest.approx(np.mean(values)) if values else None)
        lengths = [sum(len(turn.completion_ids) for turn in stored.turns) for stored in mine]
        assert numbers["length"] == (pytest.approx(np.mean(lengths)) if mine else None)


def test_groups_have_the_mean_and_deviation_used_for_advantages(run: dict[str, Any], store: SqliteStore) -> None:
    exported = [
        trajectory
        for stored in store.iter_sessions()
        for trajectory in stored.trajectories()
        if trajectory.reward is not None
    ]
    samples = group_advantages(assemble(exported, group="task").samples)
    assert run["group"] == "task"
    assert run["keys"] == {"task": 4}
    groups = {group["value"]: group for group in run["groups"]}
    assert sum(group["sessions"] for group in groups.values()) == SESSIONS
    spreads = set()
    for sample in samples:
        numbers = groups[str(sample.group)]
        expected = (sample.reward - numbers["mean"]) / (numbers["sd"] + 1e-6)
        spreads.add(numbers["sd"])
        assert sample.columns["advantages"][sample.loss_mask] == pytest.approx(expected, abs=1e-4)
    assert len(samples) > 4


def test_missing_records_give_none(store: SqliteStore, tmp_path: Path, renderer: Renderer) -> None:
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


def test_file_gives_the_same_figures_as_the_record(store: SqliteStore, tmp_path: Path, renderer: Renderer) -> None:
    asyncio.run(record_run(store, renderer))
    write_parquet(
        [trajectory for stored in store.iter_sessions(per_token=True) for trajectory in stored.trajectories()],
        tmp_path / "all.parquet",
    )
    recorded = by_version(summed(StoreSource(store, ""), renderer))
    filed = by_version(summed(FileSource(tmp_path / "all.parquet"), renderer))
    for version, numbers in filed.items():
        for name in ("drift", "ratio", "k3", "sessions", "mean", "sd"):
            assert numbers[name] == pytest.approx(recorded[version][name])


def test_concurrent_sessions_count_from_their_start(store: SqliteStore) -> None:
    turns = [make_turn(f"s{n}", 0, created_at=110.0 + n / 1e5) for n in range(50)]
    asyncio.run(store.write(SETUP, *(SessionInfo(turn.session_id, 100.0) for turn in turns), *turns))
    (numbers,) = summed(StoreSource(store, ""))["weights"]
    assert numbers["tokens_per_second"] == pytest.approx(50 * 4 / 10, rel=1e-3)


def test_groups_name_their_best_and_their_worst_session(run: dict[str, Any], store: SqliteStore) -> None:
    rewards = {
        trajectory.session_id: trajectory.reward
        for stored in store.iter_sessions()
        for trajectory in stored.trajectories()
    }
    for group in run["groups"]:
        assert [rewards[session_id] for session_id in group["best_and_worst"]] == [group["most"], group["least"]]


def test_huge_rewards_have_a_mean_and_a_deviation(store: SqliteStore) -> None:
    turns = [make_turn(f"s{n}", 0) for n in range(3)]
    infos = [SessionInfo(turn.session_id, 1.0, {"task": "t"}) for turn in turns]
    values = [1e308, 1e308, -1e308]
    rewards = [Reward(turn.session_id, None, value, 9.0) for turn, value in zip(turns, values, strict=True)]
    asyncio.run(store.write(SETUP, *infos, *turns, *rewards))
    (group,) = summed(StoreSource(store, ""))["groups"]
    assert group["mean"] == pytest.approx(1e308 / 3)
    assert group["sd"] == pytest.approx(np.std([1.0, 1.0, -1.0]) * 1e308)


def test_equal_rewards_have_no_deviation(store: SqliteStore) -> None:
    turns = [make_turn(f"s{n}", 0) for n in range(3)]
    infos = [SessionInfo(turn.session_id, 1.0, {"task": "t"}) for turn in turns]
    rewards = [Reward(turn.session_id, None, 0.1, 9.0) for turn in turns]
    asyncio.run(store.write(SETUP, *infos, *turns, *rewards))
    (group,) = summed(StoreSource(store, ""))["groups"]
    assert (group["rewarded"], group["least"], group["most"], group["sd"]) == (3, 0.1, 0.1, 0.0)
