"""Engines: token ids in, token ids and log-probabilities out.

`open_engine` connects to a server; `TransformersEngine.open` runs a model in this process. Both are an `Engine`:

    engine = await open_engine("vllm", "http://127.0.0.1:8000", vocab_size=len(tokenizer))
    params = SamplingParams(max_tokens=64, stop_token_ids=(2,))
    async for delta in engine.sample(prompt_ids, params, stream=True, request_id="r1"):
        print(delta.token_ids, delta.logprobs)
    await engine.close()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokentape.engines.base import Engine, EngineInfo, SampleDelta, SamplingParams, Timeouts, WeightSpan

if TYPE_CHECKING:
    from tokentape.engines.opening import open_engine
    from tokentape.engines.pool import EnginePool
    from tokentape.engines.remote import RemoteEngine
    from tokentape.engines.transformers import TransformersEngine

__all__ = [
    "Engine",
    "EngineInfo",
    "EnginePool",
    "RemoteEngine",
    "SampleDelta",
    "SamplingParams",
    "Timeouts",
    "TransformersEngine",
    "WeightSpan",
    "open_engine",
]

_HOME = {"open_engine": "opening", "EnginePool": "pool", "RemoteEngine": "remote", "TransformersEngine": "transformers"}


def __getattr__(name: str) -> Any:
    """Import what needs an HTTP client, or may load a model, when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"tokentape.engines.{_HOME[name]}"), name)
    return value
