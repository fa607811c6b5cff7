"""How a trainer's ids differ from the recorded ones: not at all, in ids only, or in text.

*Id drift* is other ids for the same bytes, as retokenizing makes it. *Text drift* is other bytes, as rendering messages
again makes it. Each changed stretch gets a class, which says where the boundary moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit.drift.classes import ARTIFACTS, artifact, text_artifact
from tokentape.chat.tokenizer import Tokenizer
from tokentape.types import TokenIds

Channel: TypeAlias = Literal["numeric", "id drift", "text drift"]
"""What a difference of logprobs comes from: the same ids, other ids, other text."""


@dataclass(frozen=True, slots=True)
class Change:
    """A stretch of the record that the trainer has in another way."""

    start: int
    """Position of the first recorded token that differs."""
    end: int
    trainer_start: int
    """Position of the trainer's first token of the stretch."""
    trainer_end: int
    artifact: str
    """One of `ARTIFACTS`."""

    @property
    def kind(self) -> str:
        """One of `CLASSES`."""
        return ARTIFACTS[self.artifact].kind


@dataclass(frozen=True, slots=True)
class Pairing:
    """Recorded ids and a trainer's, side by side."""

    channel: Channel
    partner: npt.NDArray[np.int64]
    """Per recorded token the trainer's position of it, with the same id over the same bytes; -1 if there is none."""
    first: int
    """Position of the first recorded token that differs: what is before has the same context."""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Drift:
    """Changed tokens, counted over sequences: of those that are trained."""

    sequences: int = 0
    changed_sequences: int = 0
    tokens: int = 0
    changed_tokens: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)
    """How many changed stretches are of each class."""

    def added(self, mask: npt.NDArray[np.bool_], found: Pairing | None) -> Drift:
        """With one more sequence, whose trained tokens are `mask`; None for one without drift."""
        more = replace(self, sequences=self.sequences + 1, tokens=self.tokens + int(mask.sum()))
        if found is None:
            return more
        kinds = Counter(change.kind for change in found.changes if mask[change.start : change.end].any())
        return replace(
            more,
            changed_sequences=self.changed_sequences + 1,
            changed_tokens=self.changed_tokens + int((mask & (found.partner < 0)).sum()),
            classes=dict(Counter(self.classes) + kinds),
        )

    @property
    def share(self) -> float:
        """Of the tokens, those that changed."""
        return self.changed_tokens / self.tokens if self.tokens else 0.0


def pair_ids(recorded: TokenIds, trainers: TokenIds, tokenizer: Tokenizer) -> Pairing:
    """Tell how a trainer's ids differ from the recorded ones. Linear in tokens.

    A trainer's sequence that is the beginning of the record was cut, which is no drift. Where text differs, only what
    both begin and end with is taken for the same; `compare.compare` finds every difference of such texts.
    """
    least = min(len(recorded), len(trainers))
    unequal = np.flatnonzero(recorded[:least] != trainers[:least])
    first = int(unequal[0]) if len(unequal) else least
    if first == len(trainers):
        partner = np.arange(len(recorded))
        partner[least:] = -1
        return Pairing("numeric", partner, len(recorded))
    one, other = (
        [tokenizer.token_bytes(token_id) for token_id in ids] for ids in (recorded.tolist(), trainers.tolist())
    )
    if b"".join(one) == b"".join(other):
        partner, changes = changed_stretches(recorded, trainers, one, other, tokenizer)
        return Pairing("id drift", partner, first, changes)
    return _other_text(recorded, trainers, one, other, first)


def retokenized(tokenizer: Tokenizer, ids: TokenIds) -> TokenIds:
    """What is left of ids that go through text: decoded, and encoded as a trainer would."""
    return tokenizer.array(tokenizer.encode_plain(tokenizer.decode(ids.tolist())))


def changed_stretches(
    recorded: TokenIds, trainers: TokenIds, one: Sequence[bytes], other: Sequence[bytes], tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.int64], tuple[Change, ...]]:
    """Partners, as in `Pairing`, and changed stretches of ids that spell the same bytes, by token `one` and `other`."""
    ends, their_ends = (np.cumsum([len(piece) for piece in side]) for side in (one, other))
    # The same id spells the same bytes, so the end of it tells its place.
    _, left, right = np.intersect1d(_places(ends, recorded), _places(their_ends, trainers), return_indices=True)
    partner = np.full(len(recorded), -1)
    partner[left] = right
    changes = []
    for start, end in _between_common_ends(partner, ends, their_ends):
        their_start = int(np.searchsorted(their_ends, ends[start] - len(one[start]), "right"))
        their_end = int(np.searchsorted(their_ends, ends[end - 1], "right"))
        cuts = [*recorded[start:end].tolist(), *trainers[their_start:their_end].tolist()]
        if any(tokenizer.control_by_id(token_id) is not None for token_id in cuts):
            name = "control"
        else:
            around = b"".join(one[max(start - 8, 0) : start]), b"".join(one[end : end + 8])
            name = artifact(one[start:end], other[their_start:their_end], *around)
        changes.append(Change(start, end, their_start, their_end, name))
    return partner, tuple(changes)


def _places(ends: npt.NDArray[np.int64], ids: TokenIds) -> npt.NDArray[np.int64]:
    return (ends.astype(np.int64) << 32) + ids


def _between_common_ends(
    partner: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], their_ends: npt.NDArray[np.int64]
) -> list[tuple[int, int]]:
    """The smallest stretches of unpaired tokens that both sides spell with whole tokens."""
    found = []
    common = np.isin(ends, their_ends)
    for start, end in _runs(partner < 0):
        stops = [start + at + 1 for at in np.flatnonzero(common[start:end]).tolist()]
        if not stops or stops[-1] != end:
            stops.append(end)
        found += list(zip([start, *stops[:-1]], stops, strict=True))
    return found


def _other_text(
    recorded: TokenIds, trainers: TokenIds, one: Sequence[bytes], other: Sequence[bytes], first: int
) -> Pairing:
    least = min(len(recorded), len(trainers)) - first
    unequal = np.flatnonzero(recorded[::-1][:least] != trainers[::-1][:least])
    last = int(unequal[0]) if len(unequal) else least
    partner = np.full(len(recorded), -1)
    partner[:first] = np.arange(first)
    if last:
        partner[-last:] = np.arange(len(trainers) - last, len(trainers))
    end, their_end = len(recorded) - last, len(trainers) - last
    name = text_artifact(b"".join(one[first:end]), b"".join(other[first:their_end]))
    return Pairing("text drift", partner, first, (Change(first, end, first, their_end, name),))


def _runs(which: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], which, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
