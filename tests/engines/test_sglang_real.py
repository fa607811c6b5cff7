"""The SGLang engine against a real SGLang server on the demonstration model, compared with its forward pass."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import forward_with, record
from real import MODEL, collect, load_forward, served, use
from tokenizers import Tokenizer

from tokentape._supports import kept_ids
from tokentape.engines._base import SampleDelta, SamplingParams, WeightSpan
from tokentape.engines._openai_compatible import OpenAiEngine
from tokentape.engines._sglang import SglangEngine
from tokentape.errors import EngineError, InvalidRequest
from tokentape.store import SqliteStore
from tokentape.training import assemble, exports

SERVER = os.environ.get("TOKENTAPE_SGLANG_SERVER")
CONTEXT = 1024
VOCAB_SIZE = 4000
TOLERANCE = 1e-4
"""Tolerance of log-probabilities in float32, between SGLang's kernels and the plain forward pass."""
SUPPORT_TOLERANCE = 2e-5
"""Tolerance of log-probabilities over a mask, from a float64 forward pass. A float32 pass differs about as much."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(SERVER is None, reason="needs a command that starts an SGLang server: TOKENTAPE_SGLANG_SERVER"),
]

GREEDY = SamplingParams(max_tokens=30, temperature=0)
SAMPLED = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.95, top_k=50)
OPTIONS = (
    f"--model-path {MODEL} --served-model-name demo --device cpu --attention-backend torch_native "
    f"--sampling-backend pytorch --dtype float32 --context-length {CONTEXT} --max-total-tokens 8192 "
    "--max-running-requests 8 --mem-fraction-static 0.3 --disable-overlap-schedule --host 127.0.0.1 --port"
)


def running(log: Any, *more: str) -> Any:
    def command(port: int) -> list[str]:
        return [*shlex.split(f"{SERVER} {OPTIONS}"), str(port), *more]

    return served(command, log, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module", params=["cumulative", "incremental"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server for each kind of stream."""
    more = ["--incremental-streaming-output"] if request.param == "incremental" else []
    with running(tmp_path_factory.mktemp("sglang") / "log", *more) as url:
        yield url


@pytest.fixture(scope="module")
def forward() -> Callable[[np.ndarray], np.ndarray]:
    return load_forward()


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 3900, 50).astype(np.int32)


def opened(server: str, **opening: Any) -> Callable[[], Any]:
    return lambda: SglangEngine.open(server, vocab_size=VOCAB_SIZE, **opening)


def post(server: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = urllib.request.Request(server + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as reply:
        return json.loads(reply.read() or b"{}")  # type: ignore[no-any-return]


def scaled(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return log-probabilities after temperature."""
    heated = logits / temperature
    return np.asarray(heated - np.logaddexp.reduce(heated, axis=-1, keepdims=True))


@pytest.mark.parametrize("verify_prompt", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_match_the_forward_pass_after_temperature(
    server: str,
    forward: Callable[[np.ndarray], np.ndarray],
    prompt: np.ndarray,
    params: SamplingParams,
    verify_prompt: bool,
) -> None:
    async def body(engine: SglangEngine) -> list[Any]:
        assert engine.info.logprobs_mode == "scaled_logprobs"
        return [await collect(engine, prompt, params, stream=stream) for stream in (True, False)]

    for ids, logprobs, last in use(opened(server, verify_prompt=verify_prompt), body):
        assert last.finish_reason == "length"
        assert len(ids) == 30
        expected = scaled(forward(np.concatenate([prompt, ids]))[len(prompt) - 1 : -1], params.temperature or 1.0)
        differences = np.abs(logprobs - expected[np.arange(len(ids)), ids])
        print(f"largest difference {differences.max():.1e}")
        assert differences.max() < TOLERANCE
        if params is GREEDY:
            assert (expected.max(axis=1) - logprobs < TOLERANCE).all()


@pytest.mark.parametrize("opening", [opened, lambda url: lambda: OpenAiEngine.open(url, vocab_size=VOCAB_SIZE)])
def test_logprobs_of_a_top_k_of_one_match_the_forward_pass_after_temperature(
    server: str, forward: Callable[[np.ndarray], np.ndarray], prompt: np.ndarray, opening: Callable[[str], Any]
) -> None:
    params = replace(SAMPLED, temperature=0.5, top_k=1, top_p=1.0)
    ids, logprobs, _ = use(opening(server), lambda engine: collect(engine, prompt, params, stream=True))
    expected = scaled(forward(np.concatenate([prompt, ids]))[len(prompt) - 1 : -1], params.temperature)
    assert (expected.max(axis=1) - logprobs < TOLERANCE).all()
    assert np.abs(expected[np.arange(len(ids)), ids] - logprobs).max() < TOLERANCE


@pytest.mark.parametrize("stops", [(), (3993,)])
def test_completion_of_a_grammar_has_no_id_outside_it(server: str, prompt: np.ndarray, stops: tuple[int, ...]) -> None:
    tag = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}})
    params = replace(SAMPLED, structural_tag=tag, stop_token_ids=stops)
    ids, _, last = use(opened(server), lambda engine: collect(engine, prompt, params, stream=True))
    text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(ids[:-1].tolist(), skip_special_tokens=False)
    assert (text, last.finish_reason, last.stop) == ("hello", "stop", ids[-1])


@pytest.mark.parametrize("changed", [{}, {"frequency_penalty": 0.5}])
def test_retracted_call_is_refused_if_it_has_penalties(
    server: str, forward: Callable[[np.ndarray], np.ndarray], prompt: np.ndarray, changed: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=100, **changed)  # type: ignore[arg-type]

    async def body(engine: SglangEngine) -> tuple[list[int], list[float]]:
        ids, logprobs = list[int](), list[float]()
        async for delta in engine.sample(prompt, params, stream=True, request_id="retracted"):
            if len(ids) < 20 <= len(ids) + len(delta.token_ids):
                await asyncio.to_thread(post, server, "/pause_generation", {"mode": "retract"})
                await asyncio.to_thread(post, server, "/continue_generation", {})
            ids += delta.token_ids
            logprobs += delta.logprobs
        return ids, logprobs

    if changed:
        with pytest.raises(EngineError, match="retracted"):
            use(opened(server), body)
        return
    ids, logprobs = use(opened(server), body)
    expected = forward(np.concatenate([prompt, np.array(ids, np.int32)]))[len(prompt) - 1 : -1]
    assert np.abs(expected[np.arange(len(ids)), ids] - logprobs).max() < TOLERANCE


def test_completions_api_through_a_router_gives_the_same_tokens(server: str, prompt: np.ndarray) -> None:
    async def body(engine: Any) -> Any:
        return [await collect(engine, prompt, GREEDY, stream=stream) for stream in (True, False)]

    native = use(opened(server), body)
    through = use(lambda: OpenAiEngine.open(server, vocab_size=VOCAB_SIZE), body)
    for (ids, logprobs, _), (other_ids, other, _) in zip(native, through, strict=True):
        end = min(len(ids), len(other_ids))  # the completions API also ends at the model's EOS
        np.testing.assert_array_equal(ids[:end], other_ids[:end])
        np.testing.assert_allclose(logprobs[:end], other[:end], atol=TOLERANCE)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_id_ends_the_completion_and_stays_in_it(server: str, prompt: np.ndarray, stream: bool) -> None:
    async def body(engine: SglangEngine) -> None:
        free, _, _ = await collect(engine, prompt, GREEDY, stream=False)
        stop = int(free[7])
        end = int(np.flatnonzero(free == stop)[0]) + 1
        ids, _, last = await collect(engine, prompt, replace(GREEDY, stop_token_ids=(stop,)), stream=stream)
        assert (last.finish_reason, last.stop) == ("stop", stop)
        np.testing.assert_array_equal(ids, free[:end])

    use(opened(server), body)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_within_a_token_keeps_the_whole_token(server: str, prompt: np.ndarray, stream: bool) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    async def body(engine: SglangEngine) -> None:
        free, _, _ = await collect(engine, prompt, GREEDY, stream=False)
        texts = [tokenizer.decode(free[:n].tolist(), skip_special_tokens=False) for n in range(len(free) + 1)]
        stop = next(texts[n][-2] for n in range(3, len(texts)) if len(texts[n]) > len(texts[n - 1]) + 2)
        end = next(n for n, text in enumerate(texts) if stop in text)
        ids, _, last = await collect(engine, prompt, replace(GREEDY, stop_strings=(stop,)), stream=stream)
        assert (last.finish_reason, last.stop) == ("stop", stop)
        np.testing.assert_array_equal(ids, free[:end])

    use(opened(server), body)


def test_the_end_of_the_context_is_a_length_stop(server: str, prompt: np.ndarray) -> None:
    async def body(engine: SglangEngine) -> int:
        long = np.resize(prompt, engine.info.max_context - 9).astype(np.int32)
        ids, _, last = await collect(engine, long, GREEDY, stream=True)
        assert last.finish_reason == "length"
        return len(ids)

    assert 1 <= use(opened(server), body) <= 9


def test_refusals_by_the_server_are_invalid_requests(server: str, prompt: np.ndarray) -> None:
    for stream in (True, False):
        with pytest.raises(InvalidRequest):
            use(
                opened(server),
                lambda engine, stream=stream: collect(
                    engine, prompt, replace(GREEDY, presence_penalty=5.0), stream=stream
                ),
            )


@pytest.mark.parametrize("stream", [True, False])
def test_abandoning_a_call_aborts_it_in_the_server_immediately(server: str, prompt: np.ndarray, stream: bool) -> None:
    def busy() -> int:
        with urllib.request.urlopen(f"{server}/v1/loads", timeout=10) as reply:
            return sum(load["num_running_reqs"] for load in json.loads(reply.read())["loads"])

    async def until(count: int) -> None:
        async with asyncio.timeout(30):
            while await asyncio.to_thread(busy) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def body(engine: SglangEngine) -> float:
        params = SamplingParams(max_tokens=CONTEXT - len(prompt) - 10, temperature=0)
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
        return time.monotonic() - left

    took = use(opened(server), body)
    print(f"idle {took:.2f} s after leaving")
    assert took < 1.5  # closing the connection alone takes the server two seconds


def test_an_abort_in_the_server_keeps_the_tokens_so_far(server: str, prompt: np.ndarray) -> None:
    async def body(engine: SglangEngine) -> list[SampleDelta]:
        params = SamplingParams(max_tokens=900, temperature=0)
        deltas = []
        async for delta in engine.sample(prompt, params, stream=True, request_id="aborted"):
            deltas.append(delta)
            if len(deltas) == 3:
                await asyncio.to_thread(post, server, "/abort_request", {"rid": "", "abort_all": True})
        return deltas

    deltas = use(opened(server), body)
    assert deltas[-1].finish_reason == "abort"
    assert sum(len(delta.token_ids) for delta in deltas) >= 3


def test_new_weights_within_a_completion_give_spans_that_cover_it(server: str, prompt: np.ndarray) -> None:
    async def body(engine: SglangEngine) -> SampleDelta:
        params = SamplingParams(max_tokens=60, temperature=0)
        deltas = []
        async for delta in engine.sample(prompt, params, stream=True, request_id="updated"):
            deltas.append(delta)
            if len(deltas) == 10:
                change = {"new_version": f"v{time.time_ns()}", "abort_all_requests": False}
                await asyncio.to_thread(post, server, "/update_weight_version", change)
        return deltas[-1]

    last = use(opened(server), body)
    assert last.finish_reason == "length"
    first, second = last.weight_spans
    assert (first.start, second.end) == (0, 60)
    assert 10 <= first.end == second.start < 60
    assert isinstance(first, WeightSpan)
    assert first.version != second.version


def test_concurrent_calls_do_not_mix(server: str, prompt: np.ndarray) -> None:
    async def body(engine: SglangEngine) -> None:
        prompts = [np.roll(prompt, n) for n in range(6)]
        alone = [await collect(engine, p, GREEDY, stream=True) for p in prompts]
        together = await asyncio.gather(*[collect(engine, p, GREEDY, stream=n % 2 == 0) for n, p in enumerate(prompts)])
        for (ids, _, _), (ids_together, _, _) in zip(alone, together, strict=True):
            np.testing.assert_array_equal(ids, ids_together)

    use(opened(server), body)


def cut(rows: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that SGLang keeps by its source, and the ids so close to a limit that rounding decides.

    Takes log-probabilities after temperature, float64 [tokens, vocabulary]. Its top-p counts ids that top-k cuts.
    """
    order = np.argsort(-rows, axis=-1, kind="stable")
    likely = np.exp(np.take_along_axis(rows, order, -1))
    before = np.cumsum(likely, -1) - likely
    floor = params.min_p * likely[:, :1]
    kept = (np.arange(rows.shape[1]) < params.top_k) & (before <= params.top_p) & (likely >= floor)
    near = (np.abs(before - params.top_p) < 1e-5) | (np.abs(likely - floor) < 1e-5 * floor)
    # Equal probabilities on both sides of top-k.
    near |= np.abs(likely - likely[:, params.top_k - 1 : params.top_k]) < 1e-5 * likely
    masks_by_rule = np.zeros((2, *rows.shape), bool)
    for mine, sorted_so in zip(masks_by_rule, (kept, near), strict=True):
        np.put_along_axis(mine, order, sorted_so, -1)
    return masks_by_rule[0], masks_by_rule[1]


def test_ten_thousand_truncated_tokens_stay_within_their_masks_and_have_their_declared_logprobs(server: str) -> None:
    truncated = [
        SamplingParams(max_tokens=40, temperature=0.7, top_p=0.8, top_k=50, supports=4000),
        SamplingParams(max_tokens=40, temperature=1.3, top_p=0.9, top_k=7, supports=4000),
        SamplingParams(max_tokens=40, temperature=1.0, min_p=0.2, top_k=100, supports=4000),
    ]
    forward, plain = forward_with({}), load_forward()
    apart, rounding, unsure = list[float](), 0.0, 0

    async def calls(engine: SglangEngine, params: SamplingParams) -> list[list[SampleDelta]]:
        at_once = asyncio.Semaphore(8)

        async def call(number: int) -> list[SampleDelta]:
            prompt = np.random.default_rng(number).integers(0, 3900, 20).astype(np.int32)
            async with at_once, aclosing(engine.sample(prompt, params, stream=True, request_id=str(number))) as deltas:
                return [delta async for delta in deltas]

        return await asyncio.gather(*map(call, range(84)))

    for params in truncated:
        for number, deltas in enumerate(use(opened(server), lambda engine, params=params: calls(engine, params))):
            prompt = np.random.default_rng(number).integers(0, 3900, 20).astype(np.int32)
            ids = np.array([sampled_id for delta in deltas for sampled_id in delta.token_ids], np.int32)
            declared = np.array([value for delta in deltas for value in delta.logprobs])
            masks = [kept_ids(support) for delta in deltas for support in delta.supports]
            context, first = np.concatenate([prompt, ids]), len(prompt) - 1
            rows = scaled(forward(context)[first:-1], params.temperature)
            single = scaled(plain(context)[first:-1], params.temperature)
            expected, near = cut(rows, params)
            for row, rounded, token_id, logprob, mask, own, edge in zip(
                rows, single, ids, declared, masks, expected, near, strict=True
            ):
                assert mask is not None
                assert token_id in mask
                differs = np.flatnonzero(own != np.isin(np.arange(len(row)), mask))
                assert edge[differs].all()
                unsure += len(differs) > 0
                exact = row[token_id] - np.logaddexp.reduce(row[mask])
                apart.append(abs(exact - logprob))
                rounding = max(rounding, abs(exact - rounded[token_id] + np.logaddexp.reduce(rounded[mask])))
                # Without any of the mask's ids, the distribution differs.
                other = mask[mask != token_id]
                if len(other):
                    fewer = np.setdiff1d(mask, other[np.argmax(row[other])])
                    assert row[token_id] - np.logaddexp.reduce(row[fewer]) - logprob > 1e-4
    beyond = sum(difference > 1e-5 for difference in apart)
    print(
        f"tokens {len(apart)}, largest difference {max(apart):.1e}, more than 1e-5: {beyond}, "
        f"transformers in float32 {rounding:.1e}, masks that rounding decided {unsure}"
    )
    assert len(apart) == 3 * 84 * 40
    assert unsure < 20
    assert max(apart) < SUPPORT_TOLERANCE
    assert beyond < 20


def test_masks_are_recorded_and_fit_a_trainer_s_format(server: str, tmp_path: Path) -> None:
    async def opening(_: object) -> SglangEngine:
        return await SglangEngine.open(server, vocab_size=VOCAB_SIZE)

    params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, top_k=50)
    record(opening, tmp_path, [None] * 4, "What is {} + 2?", params, seeded=False, supports=4000)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        for stored in store.iter_sessions(per_token=True):
            assert [turn.sampling["supports"] for turn in stored.turns] == ["all", "all"]
            (sample,) = assemble(stored.trajectories()).samples
            assert "," not in sample.verdict
            # It refuses an id outside its support.
            fields = exports.slime_sample(sample, 0, 0)
            assert len(fields["rollout_log_probs"]) == len(fields["loss_mask"])


def test_closed_session_is_released_and_can_continue(prompt: np.ndarray, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def body(engine: SglangEngine) -> list[np.ndarray]:
        params = replace(GREEDY, session_id="kept")
        replies = [(await collect(engine, prompt, params, stream=True))[0]]
        assert "release_session" not in log.read_text()
        for _ in range(2):
            await asyncio.to_thread(post, url, "/close_session", {"session_id": "kept"})
            replies.append((await collect(engine, prompt, params, stream=True))[0])
        return replies

    with running(log, "--enable-session-radix-cache") as url:
        first, *later = use(opened(url), body)
        for reply in later:
            np.testing.assert_array_equal(reply, first)
        assert log.read_text().count("release_session kept: indexed 1 component leaves") == 2
