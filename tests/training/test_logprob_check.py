"""Recorded logprobs of the tiny model against a trainer that is right, and each that is wrong in its own way."""

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
    TrainerRow,
    check_logprobs,
    forward_pass,
    read_rows,
)
from tokentape.types import TokenIds, Trajectory

EXACT = LogprobLimits(mean=1e-4, delta=1e-4, k3=1e-6)


@pytest.fixture(scope="session")
def forward(model_dir: Path) -> Forward:
    return forward_pass(model_dir, device="cpu", chunk=64)


@pytest.fixture(scope="session")
def tokenizer(renderer: Renderer) -> Tokenizer:
    return renderer.tokenizer


@pytest.fixture(scope="module")
def recorded(serve_tiny: ServeTiny, tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    """Two sessions that an agent had with the tiny model through the gateway."""
    with serve_tiny(tmp_path_factory.mktemp("recorded")) as (url, _), tokentape.Client(url) as client:
        for name in ("a", "b"):
            talk(client.session(name).base_url)
        return [one for session in client.sessions() for one in client.session(session.session_id).trajectories()]


def resegmented(tokenizer: Tokenizer, one: Trajectory) -> tuple[TokenIds, int]:
    """The ids with one sampled token spelled by single bytes, and where it was."""
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    at = next(
        n for n in np.flatnonzero(one.loss_mask) if len(tokenizer.token_bytes(int(one.token_ids[n]))) in range(2, 9)
    )
    pieces = [by_bytes[bytes([byte])] for byte in tokenizer.token_bytes(int(one.token_ids[at]))]
    return np.concatenate([one.token_ids[:at], pieces, one.token_ids[at + 1 :]]).astype(np.int32), at


def channels(report: LogprobReport, limits: LogprobLimits = EXACT) -> set[str]:
    return {channel for channel, _ in report.failures(limits)}


def row_of(one: Trajectory, ids: TokenIds) -> dict[tuple[str, int], TrainerRow]:
    return {(one.session_id, one.leaf): TrainerRow(ids, None)}


def test_the_model_that_sampled_is_within_rounding(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    report = check_logprobs(recorded, forward=forward, tokenizer=tokenizer)
    assert report.numeric.tokens == sum(int(one.loss_mask.sum()) for one in recorded) > 20
    assert report.failures(EXACT) == []
    assert report.numeric.ess_tokens == pytest.approx(1)


def test_chunks_of_the_forward_pass_do_not_matter(
    model_dir: Path, recorded: Sequence[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = recorded[0].token_ids
    # In float64, where another order of adding up does not show.
    monkeypatch.setitem(loading._DTYPES, "float64", torch.float64)
    whole, cut = (forward_pass(model_dir, dtype="float64", device="cpu", chunk=size)(ids) for size in (4096, 7))
    assert np.isnan(whole[0])
    np.testing.assert_allclose(whole, cut, atol=1e-5)


def test_a_perturbed_model_fails_in_the_numeric_channel_alone(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    noise = np.random.default_rng(0)

    def perturbed(ids: TokenIds) -> np.ndarray:
        return (forward(ids) + noise.normal(0, 0.3, len(ids))).astype(np.float32)

    report = check_logprobs(recorded, forward=perturbed, tokenizer=tokenizer)
    assert channels(report) == {"numeric"} == channels(report, LogprobLimits())
    assert {one.channel for one in report.outliers} == {"numeric"}


def test_a_retokenized_batch_fails_in_id_drift_alone(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    one = recorded[0]
    ids, at = resegmented(tokenizer, one)
    report = check_logprobs([one], rows=row_of(one, ids), forward=forward, tokenizer=tokenizer)
    assert channels(report) == {"id drift"}
    assert report.id_drift.changed_tokens == 1
    assert report.numeric.tokens == int(one.loss_mask[:at].sum())
    assert report.numeric.tokens + report.behind_drift.tokens == int(one.loss_mask.sum()) - 1
    assert report.behind_drift.max > 1e-3
    (outlier, *_) = report.outliers
    assert (outlier.channel, outlier.drift_class) == ("id drift", *report.id_drift.classes)
    assert outlier.position > at
    assert outlier.text == tokenizer.decode([outlier.token_id])


def test_a_rerendered_batch_fails_in_text_drift_alone(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    one = recorded[0]
    at = int(one.completion_starts[1])
    ids = np.concatenate([one.token_ids[:at], tokenizer.encode_plain(" other text"), one.token_ids[at:]]).astype(
        np.int32
    )
    report = check_logprobs([one], rows=row_of(one, ids), forward=forward, tokenizer=tokenizer)
    assert channels(report) == {"text drift"}
    assert report.numeric.tokens == int(one.loss_mask[:at].sum())


def test_what_retokenizing_would_change_is_told_but_no_failure(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    one = recorded[0]
    ids, _ = resegmented(tokenizer, one)
    loss_mask, logprobs = np.zeros(len(ids), np.bool_), forward(ids)
    loss_mask[one.completion_starts[0] :] = True
    split = replace(
        one, token_ids=ids, loss_mask=loss_mask, logprobs=logprobs, completion_ends=np.array([len(ids)] * 2)
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


def test_a_drift_in_the_context_alone_is_drift_too(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    one = replace(recorded[0], loss_mask=recorded[0].loss_mask.copy())
    ids, at = resegmented(tokenizer, one)
    one.loss_mask[at] = False
    report = check_logprobs([one], rows=row_of(one, ids), forward=forward, tokenizer=tokenizer)
    assert report.id_drift.changed_tokens == 0
    assert channels(report) == {"id drift"}


@pytest.mark.parametrize("lost", [1, 12])
@pytest.mark.parametrize("classified", [True, False])
def test_a_row_that_ends_early_is_a_failure_of_rows(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer, lost: int, classified: bool
) -> None:
    """It was within the limits, without a word on the tokens that the trainer lacks, such as an end of turn."""
    one = recorded[0]
    rows = row_of(one, one.token_ids[:-lost])
    report = check_logprobs([one], rows=rows, forward=forward, tokenizer=tokenizer if classified else None)
    trained = int(one.loss_mask[-lost:].sum())
    assert (report.cut, report.cut_tokens) == (1, trained)
    assert channels(report) == {"rows"}
    ((_, message),) = report.failures(EXACT)
    assert f"1 cut in the trainer's file, without {trained} trained tokens" in message
    assert report.failures(replace(EXACT, missing=1)) == []


def test_a_share_of_drift_can_be_allowed(
    recorded: Sequence[Trajectory], forward: Forward, tokenizer: Tokenizer
) -> None:
    one = recorded[0]
    ids, _ = resegmented(tokenizer, one)
    report = check_logprobs([one], rows=row_of(one, ids), forward=forward, tokenizer=tokenizer)
    assert report.failures(replace(EXACT, drift=0.5)) == []


def test_a_trainer_s_own_logprobs_are_taken_and_nan_is_a_failure(recorded: Sequence[Trajectory]) -> None:
    recorded = recorded[:1]
    (one,) = recorded
    logprobs = one.logprobs.copy()
    rows = {(one.session_id, one.leaf): TrainerRow(None, logprobs)}
    assert check_logprobs(recorded, rows=rows).failures(EXACT) == []
    assert check_logprobs(recorded, rows=rows).without_trainer == len(recorded) - 1
    logprobs[one.completion_starts[0]] = np.nan
    report = check_logprobs(recorded, rows=rows)
    assert report.numeric.not_finite == 1
    assert channels(report) == {"numeric"}


def test_nothing_to_compare_is_a_failure_and_not_a_pass(recorded: Sequence[Trajectory]) -> None:
    report = check_logprobs(recorded, rows={("nobody", 0): TrainerRow(None, np.zeros(1, np.float32))})
    assert (report.sequences, report.unknown) == (0, 1)
    assert report.failures(LogprobLimits())[1:] == [("numeric", "no token was compared")]


def test_rows_that_can_not_be_compared_are_refused(recorded: Sequence[Trajectory]) -> None:
    one = recorded[0]
    key = (one.session_id, one.leaf)
    with pytest.raises(InvalidRequest, match=r"the trainer has \d+ logprobs for \d+ ids"):
        check_logprobs([one], rows={key: TrainerRow(None, one.logprobs[1:])})
    with pytest.raises(InvalidRequest, match="pass a model"):
        check_logprobs([one], rows={key: TrainerRow(one.token_ids, None)})
    with pytest.raises(InvalidRequest, match="pass the model folder"):
        check_logprobs([one], rows={key: TrainerRow(one.token_ids[::-1], one.logprobs)})


def test_ids_that_the_model_has_no_row_of_are_refused(forward: Forward) -> None:
    with pytest.raises(InvalidRequest, match="4000 embedding rows"):
        forward(np.array([1, 4000], np.int32))


def test_numbers_by_hand() -> None:
    found = logprob_numbers([np.array([0.0, np.log(2)]), np.array([-np.log(2)])])
    assert found.tokens == 3
    assert found.mean == pytest.approx(2 * np.log(2) / 3)
    assert found.max == pytest.approx(np.log(2))
    assert found.k3 == pytest.approx(((2 - 1 - np.log(2)) + (0.5 - 1 + np.log(2))) / 3)
    assert found.ess_tokens == pytest.approx(3.5**2 / (1 + 4 + 0.25) / 3)
    assert found.ess_sequences == pytest.approx(2.5**2 / (4 + 0.25) / 2)


@given(st.lists(st.lists(st.floats(), max_size=5), max_size=4))
@example([[2.0**52, 2.0**52]])
def test_numbers_are_within_their_ranges_whatever_comes(differences: list[list[float]]) -> None:
    found = logprob_numbers([np.clip(one, -1e300, 1e300) for one in map(np.array, differences)])
    assert 0 <= found.k3 <= K3_CLAMP
    assert 0 < found.ess_tokens <= 1 + 1e-9
    assert found.tokens + found.not_finite == sum(map(len, differences))


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
        found = read_rows(tmp_path / name)
        first, second = found["a", 0], found["a", 1]
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
    ],
)
def test_a_row_that_says_nothing_is_refused(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InvalidRequest, match=reason):
        read_rows(tmp_path / "t.jsonl")


def test_a_row_twice_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    line = '{"session_id": "a", "leaf": 0, "token_ids": [1]}\n'
    (tmp_path / "t.jsonl").write_text(line * 2)
    with pytest.raises(InvalidRequest, match="already has a row"):
        read_rows(tmp_path / "t.jsonl")
    shutil.copyfile(tmp_path / "t.jsonl", tmp_path / "t.parquet")
    with pytest.raises(InvalidRequest, match="not a Parquet file"):
        read_rows(tmp_path / "t.parquet")
