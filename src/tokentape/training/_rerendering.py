"""Compare recorded conversations with their messages rendered again, and the logprobs there.

This is what a trainer would have if it got messages. As in `check-logprobs`, there are three channels: before the first
difference tokens have the same context, after a difference of ids alone the same text, after one of text another text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokentape.audit._drift.rerender import whole_conversation
from tokentape.audit._statistics import Numbers, logprob_numbers
from tokentape.audit._tokendiff import compare
from tokentape.chat._renderer import Renderer
from tokentape.store import StoredSession
from tokentape.training._logprob_check import Forward
from tokentape.types import TokenIds, Trajectory


@dataclass(frozen=True, slots=True)
class Changed:
    """Trained tokens that a channel changes."""

    sequences: int = 0
    """Sequences with any such difference, even if only in the context."""
    tokens: int = 0
    """Trained tokens that are lost."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """The number of differences of each of `tokendiff.KINDS`."""


@dataclass(frozen=True, slots=True)
class IfRerendered:
    """The result of `check_rerendered`. Numbers are over recorded tokens that are kept: new - recorded, in nats."""

    sequences: int
    refused: int
    """Conversations that the template refuses, or that have images. No other number includes them."""
    tokens: int
    """Trained tokens."""
    id_drift: Changed
    text_drift: Changed
    numeric: Numbers
    """Before the first difference."""
    behind_id_drift: Numbers
    """After other ids, before any other text."""
    behind_text_drift: Numbers
    """After other text."""


def check_rerendered(
    sessions: Iterable[StoredSession], renderer: Renderer, forward: Forward | None = None
) -> IfRerendered:
    """Render the conversation of each branch as it is at its end, and compare it with the record.

    That is the row of a trainer that gets messages. `tokentape drift` renders before every turn instead, as a server
    does. Without `forward` there are no logprobs, and the `Numbers` are over no tokens. A row's logprobs are those of
    the recorded ids in the new context. Ids or text that changed have none.
    """
    tally = _RerenderTally(renderer, forward)
    for stored in sessions:
        session = stored.tree()
        for one in stored.trajectories():
            path = session.path(one.leaf)
            tally.add(one, None if one.media else whole_conversation(renderer, path, stored.setups[path[-1].setup]))
    return tally.report()


class _RerenderTally:
    def __init__(self, renderer: Renderer, forward: Forward | None) -> None:
        self._tokenizer = renderer.tokenizer
        self._forward = forward
        self._counts: Counter[str] = Counter()
        self._kinds: dict[str, Counter[str]] = {"ids": Counter(), "text": Counter()}
        self._apart: dict[str, list[npt.NDArray[np.float64]]] = {"numeric": [], "ids": [], "text": []}

    def add(self, one: Trajectory, again: TokenIds | None) -> None:
        if again is None:
            self._counts["refused"] += 1
            return
        mask = one.loss_mask & np.isfinite(one.logprobs)
        mask[:1] = False
        found = compare(one.token_ids, again, self._tokenizer, provenance=one.provenance)
        first = {"ids": len(mask), "text": len(mask)}
        for difference in found.differences:
            # What the template writes after the last turn is in no completion.
            if difference.expected_start < len(mask):
                name = "ids" if difference.same_bytes else "text"
                first[name] = min(first[name], difference.expected_start)
                self._kinds[name][difference.kind] += 1
                changed = mask[difference.expected_start : difference.expected_end]
                self._counts[f"{name} tokens"] += int(changed.sum())
        self._counts["sequences"] += 1
        self._counts["tokens"] += int(mask.sum())
        for name, start in first.items():
            self._counts[f"{name} sequences"] += start < len(mask)
        if self._forward is not None:
            partner = found.partners()
            positions = np.flatnonzero(mask & (partner >= 0))
            apart = self._forward(again)[partner[positions]].astype(np.float64) - one.logprobs[positions]
            cuts = np.searchsorted(positions, [min(first.values()), first["text"]])
            for name, part in zip(self._apart, np.split(apart, cuts), strict=True):
                self._apart[name].append(part)

    def report(self) -> IfRerendered:
        ids, text = (
            Changed(self._counts[f"{name} sequences"], self._counts[f"{name} tokens"], dict(kinds))
            for name, kinds in self._kinds.items()
        )
        return IfRerendered(
            sequences=self._counts["sequences"],
            refused=self._counts["refused"],
            tokens=self._counts["tokens"],
            id_drift=ids,
            text_drift=text,
            numeric=logprob_numbers(self._apart["numeric"]),
            behind_id_drift=logprob_numbers(self._apart["ids"]),
            behind_text_drift=logprob_numbers(self._apart["text"]),
        )
