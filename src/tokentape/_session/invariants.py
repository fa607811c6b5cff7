"""Check the invariants of every turn before it is committed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokentape.errors import EngineContractError, InvariantViolation
from tokentape.types import Logprobs, Provenance, TokenIds, Turn

_SAMPLED = int(Provenance.SAMPLED)


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise `EngineContractError` if an engine returned an id that is not in the model's vocabulary."""
    for token_id in (min(ids), max(ids)) if ids else ():
        if not 0 <= token_id < vocab_size:
            raise EngineContractError(f"the engine returned id {token_id}, but the vocabulary ends at {vocab_size - 1}")


def check_completion(ids: TokenIds, logprobs: Logprobs, vocab_size: int) -> None:
    """Raise `EngineContractError` unless the engine returned usable ids with one finite logprob each."""
    if len(ids) != len(logprobs):
        raise EngineContractError(f"the engine returned {len(ids)} ids but {len(logprobs)} logprobs")
    if not len(ids):
        raise EngineContractError("the engine returned no ids")
    check_ids(ids.tolist(), vocab_size)
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > 1e-3:
        raise EngineContractError("the engine returned a logprob that is not a finite number <= 0")


def check_turn(turn: Turn, parent_context: TokenIds, prompt: TokenIds) -> None:
    """Raise `InvariantViolation` unless the sent `prompt` is the parent's context + `added_ids`, bit for bit."""
    before, expected = len(parent_context), len(parent_context) + len(turn.added_ids)
    where = f"session {turn.session_id} turn {turn.seq}"
    if len(prompt) != expected:
        raise InvariantViolation(f"{where}: {len(prompt)} ids were sent, but parent and bridge have {expected}")
    if (differs := prompt[:before] != parent_context).any():
        raise InvariantViolation(f"{where}: the prompt differs from the parent's context at token {differs.argmax()}")
    if (prompt[before:] != turn.added_ids).any():
        raise InvariantViolation(f"{where}: the prompt does not end with the recorded bridge")
    if len(turn.added_provenance) != len(turn.added_ids):
        raise InvariantViolation(f"{where}: {len(turn.added_provenance)} codes for {len(turn.added_ids)} added ids")
    if _SAMPLED in turn.added_provenance.tobytes():
        raise InvariantViolation(f"{where}: a token is recorded as sampled, but this turn did not sample it")
