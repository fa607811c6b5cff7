"""Requests that every engine refuses before it samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tokentape.engines._base import DISTRIBUTION, EngineInfo, SamplingParams
from tokentape.engines._checks import refuse_params, refuse_prompt, refuse_unsupported
from tokentape.errors import InvalidRequest, UnsupportedParameter

INFO = EngineInfo("engine", "1", "model", 10, 8, "raw_logprobs", DISTRIBUTION - {"seed"})
PARAMS = SamplingParams(max_tokens=3)


@pytest.mark.parametrize("prompt", [[], [10], [1, -1], [1] * 8])
def test_a_prompt_that_can_not_be_sampled_from_is_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        refuse_prompt(np.array(prompt, np.int32), INFO)
    assert caught.value.param == "prompt_ids"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("top_k", 1 << 31),
        ("top_p", 0.0),
        ("min_p", 1.1),
        ("min_tokens", 4),
        ("min_tokens", -1),
        ("payloads_from", -1),
    ],
)
def test_a_parameter_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        refuse_params(replace(PARAMS, **{name: value}))
    assert caught.value.param == name


def test_range_limits_are_accepted() -> None:
    refuse_params(replace(PARAMS, min_tokens=3, payloads_from=0, min_p=1.0, top_p=1.0, top_k=(1 << 31) - 1))


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 0), ("min_tokens", 1), ("priority", -1), ("cache_salt", ""), ("payloads_from", 0)]
)
def test_ignored_parameters_are_refused_even_with_falsy_values(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter, match=f"engine does not support {name}"):
        refuse_unsupported(replace(PARAMS, **{name: value}), INFO)


def test_defaults_are_accepted_by_every_engine() -> None:
    refuse_unsupported(PARAMS, replace(INFO, sampling=frozenset({"max_tokens"})))
