"""Measurements of the demo, on ids with known results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.records import make_turn

from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.demo.findings import call_digest, group_of, turns_differing_from_engine
from tokentape.store import StoredSession
from tokentape.types import Provenance, SessionInfo, Setup, Trajectory

INFO = SessionInfo("s", 0.0)


@pytest.fixture
def setup(renderer: Renderer) -> Setup:
    return renderer.setup(date="2026-01-01")


def ids_of(renderer: Renderer, *pieces: str) -> list[int]:
    """Return ids of separately encoded pieces, as a model may sample them."""
    return [token_id for piece in pieces for token_id in renderer.tokenizer.encode_plain(piece)]


def recorded(renderer: Renderer, setup: Setup, content: str, completion: list[int]) -> StoredSession:
    """Return a session of a turn in which `completion` was sampled and parsed as `content`."""
    question = {"role": "user", "content": "What do pears cost?"}
    added = renderer.render([question], setup)
    turn = make_turn(
        "s",
        0,
        setup=setup.digest,
        messages=(question,),
        reply={"role": "assistant", "content": content},
        added_ids=added.ids,
        added_provenance=added.provenance,
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(len(completion), -0.5, np.float32),
    )
    return StoredSession(INFO, {setup.digest: setup}, (turn,), (), ())


def test_a_canonical_completion_has_no_drift(renderer: Renderer, setup: Setup) -> None:
    session = recorded(renderer, setup, "They cost 12.", ids_of(renderer, "They cost 12.<|im_end|>"))
    drift = group_of(renderer, 1.0, [session])
    assert (drift.completions, drift.changed_completions, drift.changed_tokens) == (1, 0, 0)
    assert (drift.trajectories, drift.retokenized_trajectories, drift.rerendered_trajectories) == (1, 0, 0)
    assert drift.example is None


def test_completion_split_differently_is_counted_and_shown(renderer: Renderer, setup: Setup) -> None:
    sampled = ids_of(renderer, "They", " co", "st", " 12.<|im_end|>")
    whole = ids_of(renderer, " cost")
    drift = group_of(renderer, 1.0, [recorded(renderer, setup, "They cost 12.", sampled)])
    assert (drift.changed_completions, drift.changed_tokens) == (1, len(ids_of(renderer, " co", "st")))
    assert (drift.retokenized_trajectories, drift.rerendered_trajectories) == (1, 1)
    assert drift.example is not None
    assert drift.example.sampled == tuple(ids_of(renderer, " co", "st"))
    assert drift.example.retokenized == tuple(whole)


@pytest.fixture
def trajectory(renderer: Renderer, setup: Setup) -> Trajectory:
    session = recorded(renderer, setup, "12", ids_of(renderer, "12<|im_end|>"))
    (trajectory,) = trajectories(Session(INFO, session.turns))
    return trajectory


def logged(trajectory: Trajectory, changed: str = "") -> str:
    """Return the digest of the trajectory's call, with a different last number in the list `changed`."""
    start = int(trajectory.completion_starts[0])
    lists = {
        "prompt_ids": trajectory.token_ids[:start],
        "token_ids": trajectory.token_ids[start:],
        "logprobs": trajectory.logprobs[start:],
    }
    return call_digest(*([*values[:-1], values[-1] + (name == changed)] for name, values in lists.items()))


def test_turn_in_the_engine_log_matches(trajectory: Trajectory) -> None:
    assert (trajectory.provenance == Provenance.SAMPLED).any()
    assert turns_differing_from_engine([trajectory], [logged(trajectory)]) == 0


@pytest.mark.parametrize("field", ["prompt_ids", "token_ids", "logprobs"])
def test_changed_number_makes_a_turn_differ_from_the_engine(trajectory: Trajectory, field: str) -> None:
    assert turns_differing_from_engine([trajectory], [logged(trajectory, field)]) == 1


def test_logged_call_matches_a_single_turn(trajectory: Trajectory) -> None:
    other = replace(trajectory, session_id="t")
    assert turns_differing_from_engine([trajectory, other], [logged(trajectory)]) == 1


def test_turn_shared_by_two_branches_counts_once(trajectory: Trajectory) -> None:
    assert turns_differing_from_engine([trajectory, trajectory], [logged(trajectory)]) == 0
