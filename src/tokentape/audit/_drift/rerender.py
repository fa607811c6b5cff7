"""Render recorded conversations again from their messages, as stateless servers and trainers do.

For each turn of a branch after the first, `RerenderMeter` renders the messages that the client sent and received, and
compares the ids with the recorded context. Examples of differences are reasoning that the template drops, and tool
arguments that it writes differently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokentape.audit._statistics import Rate, Shares
from tokentape.audit._tokendiff.comparing import Difference, compare
from tokentape.audit._tokendiff.retokenizing import retokenized
from tokentape.chat._renderer import Renderer
from tokentape.errors import TokentapeError
from tokentape.store import StoredSession
from tokentape.types import Message, Provenance, Setup, TokenIds, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Rerendered:
    """The result of rendering the contexts of later turns again."""

    turns: Rate
    """Turns with a rendered context that differs from the recorded context."""
    refused: int
    """Turns with messages that the template refuses. The other counts exclude them."""
    kinds: Mapping[str, int]
    """The number of turns by kind of difference, a key of `audit._tokendiff.kinds.KINDS`. A turn may have several."""
    first_kinds: Mapping[str, int]
    """The number of turns by the kind of their first difference, where a cached prefix or a row would end."""
    sampled_tokens: int
    """Sampled tokens in the contexts. A turn's tokens count in each later context."""
    changed_sampled_tokens: int
    changed_roots: int
    """First turns whose context already renders differently, because a different renderer made the record. Their
    differences are not counted again for later turns."""


class RerenderMeter:
    """Renders up to `most` later turns of the added sessions, and counts differences."""

    def __init__(self, renderer: Renderer, most: int = 1000) -> None:
        self._renderer = renderer
        self._left = most
        self._counts: Counter[str] = Counter()
        self._turns = Shares()
        self._kinds: Counter[str] = Counter()
        self._first: Counter[str] = Counter()

    def add(self, stored: StoredSession) -> None:
        """Render and count the turns of a session. A turn that several branches share is rendered once."""
        session = stored.tree()
        roots: dict[int, set[tuple[object, ...]]] = {}
        seen: set[int] = set()
        for trajectory in stored.trajectories():
            messages: list[Message] = []
            for n, turn in enumerate(session.path(trajectory.leaf)):
                messages += turn.messages
                if turn.seq not in seen and self._left > 0:
                    seen.add(turn.seq)
                    differences = self._compared(trajectory, n, messages, stored.setups[turn.setup])
                    if n == 0:
                        roots[turn.seq] = set(map(_place, differences or ()))
                        self._counts["changed roots"] += bool(differences)
                    else:
                        self._left -= 1
                        self._count(trajectory, n, differences, roots[trajectory.turns[0]])
                messages.append(turn.reply)

    def report(self) -> Rerendered | None:
        """Return the counts so far; None if no later turn was rendered or refused."""
        counts = self._counts
        turns = self._turns.rate(())
        if not turns.total + counts["refused"]:
            return None
        return Rerendered(
            turns=turns,
            refused=counts["refused"],
            kinds=dict(self._kinds.most_common()),
            first_kinds=dict(self._first.most_common()),
            sampled_tokens=counts["tokens"],
            changed_sampled_tokens=counts["changed tokens"],
            changed_roots=counts["changed roots"],
        )

    def _compared(
        self, trajectory: Trajectory, n: int, messages: Sequence[Message], setup: Setup
    ) -> Sequence[Difference] | None:
        """Compare the context of turn `n` with the rendered `messages`. Return None if the template refuses them."""
        try:
            ids = self._renderer.render([with_objects(message) for message in messages], setup).ids
        except TokentapeError:
            return None
        end = int(trajectory.completion_starts[n])
        codes = trajectory.provenance[:end]
        return compare(trajectory.token_ids[:end], ids, self._renderer.tokenizer, provenance=codes).differences

    def _count(
        self,
        trajectory: Trajectory,
        n: int,
        differences: Sequence[Difference] | None,
        root_places: set[tuple[object, ...]],
    ) -> None:
        if differences is None:
            self._counts["refused"] += 1
            return
        sampled = trajectory.provenance[: int(trajectory.completion_starts[n])] == Provenance.SAMPLED
        new = [difference for difference in differences if _place(difference) not in root_places]
        changed = sum(int(sampled[difference.expected_start : difference.expected_end].sum()) for difference in new)
        self._turns.add(trajectory.session_id, [((), bool(new), 1)])
        self._counts.update({"tokens": int(sampled.sum()), "changed tokens": changed})
        self._kinds.update({difference.kind for difference in new})
        self._first.update(difference.kind for difference in new[:1])


def _place(difference: Difference) -> tuple[object, ...]:
    return difference.expected_start, difference.expected_end, difference.recorded


def through_messages(renderer: Renderer, path: Sequence[Turn], setup: Setup) -> TokenIds:
    """Return a branch's ids as a stateless server sees them: messages rendered, the last completion encoded again."""
    *before, last = path
    messages = [*_messages_of(before), *map(with_objects, last.messages)]
    return np.concatenate([renderer.render(messages, setup).ids, retokenized(renderer.tokenizer, last.completion_ids)])


def whole_conversation(renderer: Renderer, path: Sequence[Turn], setup: Setup) -> TokenIds | None:
    """Return the ids of a branch's messages and replies, rendered as trainers do; None if the template refuses them."""
    try:
        text, _ = renderer.render_text_with_provenance(_messages_of(path), setup, generate=False)
    except TokentapeError:
        return None
    return renderer.tokenizer.array(renderer.tokenizer.encode_marked(text).ids)


def _messages_of(turns: Sequence[Turn]) -> list[Message]:
    return [with_objects(message) for turn in turns for message in (*turn.messages, turn.reply)]


def with_objects(message: Message) -> Message:
    """Return the message with tool arguments parsed to objects, as chat servers pass them to a template."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(_with_object, calls))} if calls else message


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call  # the record already has objects in calls that a client sent
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call
