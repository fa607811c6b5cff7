"""Recorded logprobs of the tiny model compared with a correct trainer and several wrong ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tokentape
from tests.conftest import ServeTiny
from tests.test_client import talk
from tokentape.audit._statistics import K3_CLAMP, logprob_numbers
from tokentape.audit._tokendiff.retokenizing import retokenized
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines import _loading as loading
from tokentape.errors import InvalidRequest
from tokentape.training._logprob_check import (
    Forward,
    LogprobLimits,
    LogprobReport,
    ModelForward,
    TrainerRow,
    check_logprobs,
    forward_pass,
    read_rows,
)
from tokentape.types import TokenDistribution, TokenIds, Trajectory

EXACT = LogprobLimits(mean=1e-4, delta=1e-4, k3=1e-6)


@pytest.fixture(scope="session")
def forward(model_dir: Path) -> Forward:
    return forward_pass(model_dir, device="cpu", chunk=64)


@pytest.fixture(scope="session")
def tokenizer(renderer: Renderer) -> Tokenizer:
    return renderer.tokenizer


@pytest.fixture(scope="module")
def recorded(serve_tiny: ServeTiny, tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    """Record two sessions of an agent with the tiny model through the gateway."""
    with serve_tiny(tmp_path_factory.mktemp("recorded")) as (url, _), tokentape.Client(url) as client:
        for name in ("a", "b"):
            talk(client.session(name).base_url)
        return [
            trajectory
            for session in client.sessions()
            for trajectory in client.session(session.session_id).trajectories()
        ]


def resegmented(tokenizer: Tokenizer, trajectory: Trajectory) -> tuple[TokenIds, int]:
    """Return the ids with a sampled token split into single bytes, and its position."""
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    at = next(
        n
        for n in np.flatnonzero(trajectory.loss_mask)
        if len(tokenizer.token_bytes(int(trajectory.token_ids[n]))) in range(2, 9)
    )
    pieces = [by_bytes[bytes([byte])] for byte in tokenizer.token_bytes(int(trajectory.token_ids[at]))]
    return np.concatenate([trajectory.token_ids[:at], pieces, trajectory.token_ids[at + 1 :]]).astype(np.int32), at


def channels(report: LogprobReport, limits: LogprobLimits = EXACT) -> set[str]:
    return {channel for channel, _ in report.failures(limits)}


def row_of(trajectory: Trajectory, ids: TokenIds) -> dict[tuple[str, int], TrainerRow]:
    return {(trajectory.session_id, trajectory.leaf): TrainerRow(ids, None)}


def test_sampling_model_differs_only_by_rounding(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    report = check_logprobs(recorded, forward=forward, tokenizer=tokenizer)
    assert report.numeric.tokens == sum(int(trajectory.loss_mask.sum()) for trajectory in recorded) > 20
    assert report.failures(EXACT) == []
    assert report.numeric.ess_tokens == pytest.approx(1)


def test_chunk_size_of_the_forward_pass_does_not_change_the_report(
    model_dir: Path, recorded: Sequence[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = recorded[0].token_ids
    # In float64, so that the order of summation does not matter.
    monkeypatch.setitem(loading._DTYPES, "float64", torch.float64)
    whole, cut = (forward_pass(model_dir, dtype="float64", device="cpu", chunk=size)(ids) for size in (4096, 7))
    assert np.isnan(whole[0])
    np.testing.assert_allclose(whole, cut, atol=1e-5)


def test_perturbed_model_fails_only_in_the_numeric_channel(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    noise = np.random.default_rng(0)

    def perturbed(ids: TokenIds) -> np.ndarray:
        return (forward(ids) + noise.normal(0, 0.3, len(ids))).astype(np.float32)

    report = check_logprobs(recorded, forward=perturbed, tokenizer=tokenizer)
    assert channels(report) == {"numeric"} == channels(report, LogprobLimits())
    assert {outlier.channel for outlier in report.outliers} == {"numeric"}


def test_retokenized_batch_fails_only_in_id_drift(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    trajectory = recorded[0]
    ids, at = resegmented(tokenizer, trajectory)
    report = check_logprobs([trajectory], rows=row_of(trajectory, ids), forward=forward, tokenizer=tokenizer)
    assert channels(report) == {"id drift"}
    assert report.id_drift.changed_tokens == 1
    assert report.numeric.tokens == int(trajectory.loss_mask[:at].sum())
    assert report.numeric.tokens + report.after_drift.tokens == int(trajectory.loss_mask.sum()) - 1
    assert report.after_drift.max > 1e-3
    (outlier, *_) = report.outliers
    assert (outlier.channel, outlier.drift_class) == ("id drift", *report.id_drift.classes)
    assert outlier.position > at
    assert outlier.text == tokenizer.decode([outlier.token_id])


def test_rerendered_batch_fails_only_in_text_drift(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    trajectory = recorded[0]
    at = int(trajectory.completion_starts[1])
    ids = np.concatenate(
        [trajectory.token_ids[:at], tokenizer.encode_plain(" other text"), trajectory.token_ids[at:]]
    ).astype(np.int32)
    report = check_logprobs([trajectory], rows=row_of(trajectory, ids), forward=forward, tokenizer=tokenizer)
    assert channels(report) == {"text drift"}
    assert report.numeric.tokens == int(trajectory.loss_mask[:at].sum())


def test_effect_of_retokenizing_is_reported_without_failing(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    trajectory = recorded[0]
    ids, _ = resegmented(tokenizer, trajectory)
    loss_mask, logprobs = np.zeros(len(ids), np.bool_), forward(ids)
    loss_mask[trajectory.completion_starts[0] :] = True
    split = replace(
        trajectory, token_ids=ids, loss_mask=loss_mask, logprobs=logprobs, completion_ends=np.array([len(ids)] * 2)
    )
    report = check_logprobs([split], forward=forward, tokenizer=tokenizer)
    assert report.failures(EXACT) == []
    assert report.if_retokenized is not None
    assert report.if_retokenized.changed_tokens > 0
    real = check_logprobs(
        [split], rows=row_of(split, retokenized(tokenizer, ids)), forward=forward, tokenizer=tokenizer
    )
    assert channels(real) == {"id drift"}
    assert real.id_drift == report.if_retokenized


def test_drift_in_the_context_alone_counts(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    trajectory = replace(recorded[0], loss_mask=recorded[0].loss_mask.copy())
    ids, at = resegmented(tokenizer, trajectory)
    trajectory.loss_mask[at] = False
    report = check_logprobs([trajectory], rows=row_of(trajectory, ids), forward=forward, tokenizer=tokenizer)
    assert report.id_drift.changed_tokens == 0
    assert channels(report) == {"id drift"}


@pytest.mark.parametrize("lost", [1, 12])
@pytest.mark.parametrize("classified", [True, False])
def test_truncated_row_is_a_row_failure(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer, lost: int, classified: bool
) -> None:
    """Regression: it passed, without reporting the tokens that the trainer lacks, such as an end of turn."""
    trajectory = recorded[0]
    rows = row_of(trajectory, trajectory.token_ids[:-lost])
    report = check_logprobs([trajectory], rows=rows, forward=forward, tokenizer=tokenizer if classified else None)
    trained = int(trajectory.loss_mask[-lost:].sum())
    assert (report.cut, report.cut_tokens) == (1, trained)
    assert channels(report) == {"rows"}
    ((_, message),) = report.failures(EXACT)
    assert f"1 cut in the trainer's file, without {trained} trained tokens" in message
    assert report.failures(replace(EXACT, missing=1)) == []


def test_a_share_of_drift_can_be_allowed(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    trajectory = recorded[0]
    ids, _ = resegmented(tokenizer, trajectory)
    report = check_logprobs([trajectory], rows=row_of(trajectory, ids), forward=forward, tokenizer=tokenizer)
    assert report.failures(replace(EXACT, drift=0.5)) == []


def test_trainer_logprobs_are_used_and_nan_is_a_failure(recorded: Sequence[Trajectory]) -> None:
    recorded = recorded[:1]
    (trajectory,) = recorded
    logprobs = trajectory.logprobs.copy()
    rows = {(trajectory.session_id, trajectory.leaf): TrainerRow(None, logprobs)}
    assert check_logprobs(recorded, rows=rows).failures(EXACT) == []
    assert check_logprobs(recorded, rows=rows).without_trainer == len(recorded) - 1
    logprobs[trajectory.completion_starts[0]] = np.nan
    report = check_logprobs(recorded, rows=rows)
    assert report.numeric.not_finite == 1
    assert channels(report) == {"numeric"}


def test_tokens_without_a_recorded_logprob_are_counted(recorded: Sequence[Trajectory]) -> None:
    """Regression: they were in no count."""
    trajectory = recorded[0]
    logprobs = trajectory.logprobs.copy()
    logprobs[np.flatnonzero(trajectory.loss_mask)[:3]] = np.nan
    row = TrainerRow(None, trajectory.logprobs)
    key = (trajectory.session_id, trajectory.leaf)
    report = check_logprobs([replace(trajectory, logprobs=logprobs)], rows={key: row})
    assert report.not_comparable == {"the recorded logprob is not a finite number": 3}
    assert report.id_drift.tokens == report.numeric.tokens + 3 == trajectory.loss_mask.sum()


def test_comparing_no_tokens_is_a_failure(recorded: Sequence[Trajectory]) -> None:
    report = check_logprobs(recorded, rows={("nobody", 0): TrainerRow(None, np.zeros(1, np.float32))})
    assert (report.sequences, report.unknown) == (0, 1)
    assert report.failures(LogprobLimits())[1:] == [("numeric", "no token was compared")]


def test_incomparable_rows_are_refused(recorded: Sequence[Trajectory]) -> None:
    trajectory = recorded[0]
    key = (trajectory.session_id, trajectory.leaf)
    with pytest.raises(InvalidRequest, match=r"the trainer has \d+ logprobs for \d+ ids"):
        check_logprobs([trajectory], rows={key: TrainerRow(None, trajectory.logprobs[1:])})
    with pytest.raises(InvalidRequest, match="pass a model"):
        check_logprobs([trajectory], rows={key: TrainerRow(trajectory.token_ids, None)})
    with pytest.raises(InvalidRequest, match="pass the model folder"):
        check_logprobs([trajectory], rows={key: TrainerRow(trajectory.token_ids[::-1], trajectory.logprobs)})


def test_ids_outside_the_vocabulary_are_refused(forward: Forward) -> None:
    with pytest.raises(InvalidRequest, match="4000 embedding rows"):
        forward(np.array([1, 4000], np.int32))


def test_numbers_match_hand_computed_values() -> None:
    numbers = logprob_numbers([np.array([0.0, np.log(2)]), np.array([-np.log(2)])])
    assert numbers.tokens == 3
    assert numbers.mean == pytest.approx(2 * np.log(2) / 3)
    assert numbers.max == pytest.approx(np.log(2))
    assert numbers.k3 == pytest.approx(((2 - 1 - np.log(2)) + (0.5 - 1 + np.log(2))) / 3)
    assert numbers.ess_tokens == pytest.approx(3.5**2 / (1 + 4 + 0.25) / 3)
    assert numbers.ess_sequences == pytest.approx(2.5**2 / (4 + 0.25) / 2)


@given(st.lists(st.lists(st.floats(), max_size=5), max_size=4))
@example([[2.0**52, 2.0**52]])
def test_numbers_stay_within_their_ranges(differences: list[list[float]]) -> None:
    numbers = logprob_numbers([np.clip(difference, -1e300, 1e300) for difference in map(np.array, differences)])
    assert 0 <= numbers.k3 <= K3_CLAMP
    assert 0 < numbers.ess_tokens <= 1 + 1e-9
    assert numbers.tokens + numbers.not_finite == sum(map(len, differences))


def test_rows_are_read_from_json_lines_and_parquet(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "leaf": 0, "trainer_logprobs": [None, -1.5]},
        {"session_id": "a", "leaf": 1, "token_ids": [3, 4], "logprobs": [9.0, 9.0]},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    # The second row has a column in JSON lines only.
    pq.write_table(pa.Table.from_pylist([{"token_ids": None, **rows[0]}, rows[1]]), tmp_path / "t.parquet")
    for name in ("t.jsonl", "t.parquet"):
        by_key = read_rows(tmp_path / name)
        first, second = by_key["a", 0], by_key["a", 1]
        assert first.token_ids is None
        assert first.logprobs is not None
        np.testing.assert_array_equal(first.logprobs, np.array([np.nan, -1.5], np.float32))
        assert second.token_ids is not None
        assert (second.token_ids.tolist(), second.logprobs) == ([3, 4], None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"session_id": "a", "leaf": 0}', "expected session_id, leaf, and token_ids"),
        (b"{", "line 1 is not JSON"),
        (b"\xff", "line 1 is not JSON"),
        (b"[]", "expected an object"),
        (b'{"session_id": "a", "leaf": null, "token_ids": [1]}', "expected leaf .* found None"),
        (b'{"session_id": "a", "leaf": 1.5, "token_ids": [1]}', "expected leaf .* found 1.5"),
        (b'{"session_id": "a", "leaf": 0, "token_ids": [1.5]}', "token_ids: expected a list of token ids"),
        (b'{"session_id": "a", "leaf": 0, "token_ids": [1099511627776]}', "token_ids: expected a list of token ids"),
        (b'{"session_id": "a", "leaf": 0, "trainer_logprobs": ["x"]}', "trainer_logprobs: expected a list of numbers"),
        (b'{"session_id": "a", "leaf": 0, "trainer_logprobs": 0.5}', "trainer_logprobs: expected a list of numbers"),
    ],
)
def test_row_without_usable_values_is_refused(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InvalidRequest, match=reason):
        read_rows(tmp_path / "t.jsonl")


def test_duplicate_rows_and_other_file_kinds_are_refused(tmp_path: Path) -> None:
    line = '{"session_id": "a", "leaf": 0, "token_ids": [1]}\n'
    (tmp_path / "t.jsonl").write_text(line * 2)
    with pytest.raises(InvalidRequest, match="already has a row"):
        read_rows(tmp_path / "t.jsonl")
    shutil.copyfile(tmp_path / "t.jsonl", tmp_path / "t.parquet")
    with pytest.raises(InvalidRequest, match="not a Parquet file"):
        read_rows(tmp_path / "t.parquet")


HIDDEN = {
    "top-p": TokenDistribution(False, 1.0, True, False),
    "penalties": TokenDistribution(True, 1.0, False, False),
    "old record": None,
}


@pytest.mark.parametrize("of", HIDDEN.values(), ids=HIDDEN)
def test_cut_and_wrong_rows_are_counted_where_no_logprob_is_comparable(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer, of: TokenDistribution | None
) -> None:
    """Regression: tokens of these turns were left out of all counts, so any batch passed."""
    trajectory = replace(recorded[0], logprobs_of=(of,) * len(recorded[0].turns))
    trained = int(trajectory.loss_mask.sum())
    right = check_logprobs(
        [trajectory], rows=row_of(trajectory, trajectory.token_ids), forward=forward, tokenizer=tokenizer
    )
    assert (right.compared, right.not_comparable) == (0, {next(iter(right.not_comparable)): trained})
    assert [channel for channel, _ in right.failures(EXACT)] == ["numeric"]
    assert right.if_retokenized is not None
    assert right.if_retokenized.tokens == right.text_drift.tokens == trained
    cut = check_logprobs(
        [trajectory], rows=row_of(trajectory, trajectory.token_ids[:-3]), forward=forward, tokenizer=tokenizer
    )
    assert (cut.cut, cut.cut_tokens) == (1, int(trajectory.loss_mask[-3:].sum()))
    assert "rows" in channels(cut)
    other = np.full_like(trajectory.token_ids, 5)
    wrong = check_logprobs([trajectory], rows=row_of(trajectory, other), forward=forward, tokenizer=tokenizer)
    assert wrong.text_drift.changed_tokens > 0.9 * trained
    assert "text drift" in channels(wrong, replace(EXACT, drift=0.01))
    alone = check_logprobs([trajectory], forward=forward, tokenizer=tokenizer)
    assert alone.if_retokenized == right.if_retokenized


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_batch_with_only_ids_is_compared_at_the_turn_s_temperature(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer, temperature: float
) -> None:
    """Regression: its tokens were not comparable, and so neither cut nor changed."""
    heated = TokenDistribution(False, temperature, False, False)
    trajectory = replace(recorded[0], logprobs_of=(heated,) * len(recorded[0].turns))
    assert isinstance(forward, ModelForward)
    scores = forward.scores(trajectory.token_ids, 1, 4000)
    rescaled = scores.logprobs / temperature - np.log(np.exp(scores.top.astype(np.float64) / temperature).sum(1))
    trajectory = replace(trajectory, logprobs=np.concatenate([[0], rescaled]).astype(np.float32))
    trained = int(trajectory.loss_mask.sum())
    rows = row_of(trajectory, trajectory.token_ids)
    report = check_logprobs([trajectory], rows=rows, forward=forward, tokenizer=tokenizer)
    assert (report.numeric.tokens, dict(report.not_comparable)) == (trained, {})
    assert report.failures(EXACT) == []
    cut = check_logprobs([trajectory], rows=row_of(trajectory, trajectory.token_ids[:-3]), forward=forward)
    assert (cut.numeric.tokens, cut.cut_tokens) == (trained - cut.cut_tokens, int(trajectory.loss_mask[-3:].sum()))
    ids, at = resegmented(tokenizer, trajectory)
    drifted = check_logprobs([trajectory], rows=row_of(trajectory, ids), forward=forward, tokenizer=tokenizer)
    assert channels(drifted) == {"id drift"}
    assert drifted.numeric.tokens == int(trajectory.loss_mask[:at].sum())
    assert drifted.after_drift.tokens == trained - 1 - drifted.numeric.tokens
    assert drifted.after_drift.max > 1e-3
    # Another context explains those differences, so they have no cause.
    assert drifted.causes == ()


def test_cause_is_named_for_a_batch_with_only_ids(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    trajectory = replace(recorded[0], logprobs=recorded[0].logprobs - np.float32(2) * recorded[0].loss_mask)
    rows = row_of(trajectory, trajectory.token_ids)
    by_rows = check_logprobs([trajectory], rows=rows, forward=forward, tokenizer=tokenizer)
    assert by_rows.causes == check_logprobs([trajectory], forward=forward, tokenizer=tokenizer).causes != ()


@pytest.mark.parametrize("length", [0, 1, 2])
def test_rows_of_hardly_any_ids_are_cut_rows(recorded: Sequence[Trajectory], forward: Forward, length: int) -> None:
    trajectory = recorded[0]
    rows = row_of(trajectory, trajectory.token_ids[:length])
    report = check_logprobs([trajectory], rows=rows, forward=forward)
    assert (report.cut_tokens, report.compared) == (int(trajectory.loss_mask.sum()), 0)
    assert "rows" in channels(report)
