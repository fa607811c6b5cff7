"""The conformance kit against every exporter, file and batch of ours.

`KNOWN` lists today's failures with their causes, as strict expected failures: a fixed cause or another finding fails
here until the entry is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.training import data_paths
from tests.training.data_paths import PATHS
from tokentape.testing.golden import GOLDEN
from tokentape.testing.samples import ConformanceReport, check_samples
from tokentape.training import _samples as samples
from tokentape.training import exports
from tokentape.training._collate import group_advantages
from tokentape.training._samples import Sample

# `trl_asynchronous` imports TRL, so test_trl_async.py, which imports it anyway, tests it.
NAMES = [name for name in PATHS if name != "TRL asynchronous"]

GROUP = "it averages over all samples of a group, so a forked session counts more than once"

KNOWN: dict[tuple[str, str], tuple[set[str], str]] = {}
for forked in ("forked", "groups of unequal branches"):
    for name in ("verl DataProto", "NeMo-RL"):
        KNOWN[name, forked] = {"siblings counted as sessions"}, GROUP


class KnownFailure(Exception):
    """Check that the findings are exactly those in `KNOWN`."""


@cache
def report(name: str) -> ConformanceReport:
    return check_samples(PATHS[name])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "golden"),
    [
        pytest.param(
            name,
            golden.name,
            marks=[pytest.mark.xfail(raises=KnownFailure, strict=True, reason=KNOWN[name, golden.name][1])]
            if (name, golden.name) in KNOWN
            else [],
        )
        for name in NAMES
        for golden in GOLDEN
    ],
)
def test_golden_sessions_reach_the_loss(name: str, golden: str) -> None:
    finding_list = report(name).goldens[golden]
    kinds, cause = KNOWN.get((name, golden), (set(), ""))
    if kinds and {finding.kind for finding in finding_list} == kinds:
        raise KnownFailure(cause)
    assert finding_list == []


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_no_planted_error_goes_unnoticed(name: str) -> None:
    planted = report(name).planted
    assert {error: caught for error, caught in planted.items() if not all(caught.values())} == {}


NEEDS = {
    ("logprobs",): {
        "logprobs shifted by one",
        "logprobs of prompt positions",
        "logprobs of another temperature",
        "logprobs left out",
        "logprobs clamped",
        "float16 logprobs",
    },
    ("advantages",): {"group's mean over samples"},
    ("advantages", "reward"): {"rewards broadcast twice", "samples reordered, rewards not"},
    ("truncated",): {"truncation hidden"},
    ("weight_versions",): {"one weight version for a row"},
    ("temperature",): {"another temperature named"},
    ("position_ids",): {"positions shifted by one"},
}
"""Errors that can't be planted if a trainer has none of these fields."""

HIDDEN = {
    "verl DataProto": {"siblings counted as sessions", "group's mean over samples"},
    "NeMo-RL": {"siblings counted as sessions", "group's mean over samples"},
}
"""Errors that a known failure hides."""


@pytest.mark.parametrize("name", NAMES)
def test_every_error_that_fits_the_trainer_s_fields_is_planted(name: str) -> None:
    made = report(name)
    without = [errors for needed, errors in NEEDS.items() if {*needed} <= {*made.not_given}]
    expected = set[str]().union(HIDDEN.get(name, set()), *without)
    if "no reward" in made.refused:
        expected.add("missing reward read as 0")
    assert {error for error, caught in made.planted.items() if not caught} == expected


def split_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = exports._split
    monkeypatch.setattr(exports, "_split", lambda sample: right(sample) + 1)


def mask_inverted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = exports.trl_rollouts

    def inverted(samples: Sequence[Sample]) -> dict[str, Any]:
        fields = right(samples)
        return fields | {"env_mask": [[1 - bit for bit in mask] for mask in fields["env_mask"]]}

    monkeypatch.setattr(exports, "trl_rollouts", inverted)


def siblings_in_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_samples(samples: Sequence[Sample]) -> list[Sample]:
        return group_advantages(
            [replace(sample, session_id=f"{sample.session_id} {sample.leaf}") for sample in samples]
        )

    monkeypatch.setattr(data_paths, "group_advantages", of_samples)


def logprobs_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    right = samples._sample

    def moved(*arguments: Any) -> Sample:
        sample = right(*arguments)
        return replace(sample, logprobs=np.append(sample.logprobs[1:], np.float32(0)))

    monkeypatch.setattr(samples, "_sample", moved)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plant", "name", "golden", "kind"),
    [
        (split_late, "slime", "exact", "mask shifted"),
        (split_late, "verl AgentLoopOutput", "exact", "not trained"),
        (mask_inverted, "TRL rollout_func", "exact", "mask inverted"),
        (siblings_in_group, "prime-rl", "forked", "siblings counted as sessions"),
        (logprobs_moved, "Tinker", "exact", "logprobs shifted"),
        (logprobs_moved, "packed in rows", "exact", "logprobs shifted"),
    ],
)
def test_error_planted_in_our_code_is_reported(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], name: str, golden: str, kind: str
) -> None:
    plant(monkeypatch)
    assert kind in {finding.kind for finding in check_samples(PATHS[name]).goldens[golden]}
