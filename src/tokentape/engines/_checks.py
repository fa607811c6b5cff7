"""Refuse prompts and parameters that no engine can sample with."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields

import numpy as np

from tokentape.engines._base import EngineInfo, SamplingParams
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.types import TokenIds


def refuse_prompt(prompt_ids: TokenIds, info: EngineInfo) -> None:
    """Raise `InvalidRequest` if the prompt is empty, fills the context, or has an id outside the vocabulary.

    Some servers crash on ids outside the vocabulary, so they are never sent.
    """
    ids = np.asarray(prompt_ids)
    if not ids.size:
        raise InvalidRequest("the prompt is empty; it needs at least one token id", "prompt_ids")
    if int(ids.min()) < 0 or int(ids.max()) >= info.vocab_size:
        position = int(np.flatnonzero((ids < 0) | (ids >= info.vocab_size))[0])
        raise InvalidRequest(
            f"prompt id {int(ids[position])} at position {position} is not in this model's vocabulary, 0 to "
            f"{info.vocab_size - 1}; was the prompt encoded with a different tokenizer?",
            "prompt_ids",
        )
    if ids.size >= info.max_context:
        raise InvalidRequest(
            f"the prompt has {ids.size} tokens; this model's context holds {info.max_context}, completion included",
            "prompt_ids",
        )


def refuse_params(params: SamplingParams) -> None:
    """Raise `InvalidRequest` for the first parameter that is out of its range."""
    ranges: list[tuple[str, bool, str]] = [
        ("max_tokens", params.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= params.temperature < math.inf, "at least 0"),
        ("top_p", 0 < params.top_p <= 1, "above 0, at most 1"),
        ("top_k", 0 <= params.top_k < 1 << 31, "0 (off) to 2147483647"),
        ("min_p", 0 <= params.min_p <= 1, "between 0 and 1"),
        ("presence_penalty", math.isfinite(params.presence_penalty), "a finite number"),
        ("frequency_penalty", math.isfinite(params.frequency_penalty), "a finite number"),
        ("repetition_penalty", 0 < params.repetition_penalty < math.inf, "above 0"),
        ("top_logprobs", params.top_logprobs >= 0, "at least 0 (0 is off)"),
        ("stop_strings", all(params.stop_strings), "strings of at least one character"),
        ("min_tokens", 0 <= params.min_tokens <= params.max_tokens, "0 to max_tokens"),
        ("supports", params.supports >= 0, "at least 0 (0 is off)"),
        ("payloads_from", (params.payloads_from or 0) >= 0, "0 or more"),
    ]
    for name, holds, expected in ranges:
        if not holds:
            raise InvalidRequest(f"{name} is out of range; expected {expected}", name)


_DEFAULTS = [(field.name, field.default) for field in fields(SamplingParams) if field.default is not MISSING]
"""The optional sampling parameters with their defaults."""


def unsupported(params: SamplingParams, info: EngineInfo) -> str | None:
    """Return the name of the first parameter that is set but that this engine would ignore, or None."""
    for name, default in _DEFAULTS:
        if name not in info.sampling and getattr(params, name) != default:
            return name
    return None


def refuse_unsupported(params: SamplingParams, info: EngineInfo) -> None:
    """Raise `UnsupportedParameter` for the first parameter that is set but that this engine would ignore."""
    if (name := unsupported(params, info)) is not None:
        supported = ", ".join(sorted(info.sampling))
        raise UnsupportedParameter(f"{info.name} does not support {name}; it supports {supported}", name)


def refuse_call(prompt_ids: TokenIds, params: SamplingParams, info: EngineInfo) -> None:
    """Raise `InvalidRequest` or `UnsupportedParameter` for a prompt or parameter that this engine does not accept."""
    refuse_prompt(prompt_ids, info)
    refuse_params(params)
    refuse_unsupported(params, info)
