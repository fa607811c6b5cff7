"""Correct recorded logprobs give no finding; for each kind of wrong ones, the cause is named."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.audit.planted import changed_id, load, perturbed, recorded, sampled
from tokentape.audit._mismatch import LOOK_TOP, TOP, Attribution, Mismatch
from tokentape.audit._rescaling import RAW, Rule
from tokentape.chat._renderer import Renderer
from tokentape.engines._forward import ForwardPass
from tokentape.engines._scoring import SERVER_TOP, Scores
from tokentape.types import TokenDistribution, Trajectory

OWN = TokenDistribution(False, 1.0, False, False)
CUT = Rule(1.0, top_p=0.9)


def heated(temperature: float) -> TokenDistribution:
    return replace(OWN, temperature=temperature)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return load(model_dir)


@pytest.fixture(scope="module")
def plain(model_dir: Path, renderer: Renderer) -> list[Trajectory]:
    """Sampled at temperature 1."""
    return sampled(model_dir, renderer, RAW)


@pytest.fixture(scope="module")
def cut(model_dir: Path, renderer: Renderer) -> list[Trajectory]:
    """Sampled with top-p."""
    return sampled(model_dir, renderer, CUT)


def compared(
    trajectories: Sequence[Trajectory],
    model: Any,
    *,
    top: int = TOP,
    precision: str = "float32",
    sampling: dict[int, Any] | None = None,
    excluded: Any = None,
) -> Mismatch:
    """What an engine that tells `top` alternatives finds."""
    scorer, found = ForwardPass(model, excluded=excluded), Mismatch(precision, 4000)
    for trajectory in trajectories:
        start = int(trajectory.completion_starts[0])
        alternatives = min(found.top_for(trajectory, sampling), top)
        found.add(
            trajectory, trajectory.loss_mask, start, scorer.score(trajectory.token_ids, start, alternatives), sampling
        )
    for doubt in list(found.doubts()):
        found.look(doubt, scorer.score(doubt.trajectory.token_ids[: doubt.end], doubt.start, min(top, LOOK_TOP)))
    return found


def cause(found: Mismatch) -> Attribution:
    (only,) = found.causes()
    return only


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_no_cause_is_named_for_a_correct_record(plain: list[Trajectory], model: Any, temperature: float) -> None:
    found = compared(recorded(plain, model, Rule(temperature), heated(temperature)), model)
    assert (found.causes(), dict(found.not_comparable)) == ((), {})
    assert found.numbers().tokens == sum(int(trajectory.loss_mask.sum()) for trajectory in plain)
    assert found.numbers().max < 1e-4


def test_truncated_distribution_is_compared_if_its_cut_is_known(cut: list[Trajectory], model: Any) -> None:
    right = recorded(cut, model, CUT, replace(OWN, truncation=True))
    found = compared(right, model, sampling={0: {"top_p": 0.9}})
    assert found.causes() == ()
    assert found.numbers().max < 1e-4
    unknown = compared(right, model)
    assert unknown.numbers().tokens == 0
    assert unknown.not_comparable.total() == sum(int(trajectory.loss_mask.sum()) for trajectory in cut)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.4])
@pytest.mark.parametrize("top", [TOP, SERVER_TOP])
def test_temperature_missing_from_the_record_is_found(
    plain: list[Trajectory], model: Any, temperature: float, top: int
) -> None:
    found = cause(compared(recorded(plain, model, Rule(temperature), OWN), model, top=top))
    assert found.causes == ("temperature",)
    assert f"temperature {temperature}" in found.detail


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_wrong_temperature_in_the_record_is_found(plain: list[Trajectory], model: Any, temperature: float) -> None:
    found = cause(compared(recorded(plain, model, RAW, heated(temperature)), model))
    assert (found.causes, found.expected) == (("temperature",), f"temperature {temperature}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("top", [TOP, SERVER_TOP])
@pytest.mark.parametrize("rule", [CUT, Rule(1.0, top_p=0.93)], ids=str)
def test_unrecorded_truncation_is_found(cut: list[Trajectory], model: Any, rule: Rule, top: int) -> None:
    inside = [trajectory for trajectory in recorded(cut, model, rule, OWN) if np.isfinite(trajectory.logprobs).all()]
    found = cause(compared(inside, model, top=top))
    assert found.causes == ("truncation",)


@pytest.mark.slow
def test_temperature_and_truncation_together_are_found(model_dir: Path, renderer: Renderer, model: Any) -> None:
    rule = Rule(1.4, top_p=0.9)
    wrong = recorded(sampled(model_dir, renderer, rule), model, rule, OWN)
    assert cause(compared(wrong, model)).causes == ("temperature", "truncation")
    few = cause(compared(wrong, model, top=1))
    assert set(few.causes) > {"temperature", "truncation"}
    assert "too few alternatives" in few.detail


def test_different_weights_are_found(plain: list[Trajectory], model: Any) -> None:
    assert cause(compared(recorded(plain, perturbed(model, 0.3), RAW, OWN), model)).causes == ("weights",)


def test_lower_precision_looks_like_slightly_different_weights(plain: list[Trajectory], model: Any) -> None:
    for other in (copy.deepcopy(model).to(torch.bfloat16), perturbed(model, 0.01)):
        assert cause(compared(recorded(plain, other, RAW, OWN), model)).causes == ("kernels", "weights")


def test_different_weights_of_one_version_are_found(plain: list[Trajectory], model: Any) -> None:
    later = recorded(plain[5:], perturbed(model, 0.05), RAW, OWN, version="1")
    found = cause(compared([*recorded(plain[:5], model, RAW, OWN), *later], model))
    assert (found.causes, found.weight_version) == (("weights",), "1")


def test_changed_ids_within_a_completion_are_found(plain: list[Trajectory], model: Any) -> None:
    change = changed_id(lambda trajectory: int(trajectory.completion_starts[0]) + 10)
    right = recorded(plain, model, RAW, OWN)
    assert cause(compared([*map(change, right[:3]), *right[3:]], model)).causes == ("ids",)
    assert cause(compared([*map(change, right)], model)).causes == ("ids",)


def test_changed_ids_of_one_weight_version_are_not_called_weights(plain: list[Trajectory], model: Any) -> None:
    change = changed_id(lambda trajectory: int(trajectory.completion_starts[0]) + 10)
    later = map(change, recorded(plain[5:], model, RAW, OWN, version="1"))
    found = cause(compared([*recorded(plain[:5], model, RAW, OWN), *later], model))
    assert (found.causes, found.weight_version) == (("ids",), "1")


def test_changed_ids_before_some_completions_are_found(plain: list[Trajectory], model: Any) -> None:
    change = changed_id(lambda trajectory: int(trajectory.completion_starts[0]) - 8)
    right = recorded(plain, model, RAW, OWN)
    wrong = [*map(change, right[:3]), *right[3:]]
    assert cause(compared(wrong, model)).causes == ("ids", "weights")


@pytest.mark.parametrize(("version", "says"), [("0", "names the same weights"), ("unknown", "does not name their")])
def test_other_weights_under_the_same_version_are_not_called_ids(
    plain: list[Trajectory], model: Any, version: str, says: str
) -> None:
    """As if one of two servers had missed an update. They were `ids`."""
    missed = recorded(plain[5:], perturbed(model, 0.3), RAW, OWN, version=version)
    found = cause(compared([*recorded(plain[:5], model, RAW, OWN, version=version), *missed], model))
    assert found.causes == ("ids", "weights")
    assert says in found.detail


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_bfloat16_rounding_is_not_a_cause_but_a_temperature_is(
    plain: list[Trajectory], model: Any, temperature: float
) -> None:
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    right = recorded(plain, rounded, Rule(temperature), heated(temperature))
    assert compared(right, model, precision="bfloat16").causes() == ()
    if temperature != 1.0:
        wrong = [replace(trajectory, logprobs_of=(OWN,)) for trajectory in right]
        assert cause(compared(wrong, model, precision="bfloat16")).causes == ("temperature",)


@pytest.mark.slow
def test_ids_and_weights_are_distinguished_in_bfloat16(plain: list[Trajectory], model: Any) -> None:
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    change = changed_id(lambda trajectory: int(trajectory.completion_starts[0]) + 10)
    other = [*map(change, recorded(plain, rounded, RAW, OWN))]
    assert cause(compared(other, model, precision="bfloat16")).causes == ("ids",)
    off = recorded(plain, perturbed(model, 0.3).to(torch.bfloat16), RAW, OWN)
    assert cause(compared(off, model, precision="bfloat16")).causes == ("weights",)


def test_penalties_are_not_comparable(plain: list[Trajectory], model: Any) -> None:
    found = compared(recorded(plain, model, RAW, replace(OWN, penalties=True)), model)
    (why,) = found.not_comparable
    assert "after penalties" in why
    assert (found.numbers().tokens, found.causes()) == (0, ())


def test_too_few_alternatives_are_not_comparable(plain: list[Trajectory], model: Any) -> None:
    found = compared(recorded(plain, model, Rule(1.4), heated(1.4)), model, top=2)
    assert any("too few alternatives" in why for why in found.not_comparable)
    assert found.causes() == ()


def test_single_changed_id_is_found(plain: list[Trajectory], model: Any) -> None:
    """Its effect on most later tokens is smaller than the limit, but larger than rounding."""
    change = changed_id(lambda trajectory: int(trajectory.completion_starts[0]))
    right = recorded(plain, model, RAW, OWN)
    assert cause(compared([change(right[0]), *right[1:]], model)).causes == ("ids", "weights")


def test_the_sequences_that_differ_most_are_looked_at(plain: list[Trajectory], model: Any) -> None:
    """The first four were, and here they have one wrong token each."""
    nearly = recorded(plain[:4], model, RAW, OWN)
    for trajectory in nearly:
        trajectory.logprobs[-1] -= 1
    heated_ones = recorded(plain[4:], model, Rule(0.6), OWN)
    assert cause(compared([*nearly, *heated_ones], model)).causes == ("temperature",)


@pytest.mark.parametrize("factor", [0.8, 0.7])
def test_logprobs_higher_than_a_truncation_makes_them_are_not_called_truncated(
    plain: list[Trajectory], model: Any, factor: float
) -> None:
    wrong = recorded(plain, model, RAW, OWN)
    for trajectory in wrong:
        trajectory.logprobs[:] *= factor
    assert "truncation" not in cause(compared(wrong, model)).causes


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_excluded_ids_are_not_called_other_weights(plain: list[Trajectory], model: Any, temperature: float) -> None:
    """The embedded engine never samples embedding rows without a token."""
    excluded = np.ones(4000, bool)
    excluded[np.concatenate([trajectory.token_ids for trajectory in plain])] = False
    mask = torch.from_numpy(excluded)

    def without(ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=model(ids).logits.masked_fill(mask, -torch.inf))

    right = recorded(plain, without, Rule(temperature), heated(temperature))
    found = cause(compared(right, model, excluded=excluded))
    assert (found.causes, "ids that are no tokens" in found.detail) == (("truncation",), True)


def test_a_recorded_logprob_that_is_no_number_is_counted_as_not_compared(plain: list[Trajectory], model: Any) -> None:
    wrong = recorded(plain[:1], model, RAW, OWN)
    wrong[0].logprobs[-1] = -np.inf
    assert compared(wrong, model).not_comparable == {"the recorded logprob is not a finite number": 1}


WRONG: dict[str, Any] = {
    "float16": (("rounding",), lambda values: values.astype(np.float16)),
    "next": (("shift",), lambda values: np.append(values[1:], 0)),
    "previous": (("shift",), lambda values: np.append(0, values[:-1])),
    "cut": (("rounding",), lambda values: np.trunc(values * 100) / 100),
    "base 10": (("scale",), lambda values: values / np.log(10)),
    "sign": (("scale",), lambda values: -values),
    "probabilities": (("scale",), np.exp),
    "last": (("isolated tokens",), lambda values: np.append(values[:-1], values[-1] - 1)),
}


@pytest.mark.parametrize("top", [TOP, SERVER_TOP])
@pytest.mark.parametrize("fault", WRONG)
def test_wrongly_stored_logprobs_are_neither_ids_nor_weights(
    plain: list[Trajectory], model: Any, fault: str, top: int
) -> None:
    """Regression: they were `ids` or `weights`."""
    expected, plant = WRONG[fault]
    wrong = []
    for trajectory in recorded(plain, model, RAW, OWN):
        start = int(trajectory.completion_starts[0])
        logprobs = np.concatenate([trajectory.logprobs[:start], plant(trajectory.logprobs[start:])])
        wrong.append(replace(trajectory, logprobs=logprobs.astype(np.float32)))
    assert cause(compared(wrong, model, top=top)).causes == expected


def with_one_wrong(
    plain: Sequence[Trajectory], model: Any, plant: Any, *, of: int, precision: str = "float32"
) -> Attribution:
    """Return the cause for `of` sequences, of which the last is wrong: `plant` makes logprobs from the right ones."""
    found = Mismatch(precision, 4000)
    right = recorded(plain, model, RAW, OWN)
    for n in range(of):
        trajectory = right[n % len(right)]
        start = int(trajectory.completion_starts[0])
        scores = Scores(trajectory.logprobs[start:], np.empty((len(trajectory.logprobs) - start, 0), np.float32))
        logprobs = trajectory.logprobs.copy()
        logprobs[start:] = plant(logprobs[start:]) if n == of - 1 else logprobs[start:]
        found.add(replace(trajectory, logprobs=logprobs), trajectory.loss_mask, start, scores)
    return cause(found)


def lowered(logprobs: np.ndarray) -> np.ndarray:
    """Return logprobs as different as those of other weights."""
    return logprobs - 3 - np.arange(len(logprobs)) % 5


def test_one_wrong_session_of_many_is_found_in_bfloat16(plain: list[Trajectory], model: Any) -> None:
    """Regression: it changed the share of tokens by less than rounding may."""
    found = with_one_wrong(plain, model, lowered, of=100, precision="bfloat16")
    assert found.causes == ("ids", "weights")


def test_a_wrong_sequence_after_hundreds_of_correct_ones_is_judged_by_its_own_logprobs(
    plain: list[Trajectory], model: Any
) -> None:
    """Regression: only the first 256 sequences were looked at, and the cause was `kernels` or `weights`."""
    assert with_one_wrong(plain, model, lowered, of=300).causes == ("ids", "weights")
    assert with_one_wrong(plain, model, lambda logprobs: np.append(0, logprobs[:-1]), of=300).causes == ("shift",)


def test_zeros_in_one_sequence_are_not_called_a_scale(plain: list[Trajectory], model: Any) -> None:
    """Regression: they were the logprobs times 0."""
    found = with_one_wrong(plain, model, np.zeros_like, of=10)
    assert found.causes == ("zeros", "truncation")
    assert "of the turns that differ" in found.detail


def test_a_wrong_sequence_among_differences_of_kernels_is_not_called_rounding(
    plain: list[Trajectory], model: Any
) -> None:
    """Regression: on average the differences were as small as those of kernels."""
    noise = np.random.default_rng(0)
    right = recorded(plain * 10, model, RAW, OWN)
    found = Mismatch("float32", 4000)
    for n, trajectory in enumerate(right):
        start = int(trajectory.completion_starts[0])
        logprobs = trajectory.logprobs[start:]
        other = lowered(logprobs) if n == 70 else logprobs + noise.normal(0, 4e-4, len(logprobs))
        scores = Scores(other.astype(np.float32), np.empty((len(logprobs), 0), np.float32))
        found.add(trajectory, trajectory.loss_mask, start, scores)
    assert "by no more than rounding" not in cause(found).detail
