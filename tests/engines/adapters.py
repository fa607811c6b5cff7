"""LoRA adapters for tests: write them, record sessions with them, and recompute the expected samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.gateway.scripted import run_turn

from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.engines._base import Engine, SamplingParams
from tokentape.gateway._events import TurnDone, TurnRequest
from tokentape.gateway._pins import METADATA_KEY
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, verify
from tokentape.types import Turn

SCALE = 2.0
"""alpha / rank."""

Forward = Callable[[np.ndarray], np.ndarray]


def write_adapter(folder: Path, seed: int, model: Path = MODEL, **config: Any) -> dict[str, Any]:
    """Write a LoRA adapter of rank 4 for a model. Return the additions to the weights, by name."""
    import torch
    from safetensors.torch import load_file, save_file

    random, pairs, added = torch.Generator().manual_seed(seed), {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            down = torch.randn(4, weight.shape[1], generator=random) * 0.1
            up = torch.randn(weight.shape[0], 4, generator=random) * 0.1
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            pairs |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
            added[name] = SCALE * up @ down
    folder.mkdir()
    save_file(pairs, folder / "adapter_model.safetensors")
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4 * SCALE,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return added


def forward_with(added: dict[str, Any], folder: Path = MODEL) -> Forward:
    """Return next-token log-probabilities, float64 [tokens, vocabulary], with additions to the weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, more in added.items():
            weights[name] += more

    def forward(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor(ids[None].astype(np.int64))).logits[0]
        return np.asarray(logits.log_softmax(-1).numpy())

    return forward


def _expected(forward: Forward, turns: Sequence[Turn]) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's log-probabilities of the sampled ids of a session's turns, and of the likeliest ids there."""
    context = np.concatenate([ids for turn in turns for ids in (turn.added_ids, turn.completion_ids)])
    sampled = np.repeat([False, True] * len(turns), [len(i) for t in turns for i in (t.added_ids, t.completion_ids)])
    rows = forward(context)[np.flatnonzero(sampled) - 1]
    return rows[np.arange(len(rows)), context[sampled]], rows.max(-1)


def differences(forward: Forward, turns: Sequence[Turn]) -> np.ndarray:
    """Return the differences of a session's recorded log-probabilities from the model's, at temperature 1."""
    return np.asarray(_expected(forward, turns)[0] - np.concatenate([turn.logprobs for turn in turns]))


def largest_gap_to_best(forward: Forward, turns: Sequence[Turn]) -> float:
    """Return the largest gap between a sampled id and the likeliest id at its position. 0 if all are greedy."""
    own, best = _expected(forward, turns)
    return float((best - own).max())


def largest_difference(forward: Forward, turns: Sequence[Turn]) -> float:
    return float(np.abs(differences(forward, turns)).max())


def record(
    opening: Callable[[Renderer], Awaitable[Engine]],
    folder: Path,
    adapters: Sequence[str | None],
    question: str,
    params: SamplingParams,
    *,
    seeded: bool = True,
    supports: int = 0,
) -> list[tuple[Turn, ...]]:
    """Return the turns of sessions that ran at the same time, two turns each, with these adapters."""

    async def main(store: SqliteStore) -> None:
        renderer = Renderer.load(MODEL)
        engine = await opening(renderer)
        turns = Turns(engine, renderer, store, supports=supports)

        async def session(number: int, adapter: str | None) -> None:
            pins = {} if adapter is None else {METADATA_KEY: {"pin": {"adapter": adapter}}}
            await turns.create_session(f"s{number}", pins)
            messages: list[Any] = []
            for text in (question.format(number), "Again?"):
                messages.append({"role": "user", "content": text})
                own = replace(params, seed=number) if seeded else params
                request = TurnRequest(f"s{number}", tuple(messages), (), {}, own)
                (done,) = [event async for event in run_turn(turns, request) if isinstance(event, TurnDone)]
                messages.append(done.turn.reply)

        try:
            await asyncio.gather(*(session(number, adapter) for number, adapter in enumerate(adapters)))
        finally:
            await engine.close()

    with SqliteStore.open(folder) as store:
        asyncio.run(main(store))
        turns_by_session = [store.load_session(f"s{number}").turns for number in range(len(adapters))]
    assert verify(folder).ok
    return turns_by_session
