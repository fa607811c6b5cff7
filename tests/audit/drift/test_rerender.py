"""Contexts rendered from messages again, on sessions whose template is known to rewrite them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.records import make_turn
from tokentape.audit._drift.rerender import Rerendered, RerenderMeter, through_messages
from tokentape.chat._renderer import Renderer
from tokentape.store import StoredSession
from tokentape.types import Message, SessionInfo, Setup


@pytest.fixture
def setup(renderer: Renderer) -> Setup:
    return renderer.setup(date="2026-01-01")


def two_turns(renderer: Renderer, setup: Setup, completion: list[int], reply: Message) -> StoredSession:
    """A session whose second turn was bridged after `completion`."""
    question, again = ({"role": "user", "content": text} for text in ("What do pears cost?", "And plums?"))
    added = renderer.render([question], setup)
    first = make_turn(
        "s",
        0,
        setup=setup.digest,
        messages=(question,),
        reply=reply,
        added_ids=added.ids,
        added_provenance=added.provenance,
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(len(completion), -0.5, np.float32),
    )
    bridge = renderer.bridge(first.completion_ids, reply, [again], setup)
    second = replace(
        first, seq=1, parent=0, messages=(again,), added_ids=bridge.ids, added_provenance=bridge.provenance
    )
    return StoredSession(SessionInfo("s", 0.0), {setup.digest: setup}, (first, second), (), ())


def rerendered(renderer: Renderer, stored: StoredSession, most: int = 10) -> Rerendered | None:
    meter = RerenderMeter(renderer, most)
    meter.add(stored)
    return meter.report()


def test_canonical_answer_renders_unchanged(renderer: Renderer, setup: Setup) -> None:
    ids = renderer.tokenizer.encode_plain("They cost 12.<|im_end|>")
    found = rerendered(renderer, two_turns(renderer, setup, ids, {"role": "assistant", "content": "They cost 12."}))
    assert found is not None
    assert (found.turns.changed, found.turns.total, found.kinds, found.changed_roots) == (0, 1, {}, 0)
    assert found.sampled_tokens == len(ids)


def test_dropped_reasoning_and_changed_ids_are_distinguished(renderer: Renderer, setup: Setup) -> None:
    encode = renderer.tokenizer.encode_plain
    answer = {"role": "assistant", "content": "They cost 12."}
    split = encode("They") + encode(" co") + encode("st") + encode(" 12.<|im_end|>")
    found = rerendered(renderer, two_turns(renderer, setup, split, answer))
    assert found is not None
    assert (found.kinds, found.turns.changed) == ({"ids": 1}, 1)
    assert found.changed_sampled_tokens == len(encode(" co") + encode("st"))
    with_reasoning = encode("<think>\nhm\n</think>\n\nThey cost 12.<|im_end|>")
    found = rerendered(renderer, two_turns(renderer, setup, with_reasoning, answer | {"reasoning_content": "hm"}))
    assert found is not None
    assert found.first_kinds == {"reasoning": 1}


def test_renderings_that_already_differ_are_reported_and_not_counted(renderer: Renderer, setup: Setup) -> None:
    ids = renderer.tokenizer.encode_plain("They cost 12.<|im_end|>")
    stored = two_turns(renderer, setup, ids, {"role": "assistant", "content": "They cost 12."})
    first = replace(stored.turns[0], messages=({"role": "user", "content": "What do plums cost?"},))
    found = rerendered(renderer, replace(stored, turns=(first, stored.turns[1])))
    assert found is not None
    assert (found.changed_roots, found.turns.changed) == (1, 0)


def test_number_of_rendered_turns_is_limited(renderer: Renderer, setup: Setup) -> None:
    ids = renderer.tokenizer.encode_plain("They cost 12.<|im_end|>")
    stored = two_turns(renderer, setup, ids, {"role": "assistant", "content": "They cost 12."})
    assert rerendered(renderer, stored, most=0) is None


def test_calls_in_a_history_that_was_sent_are_recorded_with_objects(renderer: Renderer, setup: Setup) -> None:
    call = {"type": "function", "id": "c", "function": {"name": "price", "arguments": {"of": "pears"}}}
    history: tuple[Message, ...] = (
        {"role": "user", "content": "What do pears cost?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "12"},
    )
    ids = renderer.tokenizer.encode_plain("They cost 12.<|im_end|>")
    stored = two_turns(renderer, setup, ids, {"role": "assistant", "content": "They cost 12."})
    first = replace(stored.turns[0], messages=history)
    assert rerendered(renderer, replace(stored, turns=(first, stored.turns[1]))) is not None
    assert through_messages(renderer, (first, stored.turns[1]), setup).size
