"""Rows for trainers: where advantages come from, and that they are JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.training.test_exports import two_branches
from tokentape.errors import InvalidRequest
from tokentape.training import exports
from tokentape.training._samples import Sample
from tokentape.training._trainer_rows import WITH_ADVANTAGES, accepted_rows, trainer_rows, write_trainer_rows


def advantages(trainer: str, samples: list[Sample]) -> list[Any]:
    rows = trainer_rows(trainer, samples)
    values = [
        row["advantages"] if "advantages" in row else row["loss_fn_inputs"]["advantages"].tolist() for row in rows
    ]
    return [sorted(set(row_values)) for row_values in values]


@pytest.mark.parametrize("trainer", WITH_ADVANTAGES)
def test_set_advantages_are_kept_and_missing_ones_are_computed(trainer: str) -> None:
    samples = two_branches()
    assert advantages(trainer, samples) == [[0, 0.5], [0, 0.5]]
    assert advantages(trainer, [replace(sample, columns={}) for sample in samples]) == [[0], [0]]


@pytest.mark.parametrize("trainer", WITH_ADVANTAGES)
def test_advantages_of_some_samples_only_are_refused(trainer: str) -> None:
    first, second = two_branches()
    with pytest.raises(InvalidRequest, match="1 of 2 samples have no column"):
        trainer_rows(trainer, [first, replace(second, columns={})])


@pytest.mark.parametrize("trainer", ["nemo-rl", "slime"])
def test_rows_are_built_once_if_no_session_is_refused(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"nemo-rl": "nemo_rl_datum", "slime": "slime_sample"}[trainer]
    built = Mock(wraps=getattr(exports, name))
    monkeypatch.setattr(exports, name, built)
    samples = two_branches()
    assert accepted_rows(trainer, samples)[::2] == (samples, {})
    assert built.call_count == len(samples)


def test_refused_sessions_are_named_and_skipped_in_the_numbering() -> None:
    refused, *others = (
        replace(sample, session_id=f"s{n}") for n, sample in enumerate([*two_branches(), *two_branches()])
    )
    samples = [replace(refused, reward=None), *others]
    taken, rows, why = accepted_rows("nemo-rl", samples)
    assert (taken, list(why)) == (others, ["s0"])
    assert [row["extra_env_info"]["session_id"] for row in rows] == ["s1", "s2", "s3"]
    assert [row["idx"] for row in rows] == [row["idx"] for row in trainer_rows("nemo-rl", others)]


def test_numbers_that_json_lacks_are_refused() -> None:
    file = io.BytesIO()
    write_trainer_rows([{"a": 1.0}], file)
    assert json.loads(file.getvalue()) == {"a": 1}
    with pytest.raises(InvalidRequest, match="not finite"):
        write_trainer_rows([{"a": float("nan")}], file)
