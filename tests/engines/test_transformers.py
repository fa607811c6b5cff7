from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")

from embedded import (  # noqa: E402
    GREEDY,
    WARM,
    Log,
    assert_declared,
    assert_recomputable,
    prompt,
    recomputed,
    sample,
)
from tests.imports import loaded  # noqa: E402

from tokentape.engines._base import LogprobsMode, SampleDelta, SamplingParams  # noqa: E402
from tokentape.engines._transformers import FinishedSample, TransformersEngine  # noqa: E402
from tokentape.errors import EngineUnavailable, InvalidRequest, UnsupportedParameter  # noqa: E402


@pytest.fixture(scope="module")
def log() -> Log:
    return Log()


@pytest.fixture(scope="module")
def engine(untrained_dir: Path, log: Log) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.open(untrained_dir, on_finish=log)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def short_engine(untrained_dir: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.open(untrained_dir, max_context=256)
    yield engine
    asyncio.run(engine.close())


# What is sampled


def test_greedy_ids_match_generate(engine: TransformersEngine, model: Any) -> None:
    for length in (1, 9, 60):
        ids = prompt(length)
        expected = model.generate(
            torch.from_numpy(ids.astype(np.int64))[None],
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            do_sample=False,
            max_new_tokens=20,
            suppress_tokens=list(range(300, 320)),
        )
        assert sample(engine, ids, GREEDY).ids == expected[0, length:].tolist()


def test_seeds_that_differ_only_in_sign_sample_different_ids(engine: TransformersEngine) -> None:
    minus, plus = (sample(engine, prompt(9), replace(WARM, seed=seed)).ids for seed in (-1, 1))
    assert minus != plus


SHAPED = replace(WARM, temperature=0.6, top_p=0.8, top_k=20, min_p=0.01, presence_penalty=1.0, repetition_penalty=1.2)


@pytest.fixture(scope="module", params=get_args(LogprobsMode))
def mode(request: pytest.FixtureRequest) -> LogprobsMode:
    mode: LogprobsMode = request.param
    return mode


@pytest.fixture(scope="module")
def engine_of_mode(mode: LogprobsMode, untrained_dir: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.open(untrained_dir, logprobs_mode=mode)
    yield engine
    asyncio.run(engine.close())


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, top_k=3, frequency_penalty=0.5),
        WARM,
        replace(WARM, temperature=0.6),
        replace(WARM, temperature=1.4, top_p=0.9),
        replace(WARM, min_tokens=0, min_p=0.05),
        SHAPED,
    ],
    ids=str,
)
def test_logprobs_match_the_distribution_of_the_mode(
    engine_of_mode: TransformersEngine, mode: LogprobsMode, model: Any, params: SamplingParams
) -> None:
    assert engine_of_mode.info.logprobs_mode == mode
    assert_declared(model, prompt(12), sample(engine_of_mode, prompt(12), params), params, mode)


def test_default_logprobs_are_of_the_sampled_distribution(engine: TransformersEngine, model: Any) -> None:
    sampled = sample(engine, prompt(12), SHAPED)
    assert_declared(model, prompt(12), sampled, SHAPED, "processed_logprobs")
    for other in ("raw_logprobs", "scaled_logprobs"):
        with pytest.raises(AssertionError):
            assert_declared(model, prompt(12), sampled, SHAPED, other)


def test_truncated_alternatives_are_not_reported(engine: TransformersEngine) -> None:
    sampled = sample(engine, prompt(7), replace(WARM, top_logprobs=5, top_k=2))
    tops = [top for delta in sampled.deltas for top in delta.top_logprobs]
    assert {len(top) for top in tops} == {2}
    for top, token_id, logprob in zip(tops, sampled.ids, sampled.logprobs, strict=True):
        assert sum(np.exp([value for _, value in top])) == pytest.approx(1)
        assert dict(top)[token_id] == pytest.approx(logprob)


def test_top_logprobs_are_the_most_likely_ids_best_first(engine: TransformersEngine, model: Any) -> None:
    sampled = sample(engine, prompt(7), replace(WARM, top_logprobs=3))
    tops = [top for delta in sampled.deltas for top in delta.top_logprobs]
    values, ids = recomputed(model, prompt(7), sampled.ids)[:, :300].log_softmax(-1).topk(3)
    assert [[i for i, _ in top] for top in tops] == ids.tolist()
    torch.testing.assert_close(torch.tensor([[x for _, x in top] for top in tops]), values, atol=1e-4, rtol=0)


def test_top_logprobs_are_left_out_unless_requested(engine: TransformersEngine) -> None:
    assert all(delta.top_logprobs == () for delta in sample(engine, prompt(7), WARM).deltas)


def test_interrupted_call_ends_with_the_sampled_tokens(engine: TransformersEngine) -> None:
    params = replace(GREEDY, max_tokens=4000)

    async def main() -> list[SampleDelta]:
        deltas = engine.sample(prompt(9), params, stream=True, request_id="call")
        received = [await anext(deltas)]
        assert not engine.interrupt("other")
        assert engine.interrupt("call")
        received += [delta async for delta in deltas]
        assert not engine.interrupt("call")
        return received

    completion = asyncio.run(main())
    ids = [token_id for delta in completion for token_id in delta.token_ids]
    assert (completion[-1].finish_reason, 0 < len(ids) < 4000) == ("abort", True)
    assert ids == sample(engine, prompt(9), replace(params, max_tokens=len(ids))).ids


def test_the_same_seed_samples_the_same_ids_and_another_does_not(engine: TransformersEngine) -> None:
    first, again, other = (sample(engine, prompt(5), replace(WARM, seed=seed)) for seed in (1, 1, 2))
    assert first.ids == again.ids != other.ids


def test_without_a_seed_two_samples_differ(engine: TransformersEngine) -> None:
    first, second = (sample(engine, prompt(5), replace(WARM, seed=None)) for _ in range(2))
    assert first.ids != second.ids


def test_top_k_1_is_greedy_at_any_temperature(engine: TransformersEngine) -> None:
    hot = replace(GREEDY, temperature=5.0, top_k=1)
    assert sample(engine, prompt(9), hot).ids == sample(engine, prompt(9), GREEDY).ids


def test_a_penalty_keeps_greedy_sampling_from_repeating(engine: TransformersEngine) -> None:
    params = replace(GREEDY, max_tokens=60, frequency_penalty=100.0)
    ids = sample(engine, prompt(9), params).ids
    assert len(set(ids)) == len(ids) == 60


def test_ids_beyond_the_tokenizer_are_never_sampled(engine: TransformersEngine, model: Any) -> None:
    sampled = sample(engine, prompt(9), replace(WARM, max_tokens=60, temperature=100.0, top_logprobs=300))
    assert max(sampled.ids) < 300 == engine.info.vocab_size
    assert all(i < 300 for delta in sampled.deltas for top in delta.top_logprobs for i, _ in top)
    # The model would: nearly 1 in 16 at this temperature.
    padding = recomputed(model, prompt(9), sampled.ids).div(100).softmax(-1)[:, 300:].sum(-1)
    assert padding.mean() > 0.04


# How it ends


def test_max_tokens_ends_with_length(engine: TransformersEngine) -> None:
    sampled = sample(engine, prompt(3), replace(WARM, max_tokens=1))
    assert (len(sampled.ids), sampled.last.finish_reason, sampled.last.stop) == (1, "length", None)


def test_the_end_of_the_context_ends_with_length(short_engine: TransformersEngine, model: Any) -> None:
    sampled = sample(short_engine, prompt(250), replace(WARM, max_tokens=100))
    assert (len(sampled.ids), sampled.last.finish_reason) == (6, "length")
    assert_recomputable(model, prompt(250), sampled)


def test_a_stop_id_stays_in_the_ids(engine: TransformersEngine) -> None:
    free = sample(engine, prompt(4), WARM)
    stop = free.ids[10]
    sampled = sample(engine, prompt(4), replace(WARM, stop_token_ids=(stop, 299)))
    assert sampled.ids == free.ids[: free.ids.index(stop) + 1]
    assert (sampled.last.finish_reason, sampled.last.stop) == ("stop", stop)


def test_a_stop_on_the_last_allowed_token_is_a_stop(engine: TransformersEngine) -> None:
    [first] = sample(engine, prompt(4), replace(WARM, max_tokens=1)).ids
    sampled = sample(engine, prompt(4), replace(WARM, max_tokens=1, stop_token_ids=(first,)))
    assert sampled.last.finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_the_token_that_completes_a_stop_string_is_the_last(
    engine: TransformersEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    params = replace(WARM, max_tokens=60)
    free = sample(engine, prompt(4), params).ids
    text = tokenizer.decode(free, skip_special_tokens=False)
    stop = next(text[i : i + 3] for i in range(30, len(text)) if "\ufffd" not in text[i : i + 3])
    sampled = sample(engine, prompt(4), replace(params, stop_strings=("not there", stop)), stream=stream)
    end = next(n for n in range(1, 61) if stop in tokenizer.decode(free[:n], skip_special_tokens=False))
    assert sampled.ids == free[:end]
    assert (sampled.last.finish_reason, sampled.last.stop) == ("stop", stop)


def test_streaming_yields_a_delta_per_token_and_otherwise_a_single_one(engine: TransformersEngine) -> None:
    streamed, whole = (sample(engine, prompt(4), WARM, stream=stream) for stream in (True, False))
    assert [len(delta.token_ids) for delta in streamed.deltas] == [1] * 20
    assert len(whole.deltas) == 1
    assert streamed.ids == whole.ids


def test_log_matches_the_caller_s_deltas(engine: TransformersEngine, log: Log) -> None:
    sampled = sample(engine, prompt(4), WARM, request_id="logged")
    assert log.wait("logged") == FinishedSample(
        "logged", tuple(prompt(4).tolist()), tuple(sampled.ids), tuple(sampled.logprobs), "length"
    )


def test_number_of_threads_is_torch_s_default_unless_set(untrained_dir: Path) -> None:
    before = torch.get_num_threads()
    for threads, expected in ((None, before), (before + 1, before + 1)):
        asyncio.run(TransformersEngine.open(untrained_dir, threads=threads).close())
        assert torch.get_num_threads() == expected
    torch.set_num_threads(before)


# What is refused, what fails


@pytest.mark.parametrize("bad", [-1, 300, 319, 2**31 - 1])
def test_a_prompt_id_outside_the_tokenizer_is_refused(engine: TransformersEngine, bad: int) -> None:
    ids = prompt(5)
    ids[3] = bad
    with pytest.raises(InvalidRequest, match=f"prompt id {bad} at position 3 is not .* 0 to 299"):
        sample(engine, ids, WARM)


@pytest.mark.parametrize(("length", "words"), [(0, "empty"), (256, "256 tokens"), (300, "context holds 256")])
def test_a_prompt_of_impossible_length_is_refused(short_engine: TransformersEngine, length: int, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        sample(short_engine, prompt(length), WARM)
    assert caught.value.param == "prompt_ids"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("top_logprobs", -1),
        ("stop_strings", ("x", "")),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(engine: TransformersEngine, name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sample(engine, prompt(3), replace(WARM, **{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), [("min_tokens", 2), ("cache_salt", "x"), ("payloads_from", 0)])
def test_unsupported_parameter_is_refused_by_name(engine: TransformersEngine, name: str, value: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        sample(engine, prompt(3), replace(WARM, **{name: value}))
    assert caught.value.param == name


def test_a_closed_engine_takes_no_requests(untrained_dir: Path) -> None:
    engine = TransformersEngine.open(untrained_dir)
    asyncio.run(engine.check())
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    with pytest.raises(EngineUnavailable):
        asyncio.run(engine.check())
    with pytest.raises(EngineUnavailable):
        sample(engine, prompt(3), WARM)


def test_importing_the_engine_loads_neither_torch_nor_transformers() -> None:
    assert "tokentape.engines._transformers" in loaded()
    assert not {"torch", "transformers"} & loaded()
