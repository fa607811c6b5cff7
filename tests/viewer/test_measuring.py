"""Measures of sessions against slow references: `measure_drift`, `assemble`, and loops over the record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.records import SETUP, make_turn
from tests.viewer.runs import SESSIONS, corrupt, record_run
from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._id_rows import store_rows
from tokentape.audit._statistics import NumbersTally, logprob_numbers
from tokentape.chat._renderer import Renderer
from tokentape.store import SqliteStore
from tokentape.store._listing import Listing
from tokentape.training import assemble
from tokentape.types import Reward, SessionInfo, TokenDistribution, TurnColumn
from tokentape.viewer._comparing import RecordReader
from tokentape.viewer._run import Measures, SessionMeasures, WeightsTally
from tokentape.viewer._source import StoreSource


@pytest.fixture
def measures(store: SqliteStore, renderer: Renderer) -> Measures:
    asyncio.run(record_run(store, renderer))
    return Measures(StoreSource(store, "store"), RecordReader(renderer.tokenizer, renderer))


def all_of(measures: Measures, store: SqliteStore) -> dict[str, SessionMeasures]:
    return measures.measured(StoreSource(store, "").versions(Listing(limit=100)))[0]


def merged(measures_by_session: dict[str, SessionMeasures]) -> dict[str, WeightsTally]:
    tallies: dict[str, WeightsTally] = {}
    for measured in measures_by_session.values():
        for version, tally in measured.weights.items():
            tallies.setdefault(version, WeightsTally()).merge(tally)
    return tallies


def test_drift_matches_the_command(measures: Measures, store: SqliteStore, renderer: Renderer) -> None:
    report = measure_drift(store_rows(store), renderer.tokenizer)
    measured = all_of(measures, store)
    drifts = [session_measures.drift for session_measures in measured.values() if session_measures.drift is not None]
    assert len(drifts) == SESSIONS
    assert sum(drift["changed_tokens"] for drift in drifts) == report.tokens.changed > 0
    assert sum(drift["tokens"] for drift in drifts) == report.tokens.total
    by_weights = {stratum.value: stratum.tokens for stratum in report.strata if stratum.dimension == "weights"}
    assert {
        version: (tally.counts["drift_changed"], tally.counts["drift_tokens"])
        for version, tally in merged(measured).items()
    } == {version: (rate.changed, rate.total) for version, rate in by_weights.items()}


def test_turns_are_counted_by_their_weights(measures: Measures, store: SqliteStore) -> None:
    turns = [turn for stored in store.iter_sessions() for turn in stored.turns]
    for version, tally in merged(all_of(measures, store)).items():
        mine = [turn for turn in turns if turn.weight_version == version]
        aborted = [turn for turn in mine if turn.finish_reason == "abort"]
        assert tally.counts["turns"] == len(mine)
        assert tally.counts["sampled_tokens"] == sum(len(turn.completion_ids) for turn in mine)
        assert tally.counts["ended"] == len(mine) - len(aborted)
        assert tally.counts["truncated"] == sum(turn.finish_reason == "length" for turn in mine)
        assert tally.aborts["client_left"] == len(aborted)
        assert tally.forks["sibling"] == sum(turn.fork == "sibling" for turn in mine)
        assert tally.first_at == min(t.created_at for t in mine)
        assert tally.last_at == max(t.created_at for t in mine)


def test_rewards_and_verdicts_match_the_samples(measures: Measures, store: SqliteStore) -> None:
    exported = [trajectory for stored in store.iter_sessions() for trajectory in stored.trajectories()]
    samples = assemble(exported, group="task").samples
    for session_id, measured in all_of(measures, store).items():
        rewards = [sample.reward for sample in samples if sample.session_id == session_id]
        assert measured.reward == (None if None in rewards else pytest.approx(np.mean(np.array(rewards, float))))
        assert list(measured.verdicts) == [other.verdict for other in exported if other.session_id == session_id]


def test_ratios_match_the_column(measures: Measures, store: SqliteStore) -> None:
    apart: dict[str, list[Any]] = {}
    for stored in store.iter_sessions(per_token=True):
        values = {column.turn: column.values for column in stored.columns}
        for turn in stored.turns:
            if turn.seq in values and turn.finish_reason != "abort":
                difference = values[turn.seq].astype(np.float64) - turn.logprobs
                apart.setdefault(turn.weight_version, []).append(difference)
    tallies = merged(all_of(measures, store))
    assert set(apart) == {version for version, tally in tallies.items() if tally.ratio.numbers().tokens}
    for version, differences in apart.items():
        together, expected = np.concatenate(differences), logprob_numbers(differences)
        numbers = tallies[version].ratio.numbers()
        assert numbers.tokens == len(together)
        assert numbers.k3 == pytest.approx(expected.k3)
        assert numbers.ess_tokens == pytest.approx(
            np.exp(together).sum() ** 2 / (np.exp(2 * together).sum() * len(together))
        )
        assert tallies[version].ratio.mean_ratio() == pytest.approx(np.exp(together).mean())


def test_merged_tallies_match_a_single_tally() -> None:
    parts = [np.array([0.5, -2.0]), np.array([60.0, 61.0]), np.array([-800.0]), np.array([np.nan])]
    whole, merged = NumbersTally(), NumbersTally()
    for part in parts:
        tally = NumbersTally()
        tally.add(part)
        merged.merge(tally)
        whole.add(part)
    assert merged.numbers() == whole.numbers()


def test_measuring_stops_at_its_time_limit(measures: Measures, store: SqliteStore) -> None:
    versions = StoreSource(store, "").versions(Listing(limit=100))
    assert measures.measured(versions, 0.0) == ({}, {})
    some = dict(list(versions.items())[:3])
    assert set(measures.measured(some)[0]) == set(some)
    # Known measures take no time.
    assert set(measures.measured(versions, 0.0)[0]) == set(some)


def test_without_a_tokenizer_there_is_no_drift(store: SqliteStore, measures: Measures) -> None:
    (measured,) = (
        Measures(StoreSource(store, ""), RecordReader())
        .measured(StoreSource(store, "").versions(Listing(session_ids=["s01"])))[0]
        .values()
    )
    assert measured.drift is None
    assert measured.verdicts == ("forked: sibling",)


def test_unreadable_session_does_not_affect_the_others(measures: Measures, store: SqliteStore, tmp_path: Path) -> None:
    corrupt(tmp_path / "data", "s03")
    source = StoreSource(store, "")
    measured, unreadable = measures.measured(source.versions(Listing(limit=100)))
    assert len(measured) == SESSIONS - 1
    assert list(unreadable) == ["s03"]
    assert "'s03'" in unreadable["s03"]


@pytest.mark.parametrize(
    ("sampled", "recorded", "why"),
    [
        (0.6, TokenDistribution(False, 1.0, False, False), "at temperature 1, but sampled at 0.6: "),
        (1.0, TokenDistribution(False, 1.0, True, False), "after truncation: "),
        (1.0, None, "of a distribution that is not known: "),
    ],
)
def test_logprobs_that_no_trainer_computes_have_no_ratio(
    store: SqliteStore, sampled: float, recorded: TokenDistribution | None, why: str
) -> None:
    plain = TokenDistribution(False, sampled, False, False)
    turns = [
        make_turn("s", 0, sampled_from=plain, logprobs_of=recorded),
        make_turn("t", 0, sampled_from=plain, logprobs_of=plain),
    ]
    columns = [TurnColumn(turn.session_id, 0, "trainer_logprobs", turn.logprobs, 1.0) for turn in turns]
    asyncio.run(store.write(SETUP, *(SessionInfo(session_id, 1.0) for session_id in "st"), *turns, *columns))
    (tally,) = merged(all_of(Measures(StoreSource(store, ""), RecordReader()), store)).values()
    assert tally.ratio.numbers().tokens == len(turns[1].completion_ids)
    ((message, times),) = tally.not_comparable.items()
    assert (message.startswith(why), times) == (True, 1)


def test_mean_of_branches_with_equal_rewards_is_that_reward(store: SqliteStore) -> None:
    turns = [make_turn("s", seq, fork="sibling" if seq else None) for seq in range(3)]
    asyncio.run(store.write(SETUP, SessionInfo("s", 1.0), *turns, Reward("s", None, 0.1, 9.0)))
    (measured,) = all_of(Measures(StoreSource(store, ""), RecordReader()), store).values()
    assert (len(measured.verdicts), measured.reward) == (3, 0.1)
