"""Trajectories drawn by Hypothesis, and big ones by number."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.records import finite, json_objects, names
from tokentape.types import Provenance, Trajectory

finite_logprobs = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def drawn_trajectories(draw: st.DrawFn) -> Trajectory:
    """Any values that the columns take; the turns don't have to make sense."""
    tokens = draw(st.integers(0, 30))
    turns = draw(st.integers(0, 4))
    return Trajectory(
        session_id=draw(names),
        leaf=draw(st.integers(0, 2**31 - 1)),
        token_ids=draw(arrays(np.int32, tokens)),
        provenance=draw(arrays(np.uint8, tokens, elements=st.sampled_from([int(code) for code in Provenance]))),
        loss_mask=draw(arrays(np.bool_, tokens)),
        logprobs=draw(arrays(np.float32, tokens, elements=finite_logprobs)),
        turns=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=turns, max_size=turns))),
        completion_starts=draw(arrays(np.int32, turns)),
        completion_ends=draw(arrays(np.int32, turns)),
        weight_versions=tuple(draw(st.lists(names, min_size=turns, max_size=turns))),
        reward=draw(st.none() | finite),
        verdict=draw(names),
        metadata=draw(json_objects),
    )


def make_trajectory(number: int = 0, tokens: int = 6, reward: float | None = 1.0) -> Trajectory:
    """A trajectory of one turn whose second half was sampled."""
    prompt = tokens // 2
    return Trajectory(
        session_id=f"session-{number}",
        leaf=0,
        token_ids=np.arange(tokens, dtype=np.int32),
        provenance=np.repeat(np.array([Provenance.USER, Provenance.SAMPLED], np.uint8), [prompt, tokens - prompt]),
        loss_mask=np.repeat([False, True], [prompt, tokens - prompt]),
        logprobs=np.repeat(np.array([0.0, -0.1], np.float32), [prompt, tokens - prompt]),
        turns=(0,),
        completion_starts=np.array([prompt], np.int32),
        completion_ends=np.array([tokens], np.int32),
        weight_versions=("step-1",),
        reward=reward,
        verdict="exact",
        metadata={"task": number},
    )
