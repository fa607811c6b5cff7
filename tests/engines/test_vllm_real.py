"""The vLLM engine against a real vLLM server on the demonstration model, compared with the model's forward pass."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokentape.demo
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._vllm import VllmEngine
from tokentape.errors import EngineContractError, InvalidRequest

VLLM = os.environ.get("TOKENTAPE_VLLM_BIN")
MODEL = Path(tokentape.demo.__file__).parent / "model"
CONTEXT = 1024
TOLERANCE = 1e-4
"""Tolerance of log-probabilities in float32, between vLLM's kernels and the plain forward pass."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(VLLM is None, reason="needs the vllm executable of an environment: TOKENTAPE_VLLM_BIN"),
    pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="needs the demonstration model, built"),
]


@pytest.fixture(scope="module", params=["generate", "completions"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server for each route, as long as the module's tests."""
    assert VLLM is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [VLLM, "serve", str(MODEL), "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(CONTEXT), "--host", "127.0.0.1", "--port", str(port)]
    if request.param == "generate":
        command.append("--enable-scale-out")
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        while not healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def vocab_size() -> int:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab_size()


@pytest.fixture(scope="module")
def forward() -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from ids [tokens] to next-token log-probabilities, [tokens, vocabulary]."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def logprobs(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        return torch.log_softmax(logits, -1).numpy()

    return logprobs


@pytest.fixture
def prompt(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, 50).astype(np.int32)


def use(server: str, vocab_size: int, body: Callable[[VllmEngine], Awaitable[Any]], **opening: Any) -> Any:
    async def main() -> Any:
        engine = await VllmEngine.open(server, vocab_size=vocab_size, **opening)
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


async def collect(
    engine: VllmEngine, prompt: np.ndarray, params: SamplingParams, *, stream: bool
) -> tuple[np.ndarray, np.ndarray, SampleDelta]:
    """Return ids, log-probabilities and the last delta of a call."""
    deltas = [d async for d in engine.sample(prompt, params, stream=stream, request_id="test")]
    ids = np.array([i for d in deltas for i in d.token_ids], np.int32)
    return ids, np.array([lp for d in deltas for lp in d.logprobs]), deltas[-1]


GREEDY = SamplingParams(max_tokens=60, temperature=0)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=5)


@pytest.mark.parametrize("verify_prompt", [True, False])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_match_the_forward_pass_streamed_or_not(
    server: str,
    vocab_size: int,
    forward: Callable[[np.ndarray], np.ndarray],
    prompt: np.ndarray,
    params: SamplingParams,
    verify_prompt: bool,
) -> None:
    async def body(engine: VllmEngine) -> list[Any]:
        assert engine.info.logprobs_mode == "raw_logprobs"
        return [await collect(engine, prompt, params, stream=stream) for stream in (True, False)]

    (ids, logprobs, last), (again, logprobs_again, _) = use(server, vocab_size, body, verify_prompt=verify_prompt)
    assert last.finish_reason == "length"
    assert len(ids) == 60
    np.testing.assert_array_equal(ids, again)
    np.testing.assert_allclose(logprobs, logprobs_again, atol=TOLERANCE)
    expected = forward(np.concatenate([prompt, ids]))[len(prompt) - 1 : -1]
    np.testing.assert_allclose(logprobs, expected[np.arange(len(ids)), ids], atol=TOLERANCE)
    if params is GREEDY:
        assert (expected.max(axis=1) - logprobs < TOLERANCE).all()


def test_route_is_the_one_that_the_server_offers(server: str, vocab_size: int, request: Any) -> None:
    async def body(engine: VllmEngine) -> tuple[str, ...]:
        return engine.info.capabilities

    route = request.node.callspec.params["server"]
    with urllib.request.urlopen(f"{server}/openapi.json", timeout=60) as answer:
        known = json.load(answer)["components"]["schemas"]["CompletionRequest"]["properties"]
    # Since vLLM 0.33 completions report them too.
    versions = route == "generate" or "return_weight_versions" in known
    assert use(server, vocab_size, body) == (route, "weight_versions")[: 1 + versions]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_id_does_not_end_a_completion_before_min_tokens(
    server: str, vocab_size: int, prompt: np.ndarray, stream: bool
) -> None:
    async def body(engine: VllmEngine) -> None:
        free, _, _ = await collect(engine, prompt, GREEDY, stream=False)
        params = replace(GREEDY, stop_token_ids=(int(free[3]),), min_tokens=20, cache_salt="salt", session_id="s")
        ids, _, _ = await collect(engine, prompt, params, stream=stream)
        assert len(ids) >= 20

    use(server, vocab_size, body)


def test_alternatives_match_the_forward_pass(
    server: str, vocab_size: int, forward: Callable[[np.ndarray], np.ndarray], prompt: np.ndarray
) -> None:
    params = SamplingParams(max_tokens=1, seed=1, top_logprobs=5)
    _, _, last = use(server, vocab_size, lambda engine: collect(engine, prompt, params, stream=True))
    expected = np.sort(forward(prompt)[-1])[::-1][:5]
    np.testing.assert_allclose([logprob for _, logprob in last.top_logprobs[0]], expected, atol=TOLERANCE)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_id_ends_the_completion_and_stays_in_it(
    server: str, vocab_size: int, prompt: np.ndarray, stream: bool
) -> None:
    async def body(engine: VllmEngine) -> None:
        free, _, _ = await collect(engine, prompt, GREEDY, stream=False)
        stop = int(free[7])
        end = int(np.flatnonzero(free == stop)[0]) + 1
        params = SamplingParams(max_tokens=60, temperature=0, stop_token_ids=(stop,))
        ids, _, last = await collect(engine, prompt, params, stream=stream)
        assert (last.finish_reason, last.stop) == ("stop", stop)
        np.testing.assert_array_equal(ids, free[:end])

    use(server, vocab_size, body)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_within_a_token_keeps_the_whole_token(
    server: str, vocab_size: int, prompt: np.ndarray, stream: bool
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    async def body(engine: VllmEngine) -> None:
        free, _, _ = await collect(engine, prompt, SAMPLED, stream=False)
        texts = [tokenizer.decode(free[:n].tolist(), skip_special_tokens=False) for n in range(len(free) + 1)]
        stop = next(texts[n][-2] for n in range(3, len(texts)) if len(texts[n]) > len(texts[n - 1]) + 2)
        end = next(n for n, text in enumerate(texts) if stop in text)
        params = replace(SAMPLED, stop_strings=(stop,))
        ids, _, last = await collect(engine, prompt, params, stream=stream)
        assert (last.finish_reason, last.stop) == ("stop", stop)
        np.testing.assert_array_equal(ids, free[:end])

    use(server, vocab_size, body)


def test_server_eos_does_not_end_a_completion(server: str, vocab_size: int, prompt: np.ndarray) -> None:
    eos = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    eos = eos if isinstance(eos, list) else [eos]

    async def body(engine: VllmEngine) -> None:
        # At the highest temperature that vLLM takes, end-of-sequence ids occur among many thousand draws.
        calls = [
            collect(engine, prompt, SamplingParams(max_tokens=900, temperature=2.0, seed=seed), stream=False)
            for seed in range(16)
        ]
        results = await asyncio.gather(*calls)
        assert np.isin(np.concatenate([ids for ids, _, _ in results]), eos).any()
        assert all(last.finish_reason == "length" for _, _, last in results)

    use(server, vocab_size, body)


def test_the_end_of_the_context_is_a_length_stop(server: str, vocab_size: int, prompt: np.ndarray) -> None:
    long = np.resize(prompt, CONTEXT - 5).astype(np.int32)
    ids, _, last = use(server, vocab_size, lambda engine: collect(engine, long, GREEDY, stream=True))
    assert (len(ids), last.finish_reason) == (5, "length")


@pytest.mark.parametrize("stream", [True, False])
def test_refusals_by_the_server_are_invalid_requests(
    server: str, vocab_size: int, prompt: np.ndarray, stream: bool
) -> None:
    params = SamplingParams(max_tokens=1, top_logprobs=21)
    with pytest.raises(InvalidRequest):
        use(server, vocab_size, lambda engine: collect(engine, prompt, params, stream=stream))


def test_sampled_id_beyond_the_caller_s_vocabulary_is_refused(server: str, vocab_size: int) -> None:
    prompt = np.arange(10, dtype=np.int32)
    free, _, _ = use(server, vocab_size, lambda engine: collect(engine, prompt, GREEDY, stream=True))
    beyond = int(free.max())
    assert beyond > prompt.max()
    with pytest.raises(EngineContractError, match=f"sampled id {beyond}; the vocabulary has ids 0 to {beyond - 1}"):
        use(server, beyond, lambda engine: collect(engine, prompt, GREEDY, stream=True))


@pytest.mark.parametrize("stream", [True, False])
def test_abandoning_a_call_aborts_it_in_the_server(
    server: str, vocab_size: int, prompt: np.ndarray, stream: bool
) -> None:
    def running() -> float:
        with urllib.request.urlopen(f"{server}/metrics", timeout=10) as reply:
            match = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
        assert match is not None
        return float(match[1])

    async def until(count: int) -> None:
        async with asyncio.timeout(30):
            while await asyncio.to_thread(running) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def body(engine: VllmEngine) -> None:
        params = SamplingParams(max_tokens=CONTEXT - len(prompt), temperature=0)
        if stream:
            async with aclosing(engine.sample(prompt, params, stream=True, request_id="left")) as deltas:
                await anext(deltas)
                await until(1)
        else:
            task = asyncio.create_task(collect(engine, prompt, params, stream=False))
            await until(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        left = time.monotonic()
        await until(0)
        # Finishing would have taken far longer than noticing that the client left.
        print(f"idle {time.monotonic() - left:.2f} s after leaving", file=sys.stderr)

    use(server, vocab_size, body)


def test_concurrent_calls_do_not_mix(server: str, vocab_size: int, prompt: np.ndarray) -> None:
    async def body(engine: VllmEngine) -> None:
        prompts = [np.roll(prompt, n) for n in range(8)]
        alone = [await collect(engine, p, SAMPLED, stream=True) for p in prompts]
        together = await asyncio.gather(
            *[collect(engine, p, SAMPLED, stream=n % 2 == 0) for n, p in enumerate(prompts)]
        )
        for (ids, _, _), (ids_together, _, _) in zip(alone, together, strict=True):
            np.testing.assert_array_equal(ids, ids_together)

    use(server, vocab_size, body)


def test_schema_is_enforced_and_logprobs_are_over_allowed_ids(
    server: str, vocab_size: int, forward: Callable[[np.ndarray], np.ndarray], prompt: np.ndarray
) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["sum", "total"]}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    end = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    stops = tuple(end) if isinstance(end, list) else (end,)
    params = SamplingParams(max_tokens=200, seed=3, top_logprobs=5, stop_token_ids=stops)
    constrained = replace(params, json_schema=json.dumps(schema))

    async def body(engine: VllmEngine) -> list[Any]:
        assert "json_schema" in engine.info.sampling
        runs = []
        for stream in (True, False):
            sampled = engine.sample(prompt, constrained, stream=stream, request_id="test")
            deltas = [delta async for delta in sampled]
            ids = [token_id for delta in deltas for token_id in delta.token_ids]
            runs.append((ids, [pairs for delta in deltas for pairs in delta.top_logprobs], deltas[-1]))
        return runs

    (ids, tops, last), (again, _, _) = use(server, vocab_size, body)
    assert ids == again
    if last.finish_reason == "stop":
        from tokenizers import Tokenizer

        text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(ids)
        arguments = json.loads(text)
        assert arguments["name"] in ("sum", "total")
        assert isinstance(arguments["count"], int)
    expected = forward(np.concatenate([prompt, np.array(ids, np.int32)]))[len(prompt) - 1 : -1]
    shifts = []
    for row, pairs in zip(expected, tops, strict=True):
        # Excluding tokens and normalizing the rest shifts all remaining ones by the same amount.
        row_shifts = [logprob - row[token_id] for token_id, logprob in pairs]
        np.testing.assert_allclose(row_shifts, row_shifts[0], atol=10 * TOLERANCE)
        shifts.append(row_shifts[0])
    assert min(shifts) > -TOLERANCE
    assert max(shifts) > 1
