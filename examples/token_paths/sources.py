"""Where a mismatch comes from: one source at a time between a sampler and a trainer, with the model that ships.

    python examples/token_paths/sources.py --out docs/experiments/data/mismatch.json

The embedded engine samples the first replies of the demo's tasks. A plain forward pass is the trainer. Without a source
both have the same numbers. Each source is then switched on alone. `tokentape score` looks at the same numbers: the last
column is the cause that it names at `--precision float32`. report.py writes the table.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paths import Rollout, Turn, retokenized
from transformers import AutoModelForCausalLM

from tokentape.audit import logprob_numbers
from tokentape.audit._mismatch import LOOK_TOP, Mismatch
from tokentape.chat import Renderer
from tokentape.demo import MODEL
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, sample_tasks
from tokentape.engines import SamplingParams, TransformersEngine
from tokentape.engines._forward import ForwardPass
from tokentape.types import Provenance, TokenDistribution, Trajectory

COUNT = 48
OWN = TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
"""What the trainer takes all recorded logprobs for."""

Trainer = Callable[[Sequence[Trajectory]], list[Any]]
"""Sequences to the logprobs of each from the first sampled token on."""


def sampled(renderer: Renderer, **params: float) -> list[Trajectory]:
    """Return first replies to the demo's tasks, sampled in batches by the embedded engine in float32."""

    async def one(engine: TransformersEngine, seed: int, prompt: Any) -> Trajectory:
        asked = SamplingParams(96, seed=seed, stop_token_ids=tuple(renderer.tokenizer.eos_ids), **params)  # type: ignore[arg-type]
        deltas = [part async for part in engine.sample(prompt, asked, stream=False, request_id=str(seed))]
        ids = np.array([one for part in deltas for one in part.token_ids], np.int32)
        logprobs = np.array([one for part in deltas for one in part.logprobs], np.float32)
        return trajectory(seed, prompt, ids, logprobs)

    async def everyone() -> list[Trajectory]:
        engine = TransformersEngine.open(MODEL, max_batch=COUNT, logprobs_mode="processed_logprobs")
        try:
            prompts = [
                renderer.render(
                    [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.prompts[0]}], TOOLS
                ).ids
                for task in sample_tasks(7, COUNT, "heldout")
            ]
            return list(await asyncio.gather(*(one(engine, n, prompt) for n, prompt in enumerate(prompts))))
        finally:
            await engine.close()

    return asyncio.run(everyone())


def trajectory(number: int, prompt: Any, ids: Any, logprobs: Any) -> Trajectory:
    """Return a session of one turn."""
    start, end = len(prompt), len(prompt) + len(ids)
    codes = np.repeat(np.array([Provenance.USER, Provenance.SAMPLED], np.uint8), [start, len(ids)])
    return Trajectory(
        session_id=f"s{number}",
        leaf=0,
        token_ids=np.concatenate([prompt, ids]).astype(np.int32),
        provenance=codes,
        loss_mask=codes == Provenance.SAMPLED,
        logprobs=np.concatenate([np.zeros(start, np.float32), logprobs]),
        turns=(0,),
        completion_starts=np.array([start], np.int32),
        completion_ends=np.array([end], np.int32),
        weight_versions=("0",),
        reward=None,
        verdict="exact",
        metadata={},
        turn_rewards=np.array([np.nan]),
        weight_spans=((start, end, "0"),),
        sampled_from=(OWN,),
        logprobs_of=(OWN,),
    )


def through_text(renderer: Renderer, one: Trajectory) -> Trajectory:
    """Return what a pipeline has that keeps the text of a reply."""
    start = int(one.completion_starts[0])
    turn = Turn(one.token_ids[:start], one.token_ids[start:], one.logprobs[start:], {}, {})
    given = retokenized(renderer, Rollout((turn,), (True,)))
    return trajectory(int(one.session_id[1:]), one.token_ids[:start], given.token_ids[start:], given.logprobs[start:])


def alone(model: Any) -> Trainer:
    """Return a trainer that takes one sequence at a time."""

    @torch.inference_mode()
    def run(sequences: Sequence[Trajectory]) -> list[Any]:
        return [_of(model(_ids(one)[None]).logits[0], one) for one in sequences]

    return run


def together(model: Any) -> Trainer:
    """Return a trainer that takes all sequences in one padded batch."""

    @torch.inference_mode()
    def run(sequences: Sequence[Trajectory]) -> list[Any]:
        padded = torch.nn.utils.rnn.pad_sequence([_ids(one) for one in sequences], batch_first=True)
        return [_of(row, one) for row, one in zip(model(padded).logits, sequences, strict=True)]

    return run


def _ids(one: Trajectory) -> torch.Tensor:
    return torch.from_numpy(one.token_ids.astype(np.int64))


def _of(logits: torch.Tensor, one: Trajectory) -> Any:
    start = int(one.completion_starts[0])
    rows = logits[start - 1 : len(one.token_ids) - 1].float().log_softmax(-1)
    return rows.gather(1, _ids(one)[start:, None])[:, 0].numpy()


def step_later(model: Any, sequences: Sequence[Trajectory], learning_rate: float) -> Any:
    """Return the model after one AdamW step that makes the first sequences likelier."""
    later = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(later.parameters(), lr=learning_rate)
    for one in sequences[:8]:
        ids = _ids(one)[None]
        later(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return later.eval()


@dataclass(frozen=True, slots=True)
class Source:
    """One source of mismatch: what differs, the sequences with the sampler's logprobs, and the trainer."""

    name: str
    what: str
    sequences: Sequence[Trajectory]
    model: Any
    """What `score` computes with."""
    trainer: Trainer


def sources(renderer: Renderer, model: Any) -> list[Source]:
    """Return all sources, beginning with none."""
    plain = sampled(renderer)
    cold, cut = sampled(renderer, temperature=0.7), sampled(renderer, top_p=0.9)
    half, later = copy.deepcopy(model).to(torch.bfloat16), step_later(model, plain, 1e-4)
    text = [through_text(renderer, one) for one in plain]
    return [
        Source(
            "none", "the same ids and weights, float32; the trainer takes one at a time", plain, model, alone(model)
        ),
        Source("batch size", f"the trainer takes {COUNT} in one padded batch", plain, model, together(model)),
        Source("precision", "the trainer computes in bfloat16", plain, half, alone(half)),
        Source("weights", "the trainer is one AdamW step of 1e-4 further", plain, later, alone(later)),
        Source("truncation", "sampled with top-p 0.9, taken for the whole distribution", cut, model, alone(model)),
        Source("temperature", "sampled at 0.7, taken for 1", cold, model, alone(model)),
        Source("ids", "completions decoded and encoded again", text, model, alone(model)),
    ]


def row(source: Source) -> dict[str, Any]:
    """Return the differences in numbers, and the cause that `tokentape score` names."""
    apart = []
    for one, own in zip(source.sequences, source.trainer(source.sequences), strict=True):
        difference = own.astype(np.float64) - one.logprobs[int(one.completion_starts[0]) :]
        apart.append(difference[np.isfinite(difference)])
    found = logprob_numbers(apart)
    compared, scorer = Mismatch("float32", source.model.config.vocab_size), ForwardPass(source.model)
    for one in source.sequences:
        start = int(one.completion_starts[0])
        compared.add(one, one.loss_mask, start, scorer.score(one.token_ids, start, compared.top_for(one)))
    for doubt in list(compared.doubts()):
        compared.look(doubt, scorer.score(doubt.trajectory.token_ids[: doubt.end], doubt.start, LOOK_TOP))
    return {
        "source": source.name,
        "what": source.what,
        "tokens": found.tokens,
        "mean": found.mean,
        "max": found.max,
        "k3": found.k3,
        "ess_tokens": found.ess_tokens,
        "ess_sequences": found.ess_sequences,
        "score": sorted({cause for one in compared.causes() for cause in one.causes}),
    }


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows = [row(source) for source in sources(Renderer.load(MODEL), model)]
    arguments.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
