"""Engines: token ids in, token ids and log-probabilities out.

`open_engine` connects to a server, `TransformersEngine.open` runs a model in this process, and `FunctionEngine` calls
an async function, such as a trainer's handle of its own engine. Each returns an `Engine`:

    engine = await open_engine("vllm", "http://127.0.0.1:8000", vocab_size=len(tokenizer))
    params = SamplingParams(max_tokens=64, stop_token_ids=(2,))
    async for delta in engine.sample(prompt_ids, params, stream=True, request_id="r1"):
        print(delta.token_ids, delta.logprobs)
    await engine.close()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape._lazy import lazy_names
from tokentape.engines._base import Engine, EngineInfo, SampleDelta, SamplingParams, Timeouts, WeightSpan

if TYPE_CHECKING:
    from tokentape.engines._function import FunctionEngine
    from tokentape.engines._kinds import open_engine
    from tokentape.engines._pool import EnginePool
    from tokentape.engines._remote import RemoteEngine
    from tokentape.engines._transformers import TransformersEngine

__all__ = [
    "Engine", "EngineInfo", "EnginePool", "FunctionEngine", "RemoteEngine", "SampleDelta", "SamplingParams",
    "Timeouts", "TransformersEngine", "WeightSpan", "open_engine",
]  # fmt: skip

# Modules that import an HTTP client or torch are imported on first use.
__getattr__ = lazy_names(__name__)
