"""The llama.cpp engine against a real llama-server on the demonstration model, compared with its forward pass."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from real import MODEL, collect, load_forward, served, use
from tokenizers import Tokenizer

from tokentape.engines._base import SamplingParams
from tokentape.engines._llamacpp import PIECE, LlamaCppEngine
from tokentape.errors import EngineContractError, InvalidRequest

SERVER = os.environ.get("TOKENTAPE_LLAMA_SERVER_BIN")
GGUF = os.environ.get("TOKENTAPE_LLAMA_GGUF")
CONTEXT = 1024
TOLERANCE = 1e-3
"""Tolerance of log-probabilities, with caches in float32; with the default, float16, they differ by more."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(SERVER is None, reason="needs a llama-server: TOKENTAPE_LLAMA_SERVER_BIN"),
    pytest.mark.skipif(GGUF is None, reason="needs what tests/engines/to_gguf.py writes: TOKENTAPE_LLAMA_GGUF"),
]

GREEDY = SamplingParams(max_tokens=80, temperature=0)
SAMPLED = SamplingParams(max_tokens=80, temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert SERVER is not None
    options = f"-t 1 -tb 1 --parallel 2 -c {2 * CONTEXT} -ctk f32 -ctv f32 -fa off --host 127.0.0.1 --port"

    def command(port: int) -> list[str]:
        return [*shlex.split(f"{SERVER} -m {GGUF} {options}"), str(port)]

    with served(command, tmp_path_factory.mktemp("llama") / "log", {}) as url:
        yield url


@pytest.fixture(scope="module")
def forward() -> Callable[[np.ndarray], np.ndarray]:
    return load_forward()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocab_size() -> int:
    return 4000


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 3900, 50).astype(np.int32)


def opened(server: str, vocab_size: int) -> Callable[[], Any]:
    return lambda: LlamaCppEngine.open(server, vocab_size=vocab_size)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_match_the_forward_pass_streamed_or_not(
    server: str,
    vocab_size: int,
    forward: Callable[[np.ndarray], np.ndarray],
    prompt: np.ndarray,
    params: SamplingParams,
) -> None:
    async def body(engine: LlamaCppEngine) -> list[Any]:
        return [await collect(engine, prompt, params, stream=stream) for stream in (True, False)]

    (ids, logprobs, last), (again, logprobs_again, _) = use(opened(server, vocab_size), body)
    assert last.finish_reason in ("length", "stop")
    assert len(ids) > 10
    np.testing.assert_array_equal(ids, again)
    np.testing.assert_allclose(logprobs, logprobs_again, atol=TOLERANCE)
    expected = forward(np.concatenate([prompt, ids]))[len(prompt) - 1 : -1]
    differences = np.abs(logprobs - expected[np.arange(len(ids)), ids])
    print(f"largest difference {differences.max():.1e}")
    assert differences.max() < TOLERANCE


def test_tokens_that_end_within_a_character_keep_their_ids_and_logprobs(
    server: str, vocab_size: int, forward: Callable[[np.ndarray], np.ndarray], tokenizer: Tokenizer
) -> None:
    """The server's streams leave them out."""
    prompt = np.array(tokenizer.encode("日本🙂é" * 20, add_special_tokens=False).ids, np.int32)

    async def body(engine: LlamaCppEngine) -> list[Any]:
        # So hot that every token occurs, including bytes of characters.
        hot = SamplingParams(max_tokens=90, temperature=8.0, top_logprobs=2)
        return [await collect(engine, prompt, replace(hot, seed=seed), stream=True) for seed in range(6)]

    partial = 0
    for ids, logprobs, _ in use(opened(server, vocab_size), body):
        partial += sum("\ufffd" in tokenizer.decode([int(i)], skip_special_tokens=False) for i in ids)
        expected = forward(np.concatenate([prompt, ids]))[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logprobs, expected[np.arange(len(ids)), ids], atol=TOLERANCE)
    assert partial > 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_id_that_the_server_does_not_know_ends_the_completion_and_stays(
    server: str, vocab_size: int, prompt: np.ndarray, stream: bool
) -> None:
    async def body(engine: LlamaCppEngine) -> None:
        free, _, _ = await collect(engine, prompt, SAMPLED, stream=False)
        stop = int(free[len(free) // 2])
        end = int(np.flatnonzero(free == stop)[0]) + 1
        ids, _, last = await collect(engine, prompt, replace(SAMPLED, stop_token_ids=(stop,)), stream=stream)
        assert (last.finish_reason, last.stop) == ("stop", stop)
        np.testing.assert_array_equal(ids, free[:end])

    use(opened(server, vocab_size), body)


def test_a_stop_string_within_a_token_keeps_the_whole_token(
    server: str, vocab_size: int, prompt: np.ndarray, tokenizer: Tokenizer
) -> None:
    async def body(engine: LlamaCppEngine) -> None:
        params = replace(SAMPLED, max_tokens=PIECE)
        free, _, _ = await collect(engine, prompt, params, stream=False)
        texts = [tokenizer.decode(free[:n].tolist()) for n in range(len(free) + 1)]
        stop = next(texts[n][-2] for n in range(3, len(texts)) if len(texts[n]) > len(texts[n - 1]) + 2)
        end = next(n for n, text in enumerate(texts) if stop in text)
        ids, logprobs, last = await collect(engine, prompt, replace(params, stop_strings=(stop,)), stream=True)
        assert (last.finish_reason, last.stop) == ("stop", stop)
        np.testing.assert_array_equal(ids, free[:end])
        # The server leaves out the log-probabilities of the stop string's tokens.
        assert len(logprobs) == len(ids)

    use(opened(server, vocab_size), body)


def test_the_end_of_the_context_is_a_length_stop(server: str, vocab_size: int, prompt: np.ndarray) -> None:
    async def body(engine: LlamaCppEngine) -> None:
        long = np.resize(prompt, engine.info.max_context - 5).astype(np.int32)
        ids, _, last = await collect(engine, long, GREEDY, stream=True)
        assert (len(ids), last.finish_reason) == (5, "length")

    use(opened(server, vocab_size), body)


def test_refusals_by_the_server_are_invalid_requests(server: str, prompt: np.ndarray) -> None:
    with pytest.raises(EngineContractError, match="has 4000 ids"):
        use(opened(server, 4001), lambda engine: collect(engine, prompt, GREEDY, stream=True))
    with pytest.raises(InvalidRequest, match="not in this model's vocabulary"):
        use(opened(server, 4000), lambda engine: collect(engine, np.array([4000], np.int32), GREEDY, stream=True))


def test_more_calls_than_slots_give_the_same_replies_as_single_calls(
    server: str, vocab_size: int, prompt: np.ndarray
) -> None:
    async def body(engine: LlamaCppEngine) -> None:
        prompts = [np.roll(prompt, n) for n in range(6)]
        alone = [await collect(engine, p, SAMPLED, stream=True) for p in prompts]
        together = await asyncio.gather(*[collect(engine, p, SAMPLED, stream=True) for p in prompts])
        same = sum(np.array_equal(a[0], b[0]) for a, b in zip(alone, together, strict=True))
        # Batches of another shape round differently; a draw near a boundary may change.
        assert same >= 4

    use(opened(server, vocab_size), body)


def test_abandoning_a_call_frees_its_slot(server: str, vocab_size: int, prompt: np.ndarray) -> None:
    async def body(engine: LlamaCppEngine) -> None:
        for _ in range(4):
            params = replace(SAMPLED, max_tokens=900)
            async with aclosing(engine.sample(prompt, params, stream=True, request_id="left")) as deltas:
                await anext(deltas)
        began = time.monotonic()
        await collect(engine, prompt, replace(GREEDY, max_tokens=1), stream=False)
        assert time.monotonic() - began < 10

    use(opened(server, vocab_size), body)
