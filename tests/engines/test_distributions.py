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
def test_parameters_determine_the_sampled_distribution(changes: dict[str, object], expected: TokenDistribution) -> None:
    assert sampled_from(replace(PLAIN, **changes)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_without_processing_every_mode_is_the_sampled_distribution(mode: str) -> None:
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
def test_mode_determines_the_processing_of_logprobs(mode: str, expected: TokenDistribution) -> None:
    params = replace(PLAIN, temperature=1.4, top_k=5, presence_penalty=1.0)
    assert logprobs_of(f"e 1 {mode}", params) == expected
    assert (expected == sampled_from(params)) is (mode == "processed_logprobs")


@pytest.mark.parametrize("mode", MODES)
def test_greedy_sampling_matches_no_logprobs_distribution(mode: str) -> None:
    greedy = replace(PLAIN, temperature=0.0)
    assert logprobs_of(f"e 1 {mode}", greedy) == NONE
    assert sampled_from(greedy) == replace(NONE, temperature=0.0)


@pytest.mark.parametrize("engine", ["tinker 1 unverified_logprobs", "an engine", ""])
def test_unknown_mode_gives_an_unknown_distribution(engine: str) -> None:
    assert logprobs_of(engine, PLAIN) is None


def test_equal_temperatures_have_the_same_spelling() -> None:
    assert repr(TokenDistribution(temperature=1)) == repr(TokenDistribution(temperature=1.0))
    assert repr(TokenDistribution(temperature=-0.0)) == repr(TokenDistribution(temperature=0))


@pytest.mark.parametrize("mode", MODES)
def test_grammar_counts_in_logprobs_unless_the_engine_excludes_it(mode: str) -> None:
    held = replace(PLAIN, json_schema="{}")
    assert logprobs_of(f"llamacpp 1 {mode}", held) == sampled_from(held)
    raw = logprobs_of(f"vllm 1 {mode} {BEFORE_GRAMMAR}", held)
    assert raw == (sampled_from(held) if mode == "processed_logprobs" else NONE)


def test_logprobs_over_supports_need_a_declaring_engine() -> None:
    cut = replace(PLAIN, temperature=0.6, top_k=3)
    assert logprobs_of(f"e 1 scaled_logprobs {OVER_SUPPORTS}", cut, supports=True) == sampled_from(cut)
    scaled = replace(NONE, temperature=0.6)
    assert logprobs_of(f"e 1 scaled_logprobs {OVER_SUPPORTS}", cut) == scaled
    assert logprobs_of("sglang 1 scaled_logprobs", cut, supports=True) == scaled
