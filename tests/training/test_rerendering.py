"""Conversations rendered again: each cause of a difference in its own channel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.training.scripted_sessions import ANSWER, THOUGHT, TOOL_CALL, played, user
from tokentape.chat._renderer import Renderer
from tokentape.store import SqliteStore
from tokentape.training._logprob_check import Forward, forward_pass
from tokentape.training._rerendering import check_rerendered


@pytest.fixture
def forward(model_dir: Path) -> Forward:
    return forward_pass(model_dir, device="cpu")


def test_conversation_rendered_as_sampled_has_no_drift(
    renderer: Renderer, store: SqliteStore, forward: Forward
) -> None:
    stored = played(
        renderer,
        store,
        [(user("How much are pears?"), THOUGHT + TOOL_CALL), ({"role": "tool", "content": "12"}, ANSWER)],
    )
    report = check_rerendered([stored], renderer, forward)
    (trajectory,) = stored.trajectories()
    assert (report.sequences, report.tokens) == (1, int(trajectory.loss_mask.sum()))
    assert (report.id_drift.sequences, report.text_drift.sequences) == (0, 0)
    assert (report.numeric.tokens, report.after_id_drift.tokens) == (report.tokens, 0)


def test_word_sampled_letter_by_letter_is_only_id_drift(
    renderer: Renderer, store: SqliteStore, forward: Forward
) -> None:
    # Three letters, which form a single token with the two after them.
    stored = played(renderer, store, [(user("Hello"), "Hello you!<|im_end|>")], split=[0])
    report = check_rerendered([stored], renderer, forward)
    assert report.id_drift.sequences == 1
    assert report.id_drift.tokens >= 3
    assert set(report.id_drift.kinds) == {"ids"}
    assert report.text_drift.sequences == 0
    assert report.after_id_drift.tokens == report.tokens - report.id_drift.tokens - report.numeric.tokens > 0


def test_dropped_reasoning_is_text_drift_and_changes_the_later_context(
    renderer: Renderer, store: SqliteStore, forward: Forward
) -> None:
    stored = played(
        renderer,
        store,
        [(user("How much are pears?"), THOUGHT + "12, as ever.<|im_end|>"), (user("And now?"), THOUGHT + ANSWER)],
    )
    report = check_rerendered([stored], renderer, forward)
    thought = len(renderer.tokenizer.encode_plain(THOUGHT))
    assert report.id_drift.sequences == 0
    assert report.text_drift.kinds == {"reasoning": 1}
    assert report.text_drift.tokens == thought
    assert report.numeric.tokens == 0
    assert report.after_text_drift.tokens == report.tokens - thought


def test_logprobs_are_of_recorded_ids_in_the_new_context(
    renderer: Renderer, store: SqliteStore, forward: Forward
) -> None:
    stored = played(
        renderer, store, [(user("Hello"), THOUGHT + "Hello you!<|im_end|>"), (user("Pears?"), "Pears.<|im_end|>")]
    )
    first, second = stored.turns
    setup = stored.setups[first.setup]
    seen = renderer.render([user("Hello"), {"role": "assistant", "content": "Hello you!"}, user("Pears?")], setup).ids
    logprobs = forward(np.concatenate([seen, second.completion_ids]))[len(seen) :]
    turns = (first, replace(second, logprobs=logprobs))
    report = check_rerendered([replace(stored, turns=turns)], renderer, forward)
    trajectory = replace(stored, turns=turns).trajectories()[0]
    served = replace(stored, turns=(first, replace(second, logprobs=forward(trajectory.token_ids)[-len(logprobs) :])))
    # The first turn's logprobs are made up, so what its tokens add is the same on both sides.
    assert check_rerendered([served], renderer, forward).after_text_drift.mean > report.after_text_drift.mean + 0.01
    with_first = len(first.completion_ids) - report.text_drift.tokens
    assert report.after_text_drift.tokens == with_first + len(logprobs)


def test_conversations_refused_by_the_template_are_counted_separately(renderer: Renderer, store: SqliteStore) -> None:
    stored = played(renderer, store, [(user("Hello"), "Hello you!<|im_end|>")])
    turn = replace(stored.turns[0], messages=({"role": "wizard", "content": "Hello"},))
    report = check_rerendered([replace(stored, turns=(turn,))], renderer)
    assert (report.refused, report.sequences, report.tokens) == (1, 0, 0)


def test_without_a_forward_pass_there_are_counts_and_no_numbers(renderer: Renderer, store: SqliteStore) -> None:
    stored = played(renderer, store, [(user("Hello"), "Hello you!<|im_end|>")], split=[0])
    report = check_rerendered([stored], renderer)
    assert report.id_drift.tokens >= 3
    assert report.numeric.tokens == report.after_id_drift.tokens == 0
