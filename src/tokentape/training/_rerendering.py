"""Compare recorded conversations, and their logprobs, with what rendering their messages again would give.

A trainer that gets messages would train on these renderings. As in `check-logprobs`, there are three channels: tokens
before the first difference have the same context, tokens after a difference in ids have the same text, and tokens after
a difference in text have neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tokentape.audit._drift.rerender import whole_conversation
from tokentape.audit._statistics import Numbers, NumbersTally
from tokentape.audit._tokendiff.comparing import compare
from tokentape.chat._renderer import Renderer
from tokentape.store import StoredSession
from tokentape.training._logprob_check import Forward
from tokentape.types import TokenIds, Trajectory


@dataclass(frozen=True, slots=True)
class Changed:
    """The changes in one channel."""

    sequences: int = 0
    """Sequences with a difference, even if only in the context."""
    tokens: int = 0
    """Trained tokens that changed."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Number of differences of each of `KINDS` in `audit._tokendiff.kinds`."""


@dataclass(frozen=True, slots=True)
class IfRerendered:
    """The result of `check_rerendered`. `Numbers` are of new minus recorded logprobs of unchanged tokens, in nats."""

    sequences: int
    refused: int
    """Conversations that the template refuses, or that have images. The other numbers leave them out."""
    tokens: int
    """Trained tokens."""
    id_drift: Changed
    text_drift: Changed
    numeric: Numbers
    """Tokens before the first difference."""
    after_id_drift: Numbers
    """Tokens after a difference in ids, before any difference in text."""
    after_text_drift: Numbers
    """Tokens after a difference in text."""


def check_rerendered(
    sessions: Iterable[StoredSession], renderer: Renderer, forward: Forward | None = None
) -> IfRerendered:
    """Render the whole conversation of each branch again, and compare it with the record.

    `tokentape drift` instead renders before every turn, as a server does. Without `forward` there are no logprobs, and
    the `Numbers` are empty. Logprobs are of the recorded ids in the new context; changed ids have none.
    """
    counts: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {"ids": Counter(), "text": Counter()}
    apart = {name: NumbersTally() for name in ("numeric", "ids", "text")}
    for trajectory, again in _pairs(sessions, renderer):
        if again is None:
            counts["refused"] += 1
            continue
        mask = trajectory.loss_mask & np.isfinite(trajectory.logprobs)
        mask[:1] = False
        comparison = compare(trajectory.token_ids, again, renderer.tokenizer, provenance=trajectory.provenance)
        first = {"ids": len(mask), "text": len(mask)}
        for difference in comparison.differences:
            # Ignore text of the template after the last turn.
            if difference.expected_start < len(mask):
                name = "ids" if difference.same_bytes else "text"
                first[name] = min(first[name], difference.expected_start)
                kinds[name][difference.kind] += 1
                changed = mask[difference.expected_start : difference.expected_end]
                counts[f"{name} tokens"] += int(changed.sum())
        counts.update({f"{name} sequences": int(start < len(mask)) for name, start in first.items()})
        counts.update(sequences=1, tokens=int(mask.sum()))
        if forward is not None:
            partner = comparison.recorded_positions()
            positions = np.flatnonzero(mask & (partner >= 0))
            distance = forward(again)[partner[positions]].astype(np.float64) - trajectory.logprobs[positions]
            cuts = np.searchsorted(positions, [min(first.values()), first["text"]])
            for tally, part in zip(apart.values(), np.split(distance, cuts), strict=True):
                tally.add(part)
    drifts = {name: Changed(counts[f"{name} sequences"], counts[f"{name} tokens"], dict(kinds[name])) for name in kinds}
    return IfRerendered(
        sequences=counts["sequences"],
        refused=counts["refused"],
        tokens=counts["tokens"],
        id_drift=drifts["ids"],
        text_drift=drifts["text"],
        numeric=apart["numeric"].numbers(),
        after_id_drift=apart["ids"].numbers(),
        after_text_drift=apart["text"].numbers(),
    )


def _pairs(sessions: Iterable[StoredSession], renderer: Renderer) -> Iterator[tuple[Trajectory, TokenIds | None]]:
    """Yield each branch with the ids of its rendered messages.

    The ids are None if the template refuses the messages, or if they contain images.
    """
    for stored in sessions:
        session = stored.tree()
        for trajectory in stored.trajectories():
            path = session.path(trajectory.leaf)
            setup = stored.setups[path[-1].setup]
            yield trajectory, None if trajectory.media else whole_conversation(renderer, path, setup)
