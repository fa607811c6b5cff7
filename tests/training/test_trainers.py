from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.records import UNCHANGED
from tests.session.trajectory_cases import make_trajectory
from tokentape.engines._base import SamplingParams
from tokentape.engines._distributions import logprobs_of, sampled_from
from tokentape.errors import InvalidRequest
from tokentape.training import exports
from tokentape.training._collate import packed, padded, with_column
from tokentape.training._samples import Sample, assemble
from tokentape.training._trainers import (
    TRAINERS,
    log_served,
    served,
    temperature,
    token_temperatures,
    with_distributions,
)
from tokentape.types import TokenDistribution, Trajectory

PIN = "keep all calls at temperature 1 with `tokentape serve --pin temperature=1.0`"
PARAMS = SamplingParams(max_tokens=3)
Meaning = tuple[TokenDistribution | None, TokenDistribution | None]


def sampled(mode: str, **params: Any) -> Meaning:
    params_used = replace(PARAMS, **params)
    return sampled_from(params_used), logprobs_of(f"e 1 {mode}_logprobs", params_used)


def two_turns(first: Meaning, second: Meaning, *, trained: Sequence[bool] = (True, True)) -> Sample:
    """A sample of four tokens of two turns, the second and the last sampled."""
    made = make_trajectory()
    loss_mask = np.array([False, trained[0], False, trained[1]])
    path = replace(
        made,
        token_ids=made.token_ids[:4],
        provenance=np.array([4, 1, 4, 1], np.uint8),
        loss_mask=loss_mask,
        logprobs=np.array([0, -1, 0, -1], np.float32),
        turns=(0, 1),
        completion_starts=np.array([1, 3], np.int32),
        completion_ends=np.array([2, 4], np.int32),
        weight_versions=("1", "1"),
        turn_rewards=np.array([np.nan, np.nan]),
        weight_spans=((1, 2, "1"), (3, 4, "1")),
        sampled_from=(first[0], second[0]),
        logprobs_of=(first[1], second[1]),
        finish_reasons=("stop", "stop"),
    )
    (sample,) = assemble([path]).samples
    return with_column(replace(sample, loss_mask=loss_mask), "advantages", 0.5)


def alike(*meaning: Any, **params: Any) -> Sample:
    return two_turns(sampled(*meaning, **params), sampled(*meaning, **params))


EXPORTS: dict[str, Callable[[Sample], Any]] = {
    "trl": lambda sample: exports.trl_rollouts([sample]),
    "verl": exports.verl_agent_loop_output,
    "verl batch": lambda sample: exports.verl_data_proto([sample], pad_id=0, vocab_size=99),
    "slime": lambda sample: exports.slime_sample(sample, 0, 0),
    "prime-rl": lambda sample: exports.prime_rl_training_sample(sample, "env"),
    "verifiers": lambda sample: exports.verifiers_nodes([sample]),
    "skyrl": lambda sample: exports.skyrl_generator_output([sample]),
    "nemo-rl": lambda sample: exports.nemo_rl_datum(sample, 0),
    "tinker": exports.tinker_datum,
    "agent-lightning": exports.agent_lightning_triplets,
    "padded": lambda sample: padded([sample], pad_id=0, vocab_size=99),
    "packed": lambda sample: packed([sample], pad_id=0, vocab_size=99),
}


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize(
    "sample",
    [
        alike("raw"),
        alike("processed"),
        alike("scaled", top_p=0.9),
        alike("raw", top_k=3, presence_penalty=1.0),
        *(alike(mode, temperature=heat) for mode in ("processed", "scaled") for heat in (0.6, 1.4)),
    ],
    ids=lambda recorded: f"{recorded.sampled_from[0].temperature} {recorded.sampled_from[0].truncation}",
)
def test_logprobs_that_the_trainer_recomputes_are_exported(name: str, sample: Sample) -> None:
    if name == "tinker" and sample.logprobs_of[0] != UNCHANGED:
        with pytest.raises(InvalidRequest, match=r"computes log_softmax\(logits\), but .* sample at 1"):
            EXPORTS[name](sample)
    else:
        EXPORTS[name](sample)


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize(
    ("sample", "help_with"),
    [
        (alike("raw", temperature=1.4), "--logprobs-mode processed_logprobs"),
        (alike("penalised", temperature=0.6), "--logprobs-mode processed_logprobs"),
        (alike("processed", top_p=0.9), "top_p 1.*--logprobs-mode scaled"),
        (alike("processed", min_p=0.1, temperature=0.6), "top_p 1.*--logprobs-mode scaled"),
        (alike("scaled", frequency_penalty=0.1), "without presence, frequency and repetition penalties"),
        (alike("processed", min_tokens=2), "min_tokens"),
        (alike("processed", temperature=0.0), "temperature above 0"),
        (alike("unverified"), "with_distributions"),
        (two_turns((None, None), sampled("raw")), "with_distributions"),
        (two_turns(sampled("raw"), (UNCHANGED, replace(UNCHANGED, grammar=True))), "without a grammar"),
        (two_turns(sampled("raw"), (UNCHANGED, replace(UNCHANGED, grammar=None))), "with_distributions"),
    ],
)
def test_other_logprobs_are_refused_with_the_setting_to_change(name: str, sample: Sample, help_with: str) -> None:
    with pytest.raises(InvalidRequest, match=help_with):
        EXPORTS[name](sample)


MIXED = two_turns(sampled("processed", temperature=0.6), sampled("processed"))


@pytest.mark.parametrize("name", EXPORTS)
def test_a_trained_token_without_a_logprob_is_refused(name: str) -> None:
    """Regression: NaN was exported, which makes the trainer's loss NaN."""
    sample = alike("raw")
    logprobs = np.array([0, -1, 0, np.nan], np.float32)
    with pytest.raises(InvalidRequest, match=r"1 trained tokens of turn 1 .* have no finite logprob"):
        EXPORTS[name](replace(sample, logprobs=logprobs))
    EXPORTS[name](replace(sample, logprobs=logprobs, loss_mask=np.array([False, True, False, False])))


@pytest.mark.parametrize("name", [name for name in EXPORTS if name not in ("padded", "packed")])
@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(name: str, reward: float) -> None:
    """Regression: trainers got it, and computed advantages with it."""
    with pytest.raises(InvalidRequest, match=f"has the reward {reward}, expected a finite number"):
        EXPORTS[name](replace(alike("raw"), reward=reward))


@pytest.mark.parametrize("name", [name for name in EXPORTS if name not in ("padded", "packed")])
def test_a_turn_reward_that_is_infinite_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="has the reward inf, expected a finite number"):
        EXPORTS[name](replace(alike("raw"), turn_rewards=np.array([np.nan, np.inf])))


@pytest.mark.parametrize("name", [name for name in EXPORTS if name not in ("prime-rl", "padded", "packed")])
def test_sample_of_two_temperatures_is_refused_where_the_trainer_takes_one(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"sampled at (0\.6, 1|temperature)"):
        EXPORTS[name](MIXED)


def test_prime_rl_and_batches_have_the_temperature_of_each_turn() -> None:
    assert exports.prime_rl_training_sample(MIXED, "env")["temperatures"] == pytest.approx([1, 0.6, 1, 1])
    np.testing.assert_array_equal(padded([MIXED], pad_id=0, vocab_size=99).temperatures[0], token_temperatures(MIXED))


def test_context_turns_do_not_count() -> None:
    context = two_turns(sampled("raw", temperature=1.4), sampled("raw"), trained=(False, True))
    assert temperature([context], "verl") == 1.0
    assert temperature([two_turns((None, None), (None, None), trained=(False, False))], "verl") == 1.0


def test_batch_of_several_temperatures_is_refused() -> None:
    samples = [alike("processed"), alike("processed", temperature=0.6)]
    with pytest.raises(InvalidRequest, match="SkyRL divides logits by one temperature"):
        exports.skyrl_generator_output(samples)
    assert exports.verl_data_proto(samples[1:], pad_id=0, vocab_size=99)["meta_info"] == {"temperature": 0.6}


def test_a_batch_for_a_loss_without_logprobs_takes_all() -> None:
    greedy = alike("raw", temperature=0.0)
    batch = padded([greedy], pad_id=0, vocab_size=99, check_logprobs=False)
    assert np.isnan(batch.temperatures[batch.loss_mask]).all()
    assert (batch.temperatures[~batch.loss_mask] == 1).all()


def test_distribution_of_an_old_record_can_be_set() -> None:
    old: Trajectory = replace(make_trajectory(), sampled_from=(None,), logprobs_of=(None,))
    (sample,) = assemble([old]).samples
    heated = replace(UNCHANGED, temperature=0.6)
    assert temperature([with_distributions(sample, sampled_from=heated)], "verl") == 0.6
    with pytest.raises(InvalidRequest, match="processed_logprobs"):
        temperature([with_distributions(sample, sampled_from=heated, logprobs_of=UNCHANGED)], "verl")
    # The record is not changed.
    (known,) = assemble([make_trajectory()]).samples
    assert with_distributions(known, sampled_from=heated).sampled_from == (UNCHANGED,)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("mode", ["raw", "penalised", "scaled", "processed", "unverified"])
def test_statement_about_a_mode_matches_the_exports(trainer: str, mode: str) -> None:
    def works(heat: float) -> bool:
        try:
            temperature([alike(mode, temperature=heat)], trainer)
        except InvalidRequest:
            return False
        return True

    check = served(trainer, f"{mode}_logprobs")
    assert (check.status != "fail") is works(1.0)
    assert ("at temperature 1" not in check.found and check.status == "ok") is works(0.6)
    assert (check.status == "ok") is not bool(check.advice)


@pytest.mark.parametrize(
    ("mode", "engine", "level", "begins", "ends"),
    [
        ("processed", "vllm", "INFO", "right for TRL, verl", "Agent Lightning"),
        ("raw", "vllm", "WARNING", "right for every trainer if all calls have temperature 1", PIN),
        ("raw", "vllm", "WARNING", "", f"restart vLLM with `--logprobs-mode processed_logprobs`, or {PIN}"),
        ("raw", "llamacpp", "WARNING", "", f"the default. For other temperatures {PIN}"),
        ("penalised", "sglang", "WARNING", "", f"restart SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, or {PIN}"),
        ("unverified", "vllm", "WARNING", "not for", "or the embedded engine"),
    ],
)
def test_doctor_line_names_the_trainers_of_a_mode_and_the_remedy(
    mode: str, engine: str, level: str, begins: str, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("tokentape.serve")
    caplog.set_level("INFO", log.name)
    log_served(log, f"{mode}_logprobs", engine)
    (line,) = caplog.records
    assert line.levelname == level
    assert line.getMessage().startswith(f"the engine reports {mode}_logprobs, {begins}")
    assert line.getMessage().removesuffix(".").endswith(ends)
