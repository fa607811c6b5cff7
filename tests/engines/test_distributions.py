from __future__ import annotations

from dataclasses import replace

import pytest

from tokentape.engines._base import BEFORE_GRAMMAR, OVER_SUPPORTS, SamplingParams
from tokentape.engines._distributions import logprobs_of, sampled_from
from tokentape.types import TokenDistribution

PLAIN = SamplingParams(max_tokens=8)
NONE = TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
MODES = ("raw_logprobs", "penalised_logprobs", "scaled_logprobs", "processed_logprobs")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, NONE),
        ({"temperature": 0.6}, replace(NONE, temperature=0.6)),
        ({"presence_penalty": 0.1}, replace(NONE, penalties=True)),
        ({"frequency_penalty": -0.1}, replace(NONE, penalties=True)),
        ({"repetition_penalty": 1.1}, replace(NONE, penalties=True)),
        ({"min_tokens": 1}, replace(NONE, penalties=True)),
        ({"top_p": 0.9}, replace(NONE, truncation=True)),
        ({"top_k": 3}, replace(NONE, truncation=True)),
        ({"min_p": 0.1}, replace(NONE, truncation=True)),
        ({"temperature": 0, "top_p": 0.9}, replace(NONE, temperature=0.0)),
        ({"temperature": 1e-6}, replace(NONE, temperature=0.0)),
        ({"seed": 3, "stop_strings": ("x",), "top_logprobs": 5, "priority": 1, "cache_salt": "a"}, NONE),
        ({"json_schema": "{}"}, replace(NONE, grammar=True)),
        ({"structural_tag": "{}"}, replace(NONE, grammar=True)),
    ],
)
def test_parameters_say_what_is_sampled_from(changes: dict[str, object], expected: TokenDistribution) -> None:
    assert sampled_from(replace(PLAIN, **changes)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_without_any_change_every_mode_is_what_is_sampled_from(mode: str) -> None:
    assert logprobs_of(f"vllm 0.32.0 {mode} routed-experts", PLAIN) == sampled_from(PLAIN)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("raw_logprobs", NONE),
        ("penalised_logprobs", replace(NONE, penalties=True)),
        ("scaled_logprobs", replace(NONE, penalties=True, temperature=1.4)),
        ("processed_logprobs", replace(NONE, penalties=True, temperature=1.4, truncation=True)),
    ],
)
def test_a_mode_says_how_far_logprobs_go(mode: str, expected: TokenDistribution) -> None:
    params = replace(PLAIN, temperature=1.4, top_k=5, presence_penalty=1.0)
    assert logprobs_of(f"e 1 {mode}", params) == expected
    assert (expected == sampled_from(params)) is (mode == "processed_logprobs")


@pytest.mark.parametrize("mode", MODES)
def test_greedy_sampling_is_not_what_any_logprobs_are_of(mode: str) -> None:
    greedy = replace(PLAIN, temperature=0.0)
    assert logprobs_of(f"e 1 {mode}", greedy) == NONE
    assert sampled_from(greedy) == replace(NONE, temperature=0.0)


@pytest.mark.parametrize("engine", ["tinker 1 unverified_logprobs", "an engine", ""])
def test_an_unknown_mode_is_not_known(engine: str) -> None:
    assert logprobs_of(engine, PLAIN) is None


def test_equal_temperatures_have_one_spelling() -> None:
    assert repr(TokenDistribution(temperature=1)) == repr(TokenDistribution(temperature=1.0))
    assert repr(TokenDistribution(temperature=-0.0)) == repr(TokenDistribution(temperature=0))


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_is_in_the_logprobs_unless_the_engine_declares_them_to_be_from_before_it(mode: str) -> None:
    held = replace(PLAIN, json_schema="{}")
    assert logprobs_of(f"llamacpp 1 {mode}", held) == sampled_from(held)
    raw = logprobs_of(f"vllm 1 {mode} {BEFORE_GRAMMAR}", held)
    assert raw == (sampled_from(held) if mode == "processed_logprobs" else NONE)


def test_logprobs_over_supports_are_those_of_engines_that_declare_them() -> None:
    cut = replace(PLAIN, temperature=0.6, top_k=3)
    assert logprobs_of(f"e 1 scaled_logprobs {OVER_SUPPORTS}", cut, supports=True) == sampled_from(cut)
    scaled = replace(NONE, temperature=0.6)
    assert logprobs_of(f"e 1 scaled_logprobs {OVER_SUPPORTS}", cut) == scaled
    assert logprobs_of("sglang 1 scaled_logprobs", cut, supports=True) == scaled
