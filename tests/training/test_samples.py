from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import bits, finite, trees, turn_columns
from tests.searching import examples
from tests.session.builders import assistant, make_turn, user
from tests.session.trajectory_cases import make_trajectory
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.errors import InvalidRequest
from tokentape.training._collate import group_advantages, packed, padded, with_column
from tokentape.training._samples import (
    AssemblyReport,
    DropRetries,
    KeepVerdicts,
    MaxLength,
    Sample,
    Select,
    Split,
    assemble,
    longest_branch,
    one_per_leaf,
    one_per_turn,
    write_samples,
)
from tokentape.training.exports import trl_rollouts
from tokentape.types import MediaSpan, Provenance, Reward, SessionInfo, TokenRows, Trajectory, Turn, TurnColumn

QUESTION, NEXT = [user("a")], [user("b")]


def forked() -> Session:
    """Turn 0 asks; 1 and 2 both answer the question after it, 3 continues 1, 4 asks another question after 0."""
    return Session(
        SessionInfo("s", 0.0, {"task": 7}),
        [
            make_turn(0, None, QUESTION, assistant("A"), added=[1, 2], completion=[3, 4]),
            make_turn(1, 0, NEXT, assistant("B"), added=[5], completion=[6, 7]),
            make_turn(2, 0, NEXT, assistant("C"), added=[5], completion=[8], fork="sibling"),
            make_turn(3, 1, [user("c")], assistant("D"), added=[9], completion=[10]),
            make_turn(4, 0, [user("d")], assistant("E"), added=[11], completion=[12], fork="branched"),
        ],
    )


def trained_ids(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids[sample.loss_mask].tolist() for sample in samples]


def test_default_is_a_sample_per_leaf_with_shared_turns_trained_once() -> None:
    made = assemble(trajectories(forked()))
    assert [sample.leaf for sample in made.samples] == [2, 3, 4]
    assert trained_ids(made.samples) == [[3, 4, 8], [6, 7, 10], [12]]
    assert made.report == AssemblyReport(sessions=1, trajectories=3, samples=3, tokens=21, trained_tokens=7)


def test_sample_of_a_whole_path_equals_the_trajectory() -> None:
    whole = make_trajectory(
        columns={"advantages": np.arange(6, dtype=np.float32)},
        payloads={"experts": TokenRows(np.ones((6, 2), np.uint8), np.ones(6, bool))},
        media=(MediaSpan(0, 2, "a", "b"),),
    )
    (sample,) = assemble([whole]).samples
    for field in fields(Trajectory):
        assert bits(getattr(sample, field.name)) == bits(getattr(whole, field.name)), field.name


def test_one_per_turn_trains_each_turn_after_its_context() -> None:
    made = assemble(trajectories(forked()), split=one_per_turn)
    assert [sample.leaf for sample in made.samples] == [0, 1, 2, 3, 4]
    assert trained_ids(made.samples) == [[3, 4], [6, 7], [8], [10], [12]]
    assert made.samples[3].token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 10]


def test_longest_branch_has_the_most_tokens_and_is_fully_trained() -> None:
    made = assemble(trajectories(forked()), select=[longest_branch])
    assert trained_ids(made.samples) == [[3, 4, 6, 7, 10]]
    assert made.report.not_selected == 2


@pytest.mark.parametrize(
    ("keep", "leaves", "trained"),
    [
        ("last", [2, 4], [[3, 4, 8], [12]]),
        ("first", [3, 4], [[3, 4, 6, 7, 10], [12]]),
        ("continued", [3, 4], [[3, 4, 6, 7, 10], [12]]),
    ],
)
def test_one_retry_is_kept_and_the_rest_trains_the_prefix(
    keep: str, leaves: list[int], trained: list[list[int]]
) -> None:
    made = assemble(trajectories(forked()), select=[DropRetries(keep)])  # type: ignore[arg-type]
    assert [sample.leaf for sample in made.samples] == leaves
    assert trained_ids(made.samples) == trained


def test_last_of_several_unused_retries_is_kept() -> None:
    turns = [make_turn(n, None, QUESTION, assistant("A"), fork="sibling" if n else None) for n in range(3)]
    made = assemble(trajectories(Session(SessionInfo("s", 0.0), turns)), select=[DropRetries("continued")])
    assert [sample.leaf for sample in made.samples] == [2]


def test_verdicts_select_branches_and_the_rest_still_trains_the_shared_prefix() -> None:
    made = assemble(trajectories(forked()), select=[KeepVerdicts(("forked:branched",))])
    assert trained_ids(made.samples) == [[3, 4, 12]]
    with pytest.raises(InvalidRequest):
        KeepVerdicts(("perfect",))


def test_tokens_of_aborted_turns_are_in_no_sample() -> None:
    turns = [
        make_turn(0, None, QUESTION, assistant("A"), completion=[3]),
        make_turn(1, 0, NEXT, assistant("B"), completion=[4], finish_reason="abort"),
    ]
    made = assemble(trajectories(Session(SessionInfo("s", 0.0), turns)))
    assert trained_ids(made.samples) == [[3]]


def test_too_long_samples_are_dropped_and_shared_turns_trained_elsewhere() -> None:
    made = assemble(trajectories(forked()), max_length=MaxLength(6, "drop"), select=[DropRetries("first")])
    assert trained_ids(made.samples) == [[3, 4, 12]]
    assert made.report.too_long == 1


def test_too_long_samples_are_truncated_at_the_maximum() -> None:
    made = assemble(trajectories(forked()), max_length=MaxLength(6, "cut"))
    assert trained_ids(made.samples) == [[3, 4, 8], [6], [12]]
    second = made.samples[1]
    assert second.turns == (0, 1)
    assert second.completion_ends.tolist() == [4, 6]
    assert second.weight_spans == ((2, 4, "1"), (5, 6, "1"))
    assert (second.finish_reasons, second.truncated) == (("stop", "length"), True)
    report = made.report
    assert (report.cut, report.cut_tokens, report.cut_trained_tokens, report.nothing_to_train) == (1, 3, 2, 0)


def test_truncated_sample_ends_with_a_sampled_token() -> None:
    made = assemble(trajectories(forked())[:1], max_length=MaxLength(5, "cut"))
    assert made.samples[0].token_ids.tolist() == [1, 2, 3, 4]
    assert made.report.cut_tokens == 2


def test_samples_without_trained_tokens_are_dropped() -> None:
    made = assemble(trajectories(forked()), max_length=MaxLength(4, "cut"))
    assert trained_ids(made.samples) == [[3, 4]]
    assert made.report.nothing_to_train == 2


def test_maximum_below_1_and_unknown_overflow_mode_are_refused() -> None:
    for wrong in ((0, "cut"), (5, "squeeze")):
        with pytest.raises(InvalidRequest):
            MaxLength(*wrong)  # type: ignore[arg-type]


def test_different_runs_with_equal_session_ids_are_refused_but_copies_are_not() -> None:
    """Regression: the second run was taken for branches of the first, and its tokens were not trained."""
    other = make_turn(0, None, QUESTION, assistant("Z"), added=[1, 2], completion=[3, 9])
    first, second = trajectories(forked()), trajectories(Session(SessionInfo("s", 0.0, {"task": 7}), [other]))
    with pytest.raises(InvalidRequest, match=r"turn 0 has other tokens .* two runs with the same session id"):
        assemble([*first, *second])
    assert trained_ids(assemble([*first, *first]).samples) == trained_ids(assemble(first).samples)


@pytest.mark.parametrize("change", [{"completion_starts": -1}, {"completion_ends": -1}, {"provenance": 0}])
def test_completions_unlike_the_sampled_tokens_are_refused(change: dict[str, int]) -> None:
    """Regression: context was trained, or sampled tokens were not."""
    (name,) = change
    whole = trajectories(forked())[0]
    moved = getattr(whole, name).copy()
    if name == "provenance":
        moved[0] = Provenance.SAMPLED
    else:
        moved[-1] += change[name]
    with pytest.raises(InvalidRequest, match="do not fit the provenance of token"):
        assemble([replace(whole, **{name: moved})])


def test_reports_of_several_calls_add_up() -> None:
    once = assemble(trajectories(forked())).report
    assert (once + once).trained_tokens == 2 * once.trained_tokens


def test_a_group_is_named_by_metadata_or_by_a_function() -> None:
    paths = trajectories(forked())
    assert {sample.group for sample in assemble(paths, group="task").samples} == {"7"}
    by_verdict = assemble(paths, group=lambda path: path.verdict).samples
    assert [sample.group for sample in by_verdict] == ["forked: sibling", "exact", "forked: branched"]
    with pytest.raises(InvalidRequest, match="'problem'"):
        assemble(paths, group="problem")
    unnamed = [replace(path, metadata={"task": None}) for path in paths]
    with pytest.raises(InvalidRequest, match="has no 'task' to name its group; its keys: none"):
        assemble(unnamed, group="task")


def column(turn: int, *values: float) -> TurnColumn:
    return TurnColumn("s", turn, "advantages", np.array(values, np.float32), 0.0)


def test_absent_value_is_missing_wherever_its_turn_is_trained() -> None:
    # Turn 0 is trained by the branch of turn 2, which is left out; turn 1 has explicit zeros.
    paths = trajectories(forked(), columns=[column(1, 0, 0)])
    (sample,) = assemble(paths, select=[longest_branch]).samples
    np.testing.assert_array_equal(
        sample.columns["advantages"], np.array([0, 0, np.nan, np.nan, 0, 0, 0, 0, np.nan], np.float32)
    )


def test_value_follows_its_turn_to_the_branch_that_trains_it() -> None:
    paths = trajectories(forked(), columns=[column(0, 0, 0), column(4, 1)])
    (sample,) = assemble(paths, select=[KeepVerdicts(("forked:branched",))]).samples
    assert sample.columns["advantages"].tolist() == [0, 0, 0, 0, 0, 1]


def test_zeros_of_unknown_origin_are_missing() -> None:
    (last,) = trajectories(forked(), columns=[column(0, 0, 0), column(4, 1)])[2:]
    (sample,) = assemble([last]).samples
    np.testing.assert_array_equal(sample.columns["advantages"], np.array([0, 0, np.nan, np.nan, 0, 1], np.float32))


def test_column_accepts_a_number_per_turn_or_per_token() -> None:
    sample = assemble(trajectories(forked())).samples[1]
    assert with_column(sample, "x", 2).columns["x"].tolist() == [0, 0, 0, 0, 0, 2, 2, 0, 2]
    assert with_column(sample, "x", [1, 2, 3]).columns["x"].tolist() == [0, 0, 0, 0, 0, 2, 2, 0, 3]
    assert with_column(sample, "x", np.arange(9)).columns["x"].tolist() == list(range(9))
    with pytest.raises(InvalidRequest, match="9 tokens and 3 turns"):
        with_column(sample, "x", [1, 2])


def rollout(session_id: str, reward: float) -> Trajectory:
    turn = make_turn(0, None, QUESTION, assistant("A"))
    (trajectory,) = trajectories(
        Session(SessionInfo(session_id, 0.0, {"task": 1}), [turn]), [Reward("s", None, reward, 0.0)]
    )
    return trajectory


def test_group_advantages_are_rewards_minus_the_mean_over_sessions() -> None:
    paths = [*trajectories(forked(), [Reward("s", None, 4.0, 0.0)]), rollout("b", 1.0)]
    samples = group_advantages(assemble(paths, group=lambda _: "one").samples, scale=False)
    # Three samples of the first session count as one: the mean is 2.5 and not 3.25.
    assert [float(sample.columns["advantages"][sample.loss_mask][0]) for sample in samples] == [1.5, 1.5, 1.5, -1.5]
    scaled = group_advantages(samples)
    assert float(scaled[0].columns["advantages"][4]) == 0
    assert float(scaled[0].columns["advantages"][2]) == pytest.approx(1.0, abs=1e-5)


def test_advantages_need_a_reward_and_a_group() -> None:
    with pytest.raises(InvalidRequest, match="no group"):
        group_advantages(assemble([rollout("a", 1.0)]).samples)
    with pytest.raises(InvalidRequest, match="no reward"):
        group_advantages(assemble(trajectories(forked()), group="task").samples)


@pytest.mark.parametrize("reward", [1e300, float("nan")])
def test_rewards_without_a_finite_deviation_are_refused(reward: float) -> None:
    samples = assemble([rollout("a", reward), rollout("b", 0.0)], group=lambda _: "one").samples
    with pytest.raises(InvalidRequest, match="group 'one' has a reward"):
        group_advantages(samples)


selects = st.lists(
    st.sampled_from([longest_branch, DropRetries("first"), DropRetries("last"), DropRetries("continued")]), max_size=2
)
maxima = st.none() | st.builds(MaxLength, st.integers(1, 80), st.sampled_from(["cut", "drop"]))


@st.composite
def recorded_sessions(draw: st.DrawFn) -> tuple[list[Turn], list[TurnColumn], list[Reward]]:
    turns = draw(trees("s", "setup", max_turns=6))
    # Images are left out: each would need a message that contains it.
    for n, turn in enumerate(turns):
        media = turn.added_provenance == Provenance.MEDIA
        turns[n] = replace(turn, messages=(), added_provenance=np.where(media, np.uint8(2), turn.added_provenance))
    some = st.lists(st.sampled_from([turn for turn in turns if len(turn.completion_ids)] or turns), max_size=3)
    columns = [draw(turn_columns(turn)) for turn in draw(some) if len(turn.completion_ids)]
    return turns, columns, [Reward("s", None, draw(finite), 0.0)]


@settings(max_examples=examples(100))
@given(recorded_sessions(), selects, st.sampled_from([one_per_leaf, one_per_turn]), maxima)
def test_each_sampled_token_is_trained_at_most_once_and_once_where_a_sample_holds_it(
    recorded: tuple[list[Turn], list[TurnColumn], list[Reward]],
    select: list[Select],
    split: Split,
    max_length: MaxLength | None,
) -> None:
    """Against counts by (turn, offset), and ids found by walking the turns."""
    turns, columns, rewards = recorded
    paths = trajectories(Session(SessionInfo("s", 0.0), turns), rewards, columns)
    made = assemble(paths, select=select, split=split, max_length=max_length)
    trained: Counter[tuple[int, int]] = Counter()
    held: set[tuple[int, int]] = set()
    for sample in made.samples:
        ids: list[int] = []
        for seq in sample.turns:
            ids += turns[seq].added_ids.tolist()
            start = len(ids)
            ids += turns[seq].completion_ids.tolist()
            held |= {(seq, at - start) for at in range(start, min(len(ids), len(sample.token_ids)))}
            trained.update((seq, int(at) - start) for at in np.flatnonzero(sample.loss_mask) if start <= at < len(ids))
        assert sample.token_ids.tolist() == ids[: len(sample.token_ids)]
        assert max_length is None or len(sample.token_ids) <= max_length.tokens
        assert sample.loss_mask.any()
        assert sample.loss_mask.sum() == sum(
            int(sample.loss_mask[a:b].sum())
            for a, b in zip(sample.completion_starts, sample.completion_ends, strict=True)
        )
    assert set(trained.values()) <= {1}
    assert sum(trained.values()) == made.report.trained_tokens
    if split is one_per_leaf:
        assert set(trained) == held
    if not select and max_length is None:
        on_paths = {turn.seq for leaf in paths for turn in turns if turn.seq in leaf.turns}
        assert set(trained) == {(seq, at) for seq in on_paths for at in range(len(turns[seq].completion_ids))}


@settings(max_examples=examples(60))
@given(recorded_sessions(), selects)
def test_trained_token_has_the_last_value_set_for_it_or_none(
    recorded: tuple[list[Turn], list[TurnColumn], list[Reward]], select: list[Select]
) -> None:
    turns, columns, rewards = recorded
    last = {(column.name, column.turn): column.values[-len(turns[column.turn].completion_ids) :] for column in columns}
    paths = trajectories(Session(SessionInfo("s", 0.0), turns), rewards, columns)
    for sample in assemble(paths, select=select).samples:
        for name, values in sample.columns.items():
            for seq, a, b in zip(sample.turns, sample.completion_starts, sample.completion_ends, strict=True):
                if sample.loss_mask[a]:
                    expected = last.get((name, seq), np.full(b - a, np.nan, np.float32))
                    np.testing.assert_array_equal(values[a:b], expected)


def test_a_misspelled_choice_of_retries_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected first, last or continued"):
        DropRetries("newest")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["file.parquet", Path("file.parquet"), None, [{"token_ids": [1]}]])
def test_what_is_no_list_of_trajectories_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected Trajectory objects"):
        assemble(wrong)


@pytest.mark.parametrize("setting", [{"select": longest_branch}, {"select": "longest_branch"}, {"max_length": 100}])
def test_settings_of_another_type_are_refused(setting: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected"):
        assemble(trajectories(forked()), **setting)


@pytest.mark.parametrize(
    "use",
    [
        lambda samples: padded(samples, pad_id=0, vocab_size=100),
        lambda samples: packed(samples, pad_id=0, vocab_size=100),
        group_advantages,
        lambda samples: write_samples(samples, "unwritten.jsonl"),
        trl_rollouts,
    ],
)
def test_the_result_of_assemble_in_place_of_its_samples_is_refused(
    use: Callable[[Any], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match=r"found Assembled, .* `assemble\(...\).samples`"):
        use(assemble(trajectories(forked())))
    assert not [*tmp_path.iterdir()]


def test_advantages_of_an_iterator_are_those_of_a_list() -> None:
    samples = [replace(sample, reward=1.0) for sample in assemble(trajectories(forked()), group="task").samples]
    assert len(group_advantages(iter(samples))) == len(samples)
