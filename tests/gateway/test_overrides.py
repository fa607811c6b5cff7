"""Turns taken with an overriding renderer: it bridges the exact ids, or the turn does not happen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat.test_external_renderer import Chat, Reluctant, Short, overridden
from tests.gateway.test_turns import Talk, user
from tokentape.chat._renderer import Renderer
from tokentape.errors import TemplateRefused

FIRST_REPLY, SECOND_REPLY = "one<|im_end|>", "two<|im_end|>"


def test_bridge_of_an_override_continues_the_exact_ids(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(overridden(renderer, Chat), tmp_path, [FIRST_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.parent, second.fork) == (0, None)
    context = [*talk.engine.requests[0][0], *first.completion_ids.tolist()]
    assert talk.engine.requests[1][0][: len(context)] == context
    assert talk.text(second.added_ids) == "<|im_start|>user\nb<|im_end|><|im_start|>assistant\n"


def test_without_a_bridge_a_branch_starts(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(overridden(renderer, Reluctant), tmp_path, [FIRST_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.parent, second.fork) == (None, "template_rewrites")


def test_a_bridge_that_changes_the_context_is_refused_and_nothing_is_recorded(
    renderer: Renderer, tmp_path: Path
) -> None:
    talk = Talk(overridden(renderer, Short), tmp_path, [FIRST_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    with pytest.raises(TemplateRefused, match="does not keep the context"):
        talk.say(user("a"), first.reply, user("b"))
    assert len(talk.recorded()) == 1
