"""Turns made by hand for tests of the session layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.records import UNCHANGED
from tokentape.types import FinishReason, Message, Provenance, Turn


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def make_turn(
    seq: int,
    parent: int | None,
    messages: Sequence[Message],
    reply: Message,
    *,
    added: Sequence[int] = (1, 2),
    completion: Sequence[int] = (3, 4),
    setup: str = "setup",
    fork: str | None = None,
    finish_reason: FinishReason = "stop",
    closed: bool = False,
) -> Turn:
    provenance = np.full(len(added), Provenance.TEMPLATE, dtype=np.uint8)
    if closed:
        provenance[:1] = Provenance.CLOSE
    return Turn(
        session_id="s",
        seq=seq,
        parent=parent,
        setup=setup,
        messages=tuple(messages),
        reply=reply,
        added_ids=np.array(added, dtype=np.int32),
        added_provenance=provenance,
        completion_ids=np.array(completion, dtype=np.int32),
        logprobs=np.full(len(completion), -0.5, dtype=np.float32),
        finish_reason=finish_reason,
        stop=None,
        fork=fork,
        sampling={},
        engine="test",
        weight_version="1",
        created_at=0.0,
        digest="",
        sampled_from=UNCHANGED,
        logprobs_of=UNCHANGED,
    )
