"""Experts of whole sessions, recorded by the embedded engine: replayed, they give the recorded logprobs."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parent.parent / "engines"))

from routing import replayed, route_by_chance, write_mixture  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.gateway.scripted import run_turn  # noqa: E402
from tokentape.chat import Renderer  # noqa: E402
from tokentape.demo import MODEL  # noqa: E402
from tokentape.engines._base import SamplingParams  # noqa: E402
from tokentape.engines._transformers import TransformersEngine  # noqa: E402
from tokentape.gateway._events import TurnDone, TurnRequest  # noqa: E402
from tokentape.gateway._turns import Turns  # noqa: E402
from tokentape.store import SqliteStore  # noqa: E402
from tokentape.types import Turn  # noqa: E402

WORDS = ["plain", "Ünïcödé", "two words", "3 + 4", "{}", "a longer sentence about nothing in particular"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_mixture(tmp_path_factory.mktemp("mixture"), rows=4096, context=2048)
    for file in MODEL.glob("*token*"):
        copy(file, folder)
    for file in MODEL.glob("*.jinja"):
        copy(file, folder)
    return folder


async def talk(turns: Turns, session: str, calls: int, rng: random.Random) -> None:
    """Make calls that continue any earlier turn, the newest most often.

    No two contexts have the same ids: these would share cached keys and values, which other experts have computed.
    """
    histories: list[tuple[Any, ...]] = [()]
    for call in range(calls):
        history = histories[-1] if rng.random() < 0.7 else rng.choice(histories)
        messages = (*history, {"role": "user", "content": f"{session} {call}: {rng.choice(WORDS)}"})
        request = TurnRequest(session, messages, (), {}, SamplingParams(max_tokens=rng.randint(1, 12)))
        done: list[Turn] = [event.turn async for event in run_turn(turns, request) if isinstance(event, TurnDone)]
        histories += [(*messages, turn.reply) for turn in done]


@pytest.mark.parametrize("calls", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_replayed_experts_give_the_logprobs_of_every_turn(folder: Path, store: SqliteStore, calls: int) -> None:
    async def sessions() -> None:
        engine = TransformersEngine.open(folder, logprobs_mode="raw_logprobs")
        route_by_chance(engine._model, seed=3)
        turns = Turns(engine, Renderer.load(folder), store, payloads=True)
        for number in range(calls // 10):
            await talk(turns, f"s{number}", 10, random.Random(number))
        await engine.close()

    asyncio.run(sessions())
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    apart: list[float] = []
    without: list[float] = []
    for stored in store.iter_sessions(per_token=True):
        for trajectory in stored.trajectories():
            payload, trained = trajectory.payloads["routed_experts"], trajectory.loss_mask[1:]
            assert payload.known[:-1].all()
            recorded = trajectory.logprobs[1:][trained]
            apart += np.abs(replayed(model, trajectory.token_ids, payload.rows).numpy()[trained] - recorded).tolist()
            without += np.abs(replayed(model, trajectory.token_ids).numpy()[trained] - recorded).tolist()
    print(
        f"turns {calls}, tokens {len(apart)}, replayed at most {max(apart):.1e}, else {np.median(without):.1e} in the "
        f"median, more than 1e-5 for {np.mean(np.array(without) > 1e-5):.1%}"
    )
    assert len(apart) >= calls
    assert max(apart) < 1e-5
    assert np.median(without) > 1e-2
