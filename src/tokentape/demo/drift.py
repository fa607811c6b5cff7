"""What decoding and retokenizing recorded sessions would have changed, and whether the record changed anything.

The first is what every pipeline does that stores messages and tokenizes them again for training: measured here on
completions one by one, and on whole trajectories rendered again from their messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokentape.audit.drift.rerender import through_messages
from tokentape.audit.pairing import Pairing, pair_ids, retokenized
from tokentape.chat.renderer import Renderer
from tokentape.engines.transformers import FinishedSample
from tokentape.errors import TemplateRefused
from tokentape.session.tree import Session
from tokentape.store import StoredSession
from tokentape.types import Setup, TokenIds, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Change:
    """A stretch of text that was sampled as some ids and is retokenized to others."""

    session_id: str
    turn: int
    kind: str
    """Its class, as the viewer names it."""
    sampled: tuple[int, ...]
    retokenized: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """What decode-and-retokenize changes: out of `completions`, `tokens` and `trajectories`, those that differ."""

    completions: int
    changed_completions: int
    tokens: int
    """Sampled ones."""
    changed_tokens: int
    trajectories: int
    retokenized_trajectories: int
    """Those whose own text has other ids."""
    rerendered_trajectories: int
    """Those that have other ids after going through messages and template; templates rewrite history as well."""
    longest: Change | None
    """Of the changes that completions begin with, the one with the most sampled ids."""


def retokenization_drift(renderer: Renderer, sessions: Iterable[StoredSession]) -> Drift:
    """Retokenize every completion and re-render every branch of `sessions`, and compare with the ids recorded."""
    tokenizer = renderer.tokenizer
    counts: Counter[str] = Counter()
    changes: list[Change] = []
    for stored in sessions:
        for turn in stored.turns:
            sampled = turn.completion_ids
            again = retokenized(tokenizer, sampled)
            counts["completions"] += 1
            counts["tokens"] += len(sampled)
            if not np.array_equal(sampled, again):
                found = pair_ids(sampled, again, tokenizer)
                changes.append(_first_change(turn, again, found))
                counts["changed_tokens"] += int((found.partner < 0).sum())
        session = Session(stored.info, stored.turns)
        for leaf in session.leaves():
            path = session.path(leaf)
            ids = session.context_after(leaf)
            counts["trajectories"] += 1
            counts["retokenized"] += not np.array_equal(ids, retokenized(tokenizer, ids))
            counts["rerendered"] += ids.tolist() != _rerendered(renderer, path, stored.setups[path[-1].setup])
    return Drift(
        completions=counts["completions"],
        changed_completions=len(changes),
        tokens=counts["tokens"],
        changed_tokens=counts["changed_tokens"],
        trajectories=counts["trajectories"],
        retokenized_trajectories=counts["retokenized"],
        rerendered_trajectories=counts["rerendered"],
        longest=max(changes, key=lambda change: len(change.sampled), default=None),
    )


def turns_unlike_engine(trajectories: Iterable[Trajectory], log: Iterable[FinishedSample]) -> int:
    """How many recorded turns are not, bit for bit, a call in the engine's own log: prompt, sampled ids, logprobs.

    A turn's prompt is all of its trajectory before its first sampled token. So 0 also says that every context is the
    one before it + what was sampled there + the bridge.
    """
    calls = Counter(_key(call.prompt_ids, call.token_ids, call.logprobs) for call in log)
    recorded: dict[tuple[str, int], bytes] = {}
    for one in trajectories:
        for seq, start, end in zip(one.turns, one.completion_starts, one.completion_ends, strict=True):
            recorded[one.session_id, seq] = _key(
                one.token_ids[:start], one.token_ids[start:end], one.logprobs[start:end]
            )
    return (Counter(recorded.values()) - calls).total()


def _key(prompt_ids: Any, token_ids: Any, logprobs: Any) -> bytes:
    prompt = np.asarray(prompt_ids, np.int32)
    return b"".join(
        [
            len(prompt).to_bytes(8, "little"),
            prompt.tobytes(),
            np.asarray(token_ids, np.int32).tobytes(),
            np.asarray(logprobs, np.float32).tobytes(),
        ]
    )


def _first_change(turn: Turn, again: TokenIds, found: Pairing) -> Change:
    """The first changed stretch; where retokenizing only left off the end, that."""
    sampled, retokenized_to, kind = turn.completion_ids[len(again) :], again[:0], "cut off"
    if found.changes:
        first = found.changes[0]
        kind = first.kind
        sampled = turn.completion_ids[first.start : first.end]
        retokenized_to = again[first.trainer_start : first.trainer_end]
    return Change(turn.session_id, turn.seq, kind, tuple(sampled.tolist()), tuple(retokenized_to.tolist()))


def _rerendered(renderer: Renderer, path: Sequence[Turn], setup: Setup) -> list[int] | None:
    """None if the template refuses the messages."""
    try:
        ids: list[int] = through_messages(renderer, path, setup).tolist()
    except TemplateRefused:
        return None
    return ids
