"""Sampling parameters in requests: what the engine does not do is refused by the name that the caller used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from tokentape.engines.base import EngineInfo, SamplingParams
from tokentape.errors import UnsupportedParameter


def refuse_unsupported(sampling: SamplingParams, engine: EngineInfo, names: Mapping[str, str]) -> None:
    """Raise `UnsupportedParameter` for a parameter that was set and that the engine would ignore.

    `names` are the fields of `SamplingParams` that have another name in the API.
    """
    default = SamplingParams(max_tokens=sampling.max_tokens)
    for one in fields(SamplingParams):
        if one.name not in engine.sampling and getattr(sampling, one.name) != getattr(default, one.name):
            name = names.get(one.name, one.name)
            raise UnsupportedParameter(f"the engine {engine.name!r} does not do {name}", name)
