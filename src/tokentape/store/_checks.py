"""Rules for turns, columns and payloads, checked before writing and by `verify`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokentape._session.chain import turn_digest
from tokentape._session.media import media_spans
from tokentape._session.payloads import ROW_DTYPES
from tokentape.errors import TokentapeError
from tokentape.types import Provenance, Turn, TurnColumn, TurnPayload

_MAY_BE_ADDED = np.isin(np.arange(256), [code for code in Provenance if code is not Provenance.SAMPLED])
"""Indexed by provenance code. A table, because `np.isin` is too slow to run on every write."""


def turn_faults(turn: Turn) -> Iterator[str]:
    """Yield a sentence for each rule that `turn` breaks, apart from rules about other turns."""
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
    try:
        media_spans(turn.messages, turn.added_provenance)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"its images don't fit its ids ({error})"


def per_token_faults(record: TurnColumn | TurnPayload, added: int, sampled: int, *, is_root: bool) -> Iterator[str]:
    """Yield a sentence for each rule that a column or payload breaks. Its turn added and sampled so many ids."""
    if isinstance(record, TurnColumn):
        if record.values.size not in (sampled, added + sampled):
            yield (
                f"column {record.name!r} has {record.values.size} values; "
                f"the turn has {sampled} sampled ids, {added + sampled} with the added ones; give one value for each"
            )
        if not np.isfinite(record.values).all():
            yield f"column {record.name!r} has values that are not finite numbers"
        return
    name, rows = f"payload {record.name!r}", record.rows
    if rows.ndim < 1 or not len(rows):
        yield f"{name} has no rows"
        return
    if rows.dtype.newbyteorder("<").str not in ROW_DTYPES:
        yield f"{name} has the dtype {rows.dtype}, which can't be stored"
    elif rows.dtype == object and not all(isinstance(row, bytes) for row in rows):
        yield f"{name} has rows of unequal length that are not bytes"
    first, last, end = 0 if is_root else -1, added + sampled, record.start + len(rows)
    if record.start < first or end > last:
        yield f"{name} has rows for tokens {record.start} to {end}; the turn's are {first} to {last}"


def chained(turn: Turn, parent_digest: str | None) -> bool:
    """Return whether the digest of `turn` fits its fields and its parent's digest (None for a root)."""
    try:
        return turn_digest(turn, parent_digest) == turn.digest
    except (TokentapeError, TypeError, ValueError):
        # A damaged row can hold values of types that have no digest.
        return False
