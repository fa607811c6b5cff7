"""Trajectories drawn by Hypothesis, and big ones by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.records import UNCHANGED, distributions, finite, json_objects, names, ragged_rows
from tokentape._session.verdict import verdict_read
from tokentape.types import LineageEdge, MediaSpan, Provenance, TokenRows, Trajectory

finite_numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
logprobs = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)
or_missing = st.just(np.nan)
extra_names = st.from_regex("[a-z][a-z0-9_]{0,8}", fullmatch=True)
row_dtypes = st.sampled_from([np.bool_, np.uint8, np.int16, np.int32, np.float16, np.float32])

EDGE = st.integers(0, 99), names, st.none() | st.integers(0, 99), names, st.floats(0, 1)


@st.composite
def drawn_rows(draw: st.DrawFn, tokens: int) -> TokenRows:
    known = draw(arrays(np.bool_, tokens))
    if draw(st.integers(0, 3)) == 0:
        return TokenRows(draw(ragged_rows(tokens)), known)
    shape = (tokens, *draw(st.sampled_from([(), (3,), (2, 4)])))
    return TokenRows(draw(arrays(draw(row_dtypes), shape, elements={"allow_nan": False})), known)


@st.composite
def drawn_trajectories(draw: st.DrawFn) -> Trajectory:
    """Any values that the columns take; the turns don't have to make sense."""
    tokens = draw(st.integers(0, 30))
    turns = draw(st.integers(0, 4))
    sampled_from = tuple(draw(st.lists(st.none() | distributions, min_size=turns, max_size=turns)))
    logprobs_of = tuple(draw(st.lists(st.none() | distributions, min_size=turns, max_size=turns)))
    bounds = np.sort(draw(arrays(np.int32, 2 * turns, elements=st.integers(0, tokens))))
    provenance = draw(arrays(np.uint8, tokens, elements=st.sampled_from([int(code) for code in Provenance])))
    return Trajectory(
        session_id=draw(names),
        leaf=draw(st.integers(0, 2**31 - 1)),
        token_ids=draw(arrays(np.int32, tokens, elements=st.integers(0, 2**31 - 1))),
        provenance=provenance,
        loss_mask=draw(arrays(np.bool_, tokens)) & (provenance == Provenance.SAMPLED),
        logprobs=draw(arrays(np.float32, tokens, elements=logprobs)),
        turns=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=turns, max_size=turns))),
        completion_starts=bounds[::2],
        completion_ends=bounds[1::2],
        weight_versions=tuple(draw(st.lists(names, min_size=turns, max_size=turns))),
        reward=draw(st.none() | finite),
        verdict=verdict_read(draw(names), sampled_from + logprobs_of),
        metadata=draw(json_objects),
        turn_rewards=draw(arrays(np.float64, turns, elements=finite | or_missing)),
        weight_spans=tuple(
            draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), names), max_size=3)),
        ),
        columns=draw(
            st.dictionaries(extra_names, arrays(np.float32, tokens, elements=finite_numbers | or_missing), max_size=2)
        ),
        payloads=draw(st.dictionaries(extra_names, drawn_rows(tokens), max_size=2)),
        media=tuple(draw(st.lists(st.builds(MediaSpan, st.integers(0, 99), st.integers(1, 99), names, names)))),
        sampled_from=sampled_from,
        logprobs_of=logprobs_of,
        role=(role := draw(st.sampled_from(["", "main", "subagent"]))),
        lineage=tuple(draw(st.lists(st.builds(LineageEdge, names, *EDGE), max_size=2))) if role else (),
        finish_reasons=tuple(
            draw(st.lists(st.none() | st.sampled_from(["stop", "length"]), min_size=turns, max_size=turns))
        ),
        adapters=tuple((None, "a")[(tokens >> n) % 2] for n in range(turns)),
    )


def make_trajectory(number: int = 0, tokens: int = 6, reward: float | None = 1.0, **changes: Any) -> Trajectory:
    """A trajectory of one turn, with a sampled second half."""
    prompt = tokens // 2
    trajectory = Trajectory(
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
        turn_rewards=np.array([np.nan]),
        weight_spans=((prompt, tokens, "step-1"),),
        sampled_from=(UNCHANGED,),
        logprobs_of=(UNCHANGED,),
        finish_reasons=("stop",),
    )
    return replace(trajectory, **changes)
