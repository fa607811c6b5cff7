"""The arms of the token path experiment, and their measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.session.builders import assistant, make_turn, user
from tests.training.scripted_sessions import ANSWER, THOUGHT, TOOL_CALL, played
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.store import SqliteStore, StoredSession
from tokentape.types import SessionInfo
from tokentape.types import Turn as StoredTurn

sys.path.append(str(Path(__file__).parents[2] / "examples" / "token_paths"))

import report
from measures import drift, importance
from paths import Given, Rollout, Turn, recorded, rerendered, retokenized


def rollout_of(stored: StoredSession) -> Rollout:
    return rollout(stored.turns)


def rollout(turns: Sequence[StoredTurn]) -> Rollout:
    own = [Turn(turn.added_ids, turn.completion_ids, turn.logprobs, turn.messages[0], turn.reply) for turn in turns]
    return Rollout(tuple(own), (True,) * len(own))


def without_tools(renderer: Renderer, rollout: Rollout) -> Rollout:
    """Return the rollout with a first prompt that lists no tools: the experiment has none."""
    first = replace(rollout.turns[0], added_ids=renderer.render([rollout.turns[0].message]).ids)
    return replace(rollout, turns=(first, *rollout.turns[1:]))


def same(left: Given, right: Given) -> bool:
    return (left.prompt, left.sampled) == (right.prompt, right.sampled) and all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in ("token_ids", "loss_mask", "logprobs")
    )


def test_recorded_path_equals_the_record(renderer: Renderer, store: SqliteStore) -> None:
    stored = played(renderer, store, [(user("Hello"), "Hello you!<|im_end|>")], split=[0])
    path, record = recorded(renderer, rollout_of(stored)), stored.trajectories()[-1]
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(path, name), getattr(record, name))
    assert (path.other_ids, path.other_text) == (0, 0)


def test_all_paths_are_equal_for_canonical_samples(renderer: Renderer, store: SqliteStore) -> None:
    tool = {"role": "tool", "content": "12"}
    stored = played(renderer, store, [(user("How much are pears?"), THOUGHT + TOOL_CALL), (tool, ANSWER)])
    rollout = without_tools(renderer, rollout_of(stored))
    assert same(recorded(renderer, rollout), retokenized(renderer, rollout))
    assert same(recorded(renderer, rollout), rerendered(renderer, rollout))


def test_the_template_drops_reasoning_of_turns_before_the_last_user(renderer: Renderer, store: SqliteStore) -> None:
    stored = played(renderer, store, [(user("Pears?"), THOUGHT + "12.<|im_end|>"), (user("And?"), THOUGHT + ANSWER)])
    rollout = without_tools(renderer, rollout_of(stored))
    path = rerendered(renderer, rollout)
    thought = len(renderer.tokenizer.encode_plain(THOUGHT))
    assert (path.other_ids, path.other_text) == (0, thought)
    assert int(path.loss_mask.sum()) == path.sampled - thought
    assert len(path.token_ids) == len(recorded(renderer, rollout).token_ids) - thought
    assert not np.isnan(path.logprobs).any()


def test_rerendering_trains_an_end_that_was_not_sampled(renderer: Renderer, store: SqliteStore) -> None:
    path = rerendered(renderer, rollout_of(played(renderer, store, [(user("Pears?"), "They cost")])))
    assert renderer.tokenizer.decode(path.token_ids[path.loss_mask].tolist()) == "They cost<|im_end|>"
    assert np.isnan(path.logprobs[path.loss_mask]).tolist() == [False] * path.sampled + [True]


def test_reply_that_merges_with_the_header_is_located(renderer: Renderer, store: SqliteStore) -> None:
    path = rerendered(renderer, rollout_of(played(renderer, store, [(user("Hello"), "\nHello you!<|im_end|>")])))
    assert renderer.tokenizer.decode(path.token_ids[path.loss_mask].tolist()) == "\n\nHello you!<|im_end|>"
    assert path.other_text == 1


@st.composite
def spelt(draw: st.DrawFn, tokenizer: object) -> list[int]:
    """Return ids of a text in noncanonical pieces."""
    pieces = draw(st.lists(st.text(alphabet=st.sampled_from("ab pears12é\n{\"'"), min_size=1, max_size=6), min_size=1))
    return [token_id for piece in pieces for token_id in tokenizer.encode_plain(piece)]  # type: ignore[attr-defined]


@given(data=st.data())
def test_retokenizing_keeps_text_and_context_and_distributes_all_logprobs(
    renderer: Renderer, data: st.DataObject
) -> None:
    tokenizer = renderer.tokenizer
    turns = []
    for seq in range(data.draw(st.integers(1, 3))):
        ids = data.draw(spelt(tokenizer))
        turn = make_turn(seq, seq - 1 if seq else None, [user("x")], assistant("y"), added=(7, 8, 9), completion=ids)
        turn.logprobs[:] = -data.draw(st.floats(0.125, 9, width=32))
        turns.append(turn)
    session = Session(SessionInfo("s", 0.0), turns)
    (trajectory,) = trajectories(session)
    path = retokenized(renderer, rollout(turns))
    assert tokenizer.decode(path.token_ids.tolist()) == tokenizer.decode(trajectory.token_ids.tolist())
    assert (path.token_ids[~path.loss_mask] == trajectory.token_ids[~trajectory.loss_mask]).all()
    assert path.logprobs.sum() == pytest.approx(trajectory.logprobs.sum(), rel=1e-4)
    assert (path.logprobs[~path.loss_mask] == 0).all()
    assert (path.sampled, path.other_text) == (int(trajectory.loss_mask.sum()), 0)
    assert path.other_ids == sum(changed(renderer, turn.completion_ids.tolist()) for turn in turns)


def changed(renderer: Renderer, ids: list[int]) -> int:
    """Return the number of ids that do not cover the same bytes after decoding and encoding."""
    tokenizer = renderer.tokenizer

    def placed(side: list[int]) -> set[tuple[bytes, int]]:
        return {(tokenizer.decode(side[:n]).encode(), token_id) for n, token_id in enumerate(side)}

    return len(placed(ids) - placed(tokenizer.encode_plain(tokenizer.decode(ids))))


def test_importance_of_sampled_ids_is_1() -> None:
    logprobs = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)]
    report = importance(logprobs, logprobs)
    ones = [report[name] for name in ("ratio_mean", "ratio_max", "ess_tokens", "ess_sequences")]
    assert ones == pytest.approx([1, 1, 1, 1])
    assert (report["k3"], report["sequences_masked"], report["not_sampled"]) == (0, 0, 0)


def test_importance_excludes_tokens_that_were_not_sampled() -> None:
    trainers = [np.log(np.array([0.8, 0.5], np.float32)), np.log(np.array([0.1], np.float32))]
    samplers = [np.log(np.array([0.1, np.nan], np.float32)), np.log(np.array([0.1], np.float32))]
    report = importance(trainers, samplers)
    assert report["ratio_mean"] == pytest.approx((8 + 1) / 2)
    assert report["ratio_max"] == pytest.approx(8)
    assert report["ess_tokens"] == pytest.approx(81 / 65 / 2)
    assert report["sequences_masked"] == 0.5
    assert report["not_sampled"] == pytest.approx(1 / 3)


def test_shares_of_drift_are_of_sampled_tokens() -> None:
    nothing = (0, np.empty(0, np.int32), np.empty(0, bool), np.empty(0, np.float32))
    shares = drift([Given(*nothing, sampled=30, other_ids=3), Given(*nothing, sampled=10, other_text=5)])
    assert shares == {"other_ids": 3 / 40, "other_text": 5 / 40, "changed_sessions": 1.0}


def test_single_seed_has_no_interval() -> None:
    assert np.isnan(report.interval([0.5]).half)


def test_incomplete_runs_are_not_read(tmp_path: Path) -> None:
    arm = dict.fromkeys((*report.ARM, "seed", "policy", "cpu_seconds"), 0)
    whole = (json.dumps(arm), json.dumps({"kind": "step", "right": 0.123456}))
    (tmp_path / "recorded-0.jsonl").write_text("\n".join(whole) + "\n")
    (tmp_path / "recorded-1.part").write_text("\n".join(whole) + "\n")
    assert [row["right"] for row in report.read_runs(tmp_path)] == ["0.12346"]
