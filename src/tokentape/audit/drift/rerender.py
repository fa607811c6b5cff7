"""What becomes of contexts that are rendered from messages again, as stateless servers and trainers do on every turn.

For each turn but the first of a branch: the context that the engine had, against the template's rendering of the
messages that the client sent and was told. Every difference is located and told what it is: reasoning that the template
drops, arguments written otherwise, a truth value that came back as a string.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tokentape.audit.compare.comparator import Difference, compare
from tokentape.audit.intervals import Rate, wilson
from tokentape.audit.pairing import retokenized
from tokentape.chat.renderer import Renderer
from tokentape.errors import TokentapeError
from tokentape.store import StoredSession
from tokentape.types import Message, Provenance, Setup, TokenIds, Trajectory, Turn

_Place: TypeAlias = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Rerendered:
    """Contexts of later turns, rendered again."""

    turns: Rate
    """Those whose rendered context is not the recorded one."""
    refused: int
    """Turns whose messages the template does not take; in no other number."""
    kinds: Mapping[str, int]
    """Turns that have a difference of the kind, by `compare.kinds.KINDS`; a turn may have several."""
    first_kinds: Mapping[str, int]
    """The same of the first difference, which is where a cached prefix or a row ends."""
    sampled_tokens: int
    """Of the contexts; a turn's tokens count in each later context."""
    changed_sampled_tokens: int
    unlike_roots: int
    """Branches whose first context is rendered otherwise already, because the renderer differs from what made it. That
    is left out of all else here."""


class RerenderMeter:
    """Takes sessions with `add`, renders up to `most` of their turns, and keeps sums."""

    def __init__(self, renderer: Renderer, most: int = 1000) -> None:
        self._renderer = renderer
        self._left = most
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._first: Counter[str] = Counter()

    def add(self, stored: StoredSession) -> None:
        """Render the later turns of a session, those that branches share once."""
        session = stored.tree()
        seen: set[int] = set()
        roots: dict[int, frozenset[_Place]] = {}
        for one in stored.trajectories():
            messages: list[Message] = []
            for n, turn in enumerate(session.path(one.leaf)):
                messages += turn.messages
                if turn.seq not in seen and self._left > 0:
                    seen.add(turn.seq)
                    found = self._compared(one, n, messages, stored.setups[turn.setup])
                    if n == 0:
                        roots[turn.seq] = frozenset(map(_place, found or ()))
                        self._counts["unlike roots"] += bool(found)
                    else:
                        self._left -= 1
                        self._count(one, n, found, roots[one.turns[0]])
                messages.append(turn.reply)

    def report(self) -> Rerendered | None:
        """What was found; None if no turn was rendered."""
        counts = self._counts
        if not counts["turns"] + counts["refused"]:
            return None
        return Rerendered(
            turns=Rate(counts["changed"], counts["turns"], *wilson(counts["changed"], counts["turns"])),
            refused=counts["refused"],
            kinds=dict(self._kinds.most_common()),
            first_kinds=dict(self._first.most_common()),
            sampled_tokens=counts["tokens"],
            changed_sampled_tokens=counts["changed tokens"],
            unlike_roots=counts["unlike roots"],
        )

    def _compared(
        self, one: Trajectory, n: int, messages: list[Message], setup: Setup
    ) -> tuple[Difference, ...] | None:
        """What of the context of turn n the messages give otherwise; None if the template does not take them."""
        try:
            ids = self._renderer.render([with_objects(message) for message in messages], setup).ids
        except TokentapeError:
            return None
        end = int(one.completion_starts[n])
        codes = one.provenance[:end]
        return compare(one.token_ids[:end], ids, self._renderer.tokenizer, provenance=codes).differences

    def _count(self, one: Trajectory, n: int, found: tuple[Difference, ...] | None, known: frozenset[_Place]) -> None:
        if found is None:
            self._counts["refused"] += 1
            return
        found = tuple(difference for difference in found if _place(difference) not in known)
        sampled = one.provenance[: int(one.completion_starts[n])] == Provenance.SAMPLED
        self._counts["turns"] += 1
        self._counts["tokens"] += int(sampled.sum())
        if not found:
            return
        changed = np.zeros(len(sampled), np.bool_)
        for difference in found:
            changed[difference.expected_start : difference.expected_end] = True
        self._counts["changed"] += 1
        self._counts["changed tokens"] += int((changed & sampled).sum())
        self._kinds.update({difference.kind for difference in found})
        self._first[found[0].kind] += 1


def _place(difference: Difference) -> _Place:
    return difference.expected_start, difference.expected_end, difference.recorded


def through_messages(renderer: Renderer, path: Sequence[Turn], setup: Setup) -> TokenIds:
    """A branch as a stateless server would see it: the last prompt from messages, the last completion from text.

    Raises `TemplateRefused`.
    """
    *before, last = path
    messages = [message for turn in before for message in (*turn.messages, turn.reply)]
    messages += last.messages
    prompt = renderer.render([with_objects(message) for message in messages], setup).ids
    return np.concatenate([prompt, retokenized(renderer.tokenizer, last.completion_ids)])


def with_objects(message: Message) -> Message:
    """The message with tool arguments as objects, which is how chat servers hand them to a template."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
