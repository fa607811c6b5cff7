"""The embedded engine on a CUDA GPU: exact records, the CPU's ids, and scores that agree on both devices."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from tests.audit.planted import load, perturbed  # noqa: E402
from tokentape.cli import app  # noqa: E402
from tokentape.demo import MODEL  # noqa: E402
from tokentape.demo.findings import DemoReport  # noqa: E402
from tokentape.demo.run import run_demo  # noqa: E402
from tokentape.engines._base import SamplingParams  # noqa: E402
from tokentape.engines._transformers import TransformersEngine  # noqa: E402
from tokentape.errors import EngineError  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)

Score: TypeAlias = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, DemoReport]:
    """Record 16 sessions of the demo on the GPU, all at once."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    return request.param, run_demo(directory, 16, 0, device="cuda", dtype=request.param)


@pytest.fixture
def score(demo: tuple[str, DemoReport]) -> Score:
    """Runs `tokentape score` on the demo's record with a new column."""

    def score(column: str, *arguments: object) -> tuple[int, dict[str, Any]]:
        options = ["--column", column, "--json", *map(str, arguments)]
        done = CliRunner().invoke(app, ["score", str(demo[1].directory), *options])
        assert done.exit_code in (0, 1), done.output
        assert done.stdout, (done.stderr, done.exception)
        return done.exit_code, json.loads(done.stdout)

    return score


def test_record_equals_what_the_gpu_sampled(demo: tuple[str, DemoReport]) -> None:
    _, report = demo
    assert report.turns > 50
    assert (report.turns_differing_from_engine, report.findings) == (0, 0)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_of_both_devices_and_dtypes_agree_with_the_record(
    demo: tuple[str, DemoReport], score: Score, device: str, dtype: str
) -> None:
    exact = demo[0] == dtype == "float32"
    precision = "float32" if exact else "bfloat16"
    code, report = score(f"{device}_{dtype}", "--device", device, "--dtype", dtype, "--precision", precision)
    print(f"recorded in {demo[0]}, scored on {device} in {dtype}: {report['numeric']}")
    assert (code, report["causes"]) == (0, [])
    assert not exact or report["numeric"]["max"] < 1e-4


def test_other_weights_are_found_in_scores_of_the_gpu(score: Score, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(MODEL, folder)
    perturbed(load(MODEL), 1.0).save_pretrained(folder)
    code, report = score("other", "--device", "cuda", "--precision", "bfloat16", "--model", folder)
    assert (code, [cause["causes"] for cause in report["causes"]]) == (1, [["weights"]])


def test_seeds_give_the_cpus_ids_and_logprobs() -> None:
    prompts = [np.random.default_rng(length).integers(10, 400, length, dtype=np.int32) for length in (3, 40, 200)]

    async def sampled(device: str) -> list[tuple[list[int], list[float]]]:
        engine = TransformersEngine.open(MODEL, device=device, threads=1)

        async def one(number: int) -> tuple[list[int], list[float]]:
            temperature, top_p = (0.0, 1.0) if number % 2 else (1.0, 0.95)
            params = SamplingParams(max_tokens=60, temperature=temperature, top_p=top_p, seed=number)
            deltas = engine.sample(prompts[number % 3], params, stream=False, request_id=str(number))
            parts = [delta async for delta in deltas]
            return [i for part in parts for i in part.token_ids], [x for part in parts for x in part.logprobs]

        try:
            return await asyncio.gather(*(one(number) for number in range(24)))
        finally:
            await engine.close()

    on_cpu, on_gpu = asyncio.run(sampled("cpu")), asyncio.run(sampled("cuda"))
    assert [ids for ids, _ in on_gpu] == [ids for ids, _ in on_cpu]
    np.testing.assert_allclose(
        np.concatenate([logprobs for _, logprobs in on_gpu]),
        np.concatenate([logprobs for _, logprobs in on_cpu]),
        atol=1e-4,
    )


def test_call_after_one_that_needed_too_much_memory_works() -> None:
    prompt = np.full(1500, 20, np.int32)

    async def run() -> tuple[str, list[int]]:
        engine = TransformersEngine.open(MODEL, device="cuda", prefix_cache_bytes=0)
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
        try:
            calls = [_ids(engine, prompt, GREEDY, f"long {number}") for number in range(32)]
            with pytest.raises(EngineError) as raised:
                await asyncio.gather(*calls)
            short = await _ids(engine, prompt[:8], GREEDY, "short")
            return str(raised.value), short
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            await engine.close()

    message, ids = asyncio.run(run())
    assert message.startswith("the model failed: OutOfMemoryError: CUDA out of memory")
    assert len(ids) == 4


async def _ids(engine: TransformersEngine, prompt: Any, params: SamplingParams, request_id: str) -> list[int]:
    deltas = engine.sample(prompt, params, stream=False, request_id=request_id)
    return [i async for delta in deltas for i in delta.token_ids]
