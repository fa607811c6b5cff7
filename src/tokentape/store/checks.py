"""What must hold of a turn, the same whether it is about to be written or has just been read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokentape.errors import TokentapeError
from tokentape.session.chain import turn_digest
from tokentape.types import Provenance, Turn

_MAY_BE_ADDED = np.isin(np.arange(256), [code for code in Provenance if code is not Provenance.SAMPLED])
"""By code; a look-up because `np.isin` is too slow to run on every write."""


def turn_faults(turn: Turn) -> Iterator[str]:
    """Yield a sentence for each rule that `turn` breaks by itself, without a look at other turns."""
    if turn.added_provenance.size != turn.added_ids.size:
        yield f"{turn.added_ids.size} added ids, but {turn.added_provenance.size} provenance codes"
    if turn.logprobs.size != turn.completion_ids.size:
        yield f"{turn.completion_ids.size} sampled ids, but {turn.logprobs.size} logprobs"
    if turn.parent is None and not turn.added_ids.size:
        yield "a root turn without a prompt"
    if not turn.completion_ids.size and turn.finish_reason != "abort":
        yield f"nothing sampled, but finish_reason is {turn.finish_reason!r}, not 'abort'"
    if not _MAY_BE_ADDED[turn.added_provenance].all():
        yield "an added token is marked as sampled or has an unknown provenance code"


def chained(turn: Turn, parent_digest: str | None) -> bool:
    """Say whether the digest of `turn` is right for its fields and its parent's digest (None for a root)."""
    try:
        return turn_digest(turn, parent_digest) == turn.digest
    except (TokentapeError, TypeError, ValueError):
        # A damaged row can hold a value of any type, which has no digest at all.
        return False
