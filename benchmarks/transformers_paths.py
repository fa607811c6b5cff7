"""Tokens per CPU second of the three paths of the embedded engine, against `generate` of transformers by itself.

All in one run on one model folder: the same N requests, all at once, through the engine on each path, and through
plain `generate` as one left-padded batch with none of our hooks. Greedy, no stop, random prompts of random lengths,
a fixed number of tokens each; the ways take turns, the first round of each is thrown away. `uneven` requests want a
quarter to all of the tokens: there a batch of `generate` runs on for its longest.

    python benchmarks/transformers_paths.py [MODEL_DIR] [--requests 1 8 32] [--prompt 200] [--tokens 64] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig

import tokentape.demo
from tokentape.engines.base import SamplingParams
from tokentape.engines.regular import left_padded
from tokentape.engines.transformers import ForwardPath, TransformersEngine
from tokentape.types import TokenIds


def plain_generate(model_dir: Path, prompts: list[TokenIds], limits: list[int]) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()
    ids, mask = left_padded([prompt.tolist() for prompt in prompts])

    def run() -> None:
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max(limits), eos_token_id=None, pad_token_id=0
        )
        assert output.shape[1] == ids.shape[1] + max(limits)

    return run


def through_engine(engine: TransformersEngine, prompts: list[TokenIds], limits: list[int]) -> Callable[[], None]:
    params = SamplingParams(max_tokens=1, temperature=0.0)

    async def one(number: int, prompt: TokenIds, limit: int) -> None:
        sampled = 0
        wanted = replace(params, max_tokens=limit)
        async for delta in engine.sample(prompt, wanted, stream=True, request_id=str(number)):
            sampled += len(delta.token_ids)
        assert sampled == limit

    async def run() -> None:
        await asyncio.gather(*(one(n, prompts[n], limits[n]) for n in range(len(prompts))))

    return lambda: asyncio.run(run())


def medians(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """CPU seconds per way, the ways taking turns, after a round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: float(np.median(taken[1:])) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, nargs="?", default=Path(tokentape.demo.__file__).parent / "model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=200, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens sampled per request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    paths: tuple[ForwardPath, ...] = get_args(ForwardPath)
    # The rounds repeat their prompts: no reuse on the own path. On the paged one it can't be switched off.
    engines = {path: TransformersEngine.open(args.model_dir, path=path, prefix_cache_bytes=0) for path in paths}
    table = Table(
        title=f"{args.prompt // 4} to {args.prompt} prompt, {args.tokens} sampled tokens, {args.threads} threads, "
        f"torch {torch.__version__}; tokens per CPU second"
    )
    for heading in ("requests", "plain generate", *paths):
        table.add_column(heading, justify="right")
    rng = np.random.default_rng(0)
    for count in args.requests:
        for uneven in (False, True):
            prompts = [
                rng.integers(0, engines["own"].info.vocab_size, length, dtype=np.int32)
                for length in rng.integers(args.prompt // 4, args.prompt + 1, count)
            ]
            least = args.tokens // 4 if uneven else args.tokens
            limits = [int(limit) for limit in rng.integers(least, args.tokens + 1, count)]
            runs = {"plain generate": plain_generate(args.model_dir, prompts, limits)}
            runs |= {path: through_engine(engine, prompts, limits) for path, engine in engines.items()}
            taken = medians(runs, args.rounds)
            rates = {name: sum(limits) / seconds for name, seconds in taken.items()}
            base = rates["plain generate"]
            table.add_row(
                f"{count}{', uneven' if uneven else ''}",
                *(f"{rate:,.0f} ({rate / base:.2f}x)" for rate in rates.values()),
            )
    for engine in engines.values():
        asyncio.run(engine.close())
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
