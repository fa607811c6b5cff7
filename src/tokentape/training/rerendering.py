"""What a trainer would have that gets messages: each conversation rendered again, and its logprobs there.

A counterfactual for `check-logprobs`. The three channels are kept apart as there: tokens in front of the first
difference are the same in the same context, behind other ids the text is still the same, behind other text it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokentape.audit.compare.comparator import Difference, compare
from tokentape.audit.drift.rerender import with_objects
from tokentape.chat.renderer import Renderer
from tokentape.errors import TokentapeError
from tokentape.store import StoredSession
from tokentape.training.logprob_check import Forward, Numbers, numbers
from tokentape.types import Setup, TokenIds, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Changed:
    """Trained tokens that a channel changes."""

    sequences: int = 0
    """In which the channel has any difference, be it in the context alone."""
    tokens: int = 0
    """Trained ones that are not there again."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """How many differences are of each of `compare.kinds.KINDS`."""


@dataclass(frozen=True, slots=True)
class IfRerendered:
    """What was found. Numbers are of the recorded tokens that are there again: logprob there - recorded, in nats."""

    sequences: int
    refused: int
    """Conversations that the template does not take, or that hold images; in no other number."""
    tokens: int
    """Trained ones."""
    id_drift: Changed
    text_drift: Changed
    numeric: Numbers
    """In front of the first difference."""
    behind_id_drift: Numbers
    """Behind other ids and no other text."""
    behind_text_drift: Numbers


def check_rerendered(
    sessions: Iterable[StoredSession], renderer: Renderer, forward: Forward | None = None
) -> IfRerendered:
    """Render the conversation of each branch once, as it is at its end, and compare with what was recorded of it.

    That is the row of a trainer that gets messages. `tokentape drift` renders before every turn instead, as a server
    does. Without `forward` there are no logprobs, and the `Numbers` are of no tokens. A row's logprobs are those that
    the recorded ids have in the new context: what became other ids or other text has none.
    """
    tally = _Tally(renderer, forward)
    for stored in sessions:
        session = stored.tree()
        for one in stored.trajectories():
            path = session.path(one.leaf)
            tally.add(one, None if one.media else rendered_again(renderer, path, stored.setups[path[-1].setup]))
    return tally.report()


def rendered_again(renderer: Renderer, path: Sequence[Turn], setup: Setup) -> TokenIds | None:
    """The ids of a branch's messages and replies as the template writes them; None if it does not take them."""
    messages = [with_objects(message) for turn in path for message in (*turn.messages, turn.reply)]
    try:
        text, _ = renderer.written(messages, setup, generate=False)
    except TokentapeError:
        return None
    return renderer.tokenizer.array(renderer.tokenizer.encode_marked(text).ids)


class _Tally:
    def __init__(self, renderer: Renderer, forward: Forward | None) -> None:
        self._tokenizer = renderer.tokenizer
        self._forward = forward
        self._counts: Counter[str] = Counter()
        self._kinds: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        self._apart: dict[str, list[npt.NDArray[np.float64]]] = {"numeric": [], "ids": [], "text": []}

    def add(self, one: Trajectory, again: TokenIds | None) -> None:
        if again is None:
            self._counts["refused"] += 1
            return
        mask = one.loss_mask & np.isfinite(one.logprobs)
        mask[:1] = False
        # What the template writes behind the last turn is in no completion.
        found = [
            difference
            for difference in compare(one.token_ids, again, self._tokenizer, provenance=one.provenance).differences
            if difference.expected_start < len(one.token_ids)
        ]
        self._counts["sequences"] += 1
        self._counts["tokens"] += int(mask.sum())
        for ids_only in (True, False):
            of_channel = [difference for difference in found if _ids_only(difference) == ids_only]
            name = "id" if ids_only else "text"
            self._counts[f"{name} sequences"] += bool(of_channel)
            self._counts[f"{name} tokens"] += sum(
                int(mask[difference.expected_start : difference.expected_end].sum()) for difference in of_channel
            )
            self._kinds[ids_only].update(difference.kind for difference in of_channel)
        if self._forward is not None:
            self._add_numbers(one, again, found, mask, self._forward)

    def _add_numbers(
        self,
        one: Trajectory,
        again: TokenIds,
        found: Sequence[Difference],
        mask: npt.NDArray[np.bool_],
        forward: Forward,
    ) -> None:
        partner = _partners(len(one.token_ids), len(again), found)
        positions = np.flatnonzero(mask & (partner >= 0))
        apart = forward(again)[partner[positions]].astype(np.float64) - one.logprobs[positions]
        end = len(one.token_ids)
        first = min((difference.expected_start for difference in found), default=end)
        first_text = min((d.expected_start for d in found if not _ids_only(d)), default=end)
        self._apart["numeric"].append(apart[positions < first])
        self._apart["ids"].append(apart[(positions >= first) & (positions < first_text)])
        self._apart["text"].append(apart[positions >= first_text])

    def report(self) -> IfRerendered:
        counts = self._counts
        return IfRerendered(
            sequences=counts["sequences"],
            refused=counts["refused"],
            tokens=counts["tokens"],
            id_drift=Changed(counts["id sequences"], counts["id tokens"], dict(self._kinds[True])),
            text_drift=Changed(counts["text sequences"], counts["text tokens"], dict(self._kinds[False])),
            numeric=numbers(self._apart["numeric"]),
            behind_id_drift=numbers(self._apart["ids"]),
            behind_text_drift=numbers(self._apart["text"]),
        )


def _ids_only(difference: Difference) -> bool:
    return difference.kind in ("ids", "forged")


def _partners(tokens: int, others: int, found: Sequence[Difference]) -> npt.NDArray[np.int64]:
    """Per recorded token the position of the same one in what was rendered; -1 where there is none."""
    partner = np.full(tokens, -1)
    at = other_at = 0
    for difference in found:
        partner[at : difference.expected_start] = np.arange(other_at, difference.recorded_start)
        at, other_at = difference.expected_end, difference.recorded_end
    # Behind the last difference there may be what the template writes behind the last turn.
    rest = min(tokens - at, others - other_at)
    partner[at : at + rest] = np.arange(other_at, other_at + rest)
    return partner
