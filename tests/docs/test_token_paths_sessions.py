"""Sessions of the experiment: sampled ids stay unchanged, and each path gives what its name promises."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2] / "examples" / "token_paths"))

import policy
import torch
from measures import importance
from paths import PATHS, Rollout
from rollouts import play, sample
from run import Batch, loss_of

from tokentape.chat import Renderer


@pytest.fixture(scope="module")
def model() -> Any:
    """A policy that has learned nothing, and so samples all kinds of ids."""
    return policy.new_model(policy.train_tokenizer()).eval()


@pytest.fixture(scope="module")
def renderer(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("policy")
    policy.save(model, policy.train_tokenizer(), folder)
    return Renderer.load(folder)


@pytest.fixture(scope="module")
def sessions(model: Any, renderer: Renderer) -> list[Rollout]:
    return play(model, renderer, policy.draw_tasks(1, 12, "train"), seed=3)


def test_the_same_seed_gives_the_same_sessions(model: Any, renderer: Renderer, sessions: list[Rollout]) -> None:
    again = play(model, renderer, policy.draw_tasks(1, 12, "train"), seed=3)
    for session, other in zip(sessions, again, strict=True):
        assert [turn.completion_ids.tolist() for turn in session.turns] == [
            turn.completion_ids.tolist() for turn in other.turns
        ]


def test_recorded_ids_and_logprobs_are_those_of_a_forward_pass(
    model: Any, renderer: Renderer, sessions: list[Rollout]
) -> None:
    recorded = [PATHS["recorded"](renderer, session) for session in sessions]
    batch = Batch.of(recorded, [0.0] * len(recorded), len(recorded))
    _, own = loss_of(model, batch, "none")
    masks = batch.trained[:, 1:]
    sides = [
        [row[mask].detach().numpy() for row, mask in zip(side, masks, strict=True)]
        for side in (own, batch.samplers[:, 1:])
    ]
    found = importance(*sides)
    assert found["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert found["not_sampled"] == 0
    assert sum(map(len, sides[0])) == sum(session.sampled for session in sessions)


def test_retokenizing_keeps_text_and_context(renderer: Renderer, sessions: list[Rollout]) -> None:
    changed = 0
    for session in sessions:
        recorded, retokenized = PATHS["recorded"](renderer, session), PATHS["retokenized"](renderer, session)
        assert renderer.tokenizer.decode(retokenized.token_ids) == renderer.tokenizer.decode(recorded.token_ids)
        assert (
            retokenized.token_ids[~retokenized.loss_mask].tolist() == recorded.token_ids[~recorded.loss_mask].tolist()
        )
        changed += retokenized.token_ids.tolist() != recorded.token_ids.tolist()
    assert changed


def test_a_random_number_chooses_a_token_by_its_probability(model: Any) -> None:
    context = np.array([5, 6, 7], np.int32)
    with torch.no_grad():
        probabilities = model(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).double().numpy()
    numbers = np.linspace(0.0005, 0.9995, 1000)[:, None]
    drawn = sample(model, [context] * 1000, {1}, numbers, 1.0)
    counts = np.bincount([int(ids[0]) for ids, _ in drawn], minlength=len(probabilities))
    assert np.abs(counts / 1000 - probabilities).max() < 2e-3


def test_names_of_heldout_tasks_are_in_no_task_to_train_on() -> None:
    def names(split: policy.Split) -> set[str]:
        return {name for task in policy.draw_tasks(7, 500, split) for name, _ in task.stock}

    assert not names("train") & names("heldout")
