"""The same greedy requests to the embedded engine and to a real vLLM server give the same ids."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import real
from tokenizers import Tokenizer

from tokentape.engines._base import Engine, SamplingParams
from tokentape.engines._transformers import TransformersEngine
from tokentape.engines._vllm import VllmEngine
from tokentape.types import TokenIds

VLLM = os.environ.get("TOKENTAPE_VLLM_BIN")
TOLERANCE = 1e-4
"""Tolerance of log-probabilities in float32, between different kernels for the same sums."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(VLLM is None, reason="needs the vllm executable of an environment: TOKENTAPE_VLLM_BIN"),
    pytest.mark.skipif(not (real.MODEL / "model.safetensors").exists(), reason="needs the demonstration model, built"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    def command(port: int) -> list[str]:
        assert VLLM is not None
        command = [
            VLLM,
            "serve",
            str(real.MODEL),
            "--served-model-name",
            "demo",
            "--dtype",
            "float32",
            "--enforce-eager",
        ]
        return [*command, "--host", "127.0.0.1", "--port", str(port)]

    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with real.served(command, tmp_path_factory.mktemp("vllm") / "log", settings) as url:
        yield url


def test_the_embedded_engine_and_vllm_sample_the_same_greedy_ids(server: str) -> None:
    tokenizer = Tokenizer.from_file(str(real.MODEL / "tokenizer.json"))
    rng = np.random.default_rng(0)
    asked: list[tuple[TokenIds, SamplingParams]] = []
    for length in (1, 7, 33, 120, 16, 64, 250, 3):
        prompt = rng.integers(10, 400, length).astype(np.int32)
        asked.append((prompt, SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=(0, 1, 2))))

    async def collect_all(engine: Engine) -> list[tuple[TokenIds, np.ndarray, str | None]]:
        try:
            answers = await asyncio.gather(*(real.collect(engine, *request, stream=True) for request in asked))
        finally:
            await engine.close()
        return [(ids, logprobs, last.finish_reason) for ids, logprobs, last in answers]

    async def everywhere() -> dict[str, list[tuple[TokenIds, np.ndarray, str | None]]]:
        vllm = await VllmEngine.open(server, vocab_size=tokenizer.get_vocab_size())
        sampled = {"vllm": await collect_all(vllm)}
        sampled["embedded"] = await collect_all(TransformersEngine.open(Path(real.MODEL), threads=1))
        return sampled

    sampled = asyncio.run(everywhere())
    apart = dict.fromkeys(sampled, 0.0)
    for number in range(len(asked)):
        expected_ids, expected, reason = sampled["embedded"][number]
        for engine, answers in sampled.items():
            ids, logprobs, why = answers[number]
            assert (ids.tolist(), why) == (expected_ids.tolist(), reason), engine
            apart[engine] = max(apart[engine], float(np.abs(logprobs - expected).max()))
    assert max(apart.values()) < TOLERANCE
