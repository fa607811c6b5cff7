"""Completions of the tiny model, their logprobs by a plain forward pass, and wrong records of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tokentape.audit._rescaling import Rule
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import SamplingParams
from tokentape.engines._transformers import TransformersEngine
from tokentape.types import Provenance, TokenDistribution, Trajectory

QUESTIONS = ("What is 3 plus 4?", "What do pears cost?", "Name two fruits.", "Which one is cheaper?")
TOKENS = 24


def load(model_dir: Path) -> Any:
    """The model, by transformers alone, float32."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def perturbed(model: Any, size: float) -> Any:
    """The model with weights that are a little off."""
    other = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim == 2:
                parameter.add_(size * parameter.std() * torch.randn(parameter.shape, generator=noise))
    return other


def forward(model: Any, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities of what follows each id, float64 [tokens, vocabulary], without cache."""
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    return np.asarray(logits.double().log_softmax(-1))


def distribution(rows: np.ndarray, rule: Rule) -> np.ndarray:
    """What becomes of log-probabilities, float64 [positions, vocabulary], under a rule, one position at a time."""
    if rule == Rule():
        return rows
    found = np.full(rows.shape, -np.inf)
    for at, row in enumerate(rows / rule.temperature):
        likely = np.exp(row - np.logaddexp.reduce(row))
        order = np.argsort(-likely, kind="stable")
        order = order[likely[order] >= rule.min_p * likely[order[0]]][: rule.top_k or None]
        kept = order
        if rule.top_p < 1:
            before = np.cumsum(likely[order]) - likely[order]
            kept = order[before < rule.top_p * likely[order].sum()]
        found[at, kept] = row[kept] - np.logaddexp.reduce(row[kept])
    return found


def sampled(model_dir: Path, renderer: Renderer, rule: Rule, count: int = 10) -> list[Trajectory]:
    """Trajectories of one turn, sampled by the embedded engine, with the model's own logprobs and saying so."""

    async def sample_one(engine: TransformersEngine, seed: int) -> Trajectory:
        prompt = renderer.render([{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}]).ids
        params = SamplingParams(
            TOKENS, rule.temperature, min_p=rule.min_p, top_k=rule.top_k, top_p=rule.top_p, seed=seed
        )
        deltas = [delta async for delta in engine.sample(prompt, params, stream=False, request_id=str(seed))]
        ids = np.array([token_id for delta in deltas for token_id in delta.token_ids], np.int32)
        start, end = len(prompt), len(prompt) + len(ids)
        codes = np.repeat(np.array([Provenance.USER, Provenance.SAMPLED], np.uint8), [start, len(ids)])
        return Trajectory(
            session_id=f"s{seed}",
            leaf=0,
            token_ids=np.concatenate([prompt, ids]).astype(np.int32),
            provenance=codes,
            loss_mask=codes == Provenance.SAMPLED,
            logprobs=np.zeros(end, np.float32),
            turns=(0,),
            completion_starts=np.array([start], np.int32),
            completion_ends=np.array([end], np.int32),
            weight_versions=("0",),
            reward=None,
            verdict="exact",
            metadata={},
            turn_rewards=np.array([np.nan]),
            weight_spans=((start, end, "0"),),
            sampled_from=(TokenDistribution(False, rule.temperature, rule.truncates, False),),
        )

    async def all_of_them() -> list[Trajectory]:
        engine = TransformersEngine.open(model_dir)
        try:
            return list(await asyncio.gather(*(sample_one(engine, seed) for seed in range(count))))
        finally:
            await engine.close()

    return asyncio.run(all_of_them())


def recorded(
    trajectories: Sequence[Trajectory], model: Any, rule: Rule, of: TokenDistribution, *, version: str = "0"
) -> list[Trajectory]:
    """The trajectories with a model's logprobs under a rule as recorded ones, and the claim `of`."""
    out = []
    for trajectory in trajectories:
        start, end = int(trajectory.completion_starts[0]), len(trajectory.token_ids)
        rows = distribution(forward(model, trajectory.token_ids)[start - 1 : end - 1], rule)
        logprobs = trajectory.logprobs.copy()
        logprobs[start:] = rows[np.arange(end - start), trajectory.token_ids[start:]]
        out.append(
            replace(
                trajectory,
                logprobs=logprobs,
                logprobs_of=(of,),
                weight_versions=(version,),
                weight_spans=((start, end, version),),
            )
        )
    return out


def changed_id(at: Callable[[Trajectory], int]) -> Callable[[Trajectory], Trajectory]:
    """Changes the recorded id at one position of a trajectory."""

    def change(trajectory: Trajectory) -> Trajectory:
        ids = trajectory.token_ids.copy()
        ids[at(trajectory)] = (ids[at(trajectory)] + 7) % 3900
        return replace(trajectory, token_ids=ids)

    return change
