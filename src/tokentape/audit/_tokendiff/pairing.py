"""Pair recorded ids with a trainer's, and count the trained tokens that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit._tokendiff.boundaries import ARTIFACTS
from tokentape.audit._tokendiff.comparing import compare
from tokentape.chat._tokenizer import Tokenizer
from tokentape.types import TokenIds

Channel: TypeAlias = Literal["numeric", "id drift", "text drift"]
"""The cause of a difference between logprobs: the same ids, other ids for the same text, other text."""


class Change(NamedTuple):
    """A stretch of recorded tokens, half-open, that the trainer has in another way."""

    start: int
    end: int
    kind: str
    """One of `CLASSES`."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Recorded ids beside a trainer's."""

    channel: Channel
    partner: npt.NDArray[np.int64]
    """The trainer's position of each recorded token; -1 if it has no such token there. Shape [tokens]."""
    first: int
    """Position of the first recorded token that differs. Tokens before it have the same context."""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDrift:
    """Trained tokens that changed, counted over sequences."""

    sequences: int = 0
    changed_sequences: int = 0
    tokens: int = 0
    changed_tokens: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)
    """The number of changed stretches of each of `CLASSES`."""

    def added(self, mask: npt.NDArray[np.bool_], found: Pairing | None) -> TokenDrift:
        """Return the counts with one more sequence, `mask` its trained tokens; None stands for one without drift."""
        more = replace(self, sequences=self.sequences + 1, tokens=self.tokens + int(mask.sum()))
        if found is None:
            return more
        changed = [int(mask[change.start : change.end].sum()) for change in found.changes]
        kinds = Counter(change.kind for change, many in zip(found.changes, changed, strict=True) if many)
        return replace(
            more,
            changed_sequences=self.changed_sequences + 1,
            changed_tokens=self.changed_tokens + sum(changed),
            classes=dict(Counter(self.classes) + kinds),
        )

    @property
    def share(self) -> float:
        """The share of the tokens that changed."""
        return self.changed_tokens / self.tokens if self.tokens else 0.0


def pair_ids(recorded: TokenIds, trainers: TokenIds, tokenizer: Tokenizer) -> Pairing:
    """Pair a trainer's ids with the recorded ones. A trainer's sequence that ends early was cut, which is no drift."""
    found = compare(recorded, trainers, tokenizer)
    differences = [difference for difference in found.differences if difference.kind != "cut"]
    partner = found.partners()
    if not differences:
        return Pairing("numeric", partner, len(recorded))
    changes = tuple(Change(d.expected_start, d.expected_end, ARTIFACTS[d.change].kind) for d in differences)
    same_bytes = all(difference.same_bytes for difference in differences)
    return Pairing("id drift" if same_bytes else "text drift", partner, changes[0].start, changes)
