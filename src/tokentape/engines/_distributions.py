"""Describe the distribution that a completion is sampled from, and the one that its log-probabilities belong to."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tokentape.engines._base import BEFORE_GRAMMAR, OVER_SUPPORTS, UNKNOWN_MODE, SamplingParams
from tokentape.types import TokenDistribution

GREEDY_BELOW = 1e-5
"""Temperatures below this sample greedily, because dividing logits by them would overflow."""


def is_greedy(params: SamplingParams) -> bool:
    """Return whether sampling always takes the most likely token."""
    return params.temperature < GREEDY_BELOW


def truncates(params: SamplingParams) -> bool:
    """Return whether top_p, top_k or min_p can rule out tokens. Greedy sampling is never truncated."""
    return not is_greedy(params) and (params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0)


def penalises(params: SamplingParams) -> bool:
    """Return whether any of the three penalties is set."""
    return bool(params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty)


def sampled_from(params: SamplingParams) -> TokenDistribution:
    """Return the distribution that tokens are sampled from with these parameters.

    >>> sampled_from(SamplingParams(max_tokens=8, temperature=0.6))
    TokenDistribution(penalties=False, temperature=0.6, truncation=False, grammar=False)
    """
    greedy = is_greedy(params)
    return _shared(
        penalises(params) or params.min_tokens > 0,
        0.0 if greedy else params.temperature,
        not greedy and truncates(params),
        params.json_schema is not None or params.structural_tag is not None,
    )


@lru_cache(maxsize=256)
def _shared(penalties: bool, temperature: float, truncation: bool, grammar: bool) -> TokenDistribution:
    """Return one object for equal distributions, because gateways keep many turns in memory."""
    return TokenDistribution(penalties, temperature, truncation, grammar)


def nonnegative_seed(seed: int | None) -> int | None:
    """Return the seed modulo 2**63: vLLM reads -1 as no seed and refuses 2**63, `random.Random` ignores the sign."""
    return None if seed is None else seed % (1 << 63)


def likeliest_alone(params: SamplingParams) -> SamplingParams:
    """Return parameters that keep the same id as a `top_k` of 1, with which SGLang's logprobs include the temperature.

    With a `top_k` of 1, SGLang reports logprobs at temperature 1 unless another call in the batch samples.
    """
    return replace(params, top_k=2, top_p=1e-9) if params.top_k == 1 and params.temperature else params


def mode_of(engine: str) -> str:
    """Return the logprobs mode in `str(EngineInfo)`: the word that ends with `_logprobs`."""
    return next((word for word in engine.split() if word.endswith("_logprobs")), UNKNOWN_MODE)


def logprobs_of(engine: str, params: SamplingParams, *, supports: bool = False) -> TokenDistribution | None:
    """Return the distribution that an engine's log-probabilities belong to; None if its mode is not known.

    `engine` is `str(EngineInfo)`, which contains the mode and the capabilities. `supports` is whether the engine
    reported which ids truncation kept. For greedy sampling, engines report log-probabilities at temperature 1.

    >>> logprobs_of("vllm 0.32.0 raw_logprobs", SamplingParams(max_tokens=8, temperature=0.6))
    TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
    """
    distribution = sampled_from(params)
    temperature = distribution.temperature or 1.0
    declared = engine.split()
    grammar = distribution.grammar and BEFORE_GRAMMAR not in declared
    match "processed_logprobs" if supports and OVER_SUPPORTS in declared else mode_of(engine):
        case "raw_logprobs":
            return _shared(False, 1.0, False, grammar)
        case "penalised_logprobs":
            return _shared(distribution.penalties, 1.0, False, grammar)
        case "scaled_logprobs":
            return _shared(distribution.penalties, temperature, False, grammar)
        case "processed_logprobs":
            return _shared(distribution.penalties, temperature, distribution.truncation, distribution.grammar)
    return None
