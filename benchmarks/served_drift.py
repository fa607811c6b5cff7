"""Measure how much a served model drifts, and add a row to the table of models.

    python benchmarks/served_drift.py path/to/model --engine vllm --engine-url http://127.0.0.1:8000 \\
        --out docs/experiments/data/models-drift.jsonl

The folder has the model's tokenizer and chat template, and its weights if there is no server. Each of the 60 prompts of
benchmarks/prompts.json is answered once, at temperature 1 and without truncation. The row says which model, engine,
settings and prompts, with digests, and the shares of drifted completions and tokens with 95 % intervals over prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from tokentape._version import __version__
from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._id_rows import IdRow, Span
from tokentape.audit._statistics import Rate
from tokentape.chat import Renderer
from tokentape.engines import Engine, SamplingParams, TransformersEngine, open_engine

PROMPTS = Path(__file__).with_name("prompts.json")
BEGIN, END = "<!-- written by benchmarks/served_drift.py -->\n", "<!-- end -->"


async def completions(engine: Engine, renderer: Renderer, params: SamplingParams, concurrency: int) -> list[IdRow]:
    """Return the completion of each prompt, as a row of its own."""
    setup = renderer.setup()
    gate = asyncio.Semaphore(concurrency)

    async def one(number: int, kind: str, text: str) -> IdRow:
        prompt = renderer.render([{"role": "user", "content": text}], setup).ids
        own = SamplingParams(
            params.max_tokens,
            params.temperature,
            seed=number,
            stop_token_ids=tuple(sorted(renderer.stop_ids(setup))),
        )
        async with gate, aclosing(engine.sample(prompt, own, stream=False, request_id=f"drift-{number}")) as deltas:
            ids = np.array([token async for delta in deltas for token in delta.token_ids], np.int32)
        return IdRow(f"{number}", ids, (Span(0, len(ids), {"kind": kind}),))

    asked = [(kind, text) for kind, texts in json.loads(PROMPTS.read_text("utf-8")).items() for text in texts]
    return list(await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked))))


def digest(*files: Path) -> str:
    """Return the first 12 digits of the SHA-256 of some files."""
    found = hashlib.sha256()
    for file in files:
        with open(file, "rb") as source:
            while part := source.read(1 << 20):
                found.update(part)
    return found.hexdigest()[:12]


async def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a model."""
    renderer = Renderer.load(arguments.model)
    engine: Engine
    if arguments.engine is None:
        engine = TransformersEngine.open(arguments.model)
    else:
        engine = await open_engine(arguments.engine, arguments.engine_url, vocab_size=renderer.tokenizer.vocab_size)
    params = SamplingParams(arguments.max_tokens, arguments.temperature)
    try:
        rows = await completions(engine, renderer, params, arguments.concurrency)
        report, info = measure_drift(rows, renderer.tokenizer), engine.info
    finally:
        await engine.close()
    weights = sorted(arguments.model.glob("*.safetensors"))
    return {
        "model": arguments.name or info.model,
        "engine": str(info),
        "sampling": {
            "temperature": params.temperature,
            "top_p": 1.0,
            "max_tokens": params.max_tokens,
            "seeds": "0 to 59",
        },
        "completions": _rate(report.completions),
        "tokens": _rate(report.tokens),
        "tokenizer": renderer.tokenizer.sha256[:12],
        "template": renderer.fingerprint[:12],
        "weights": digest(*weights) if weights else None,
        "prompts": digest(PROMPTS),
        "tokentape": __version__,
    }


def _rate(rate: Rate) -> dict[str, Any]:
    interval = None if rate.low is None or rate.high is None else [round(rate.low, 6), round(rate.high, 6)]
    return {"share": round(rate.share, 6), "of": rate.total, "interval": interval}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| model | engine | sampling | completions that drift | tokens that drift | tokenizer, weights, prompts |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        sampling = f"temperature {row['sampling']['temperature']:g}, at most {row['sampling']['max_tokens']} tokens"
        digests = ", ".join(f"`{row[name] or 'not here'}`" for name in ("tokenizer", "weights", "prompts"))
        shares = [_share(row[name]) for name in ("completions", "tokens")]
        lines.append(f"| {' | '.join([row['model'], row['engine'], sampling, *shares, digests])} |")
    return "\n".join(lines) + "\n"


def _share(rate: Mapping[str, Any]) -> str:
    low, high = rate["interval"] or (float("nan"), float("nan"))
    return f"{rate['share']:.2%} [{low:.2%}, {high:.2%}] of {rate['of']:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with tokenizer and template")
    parser.add_argument("--name", help="how the table calls the model; by default as the engine does")
    parser.add_argument("--engine", choices=["vllm", "sglang", "llamacpp"])
    parser.add_argument("--engine-url")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; the row is added")
    parser.add_argument("--page", type=Path, help="write the table of this page again, from all rows")
    arguments = parser.parse_args()
    row = asyncio.run(measured(arguments))
    with open(arguments.out, "a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in arguments.out.read_text("utf-8").splitlines()]
    if arguments.page is not None:
        before, _, rest = arguments.page.read_text("utf-8").partition(BEGIN)
        arguments.page.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2], encoding="utf-8")
    print(table([row]))


if __name__ == "__main__":
    main()
