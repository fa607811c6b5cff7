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

from tokentape.chat.tokenizer import Tokenizer
from tokentape.training.align import align
from tokentape.types import TokenIds

Channel: TypeAlias = Literal["numeric", "id drift", "text drift"]
"""What a difference of logprobs comes from: the same ids, other ids, other text."""

CLASSES = {
    "control": "letters of a control token on one side, the token itself on the other",
    "bytes": "within a character",
    "whitespace": "white space goes to another token",
    "digits": "within a number",
    "word": "within a word",
    "punctuation": "between other characters",
    "spacing": "other white space, otherwise the same text",
    "text": "other text",
}
"""Of changed stretches; the last two are of text drift."""


@dataclass(frozen=True, slots=True)
class Change:
    """A stretch of the record that the trainer has in another way."""

    start: int
    """Position of the first recorded token that differs."""
    end: int
    kind: str
    """One of `CLASSES`."""


@dataclass(frozen=True, slots=True)
class Comparison:
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

    def added(self, mask: npt.NDArray[np.bool_], found: Comparison | None) -> Drift:
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


def compare_ids(recorded: TokenIds, trainers: TokenIds, tokenizer: Tokenizer) -> Comparison:
    """Tell how a trainer's ids differ from the recorded ones. Linear in tokens.

    A trainer's sequence that is the beginning of the record was cut, which is no drift. Where text differs, only what
    both begin and end with is taken for the same.
    """
    least = min(len(recorded), len(trainers))
    unequal = np.flatnonzero(recorded[:least] != trainers[:least])
    first = int(unequal[0]) if len(unequal) else least
    if first == len(trainers):
        partner = np.arange(len(recorded))
        partner[least:] = -1
        return Comparison("numeric", partner, len(recorded))
    one, other = (
        [tokenizer.token_bytes(token_id) for token_id in ids] for ids in (recorded.tolist(), trainers.tolist())
    )
    if b"".join(one) == b"".join(other):
        return _other_ids(recorded, trainers, one, other, first, tokenizer)
    return _other_text(recorded, trainers, one, other, first)


def retokenized(tokenizer: Tokenizer, ids: TokenIds) -> TokenIds:
    """What is left of ids that go through text: decoded, and encoded as a trainer would."""
    return tokenizer.array(tokenizer.encode_plain(tokenizer.decode(ids.tolist())))


def _other_ids(
    recorded: TokenIds,
    trainers: TokenIds,
    one: Sequence[bytes],
    other: Sequence[bytes],
    first: int,
    tokenizer: Tokenizer,
) -> Comparison:
    spans = align(one, other)
    partner = np.full(len(recorded), -1)
    # A token that both sides have is a span of its own.
    alone = (np.bincount(spans.left) == 1) & (np.bincount(spans.right) == 1)
    left, right = np.flatnonzero(alone[spans.left]), np.flatnonzero(alone[spans.right])
    same = recorded[left] == trainers[right]
    partner[left[same]] = right[same]
    changes = []
    for start, end in _runs(partner < 0):
        its_start = int(np.searchsorted(spans.right, spans.left[start], "left"))
        its_end = int(np.searchsorted(spans.right, spans.left[end - 1], "right"))
        cuts = [*recorded[start:end].tolist(), *trainers[its_start:its_end].tolist()]
        kind = _class(one[start:end], other[its_start:its_end])
        if any(tokenizer.control_by_id(token_id) is not None for token_id in cuts):
            kind = "control"
        changes.append(Change(start, end, kind))
    return Comparison("id drift", partner, first, tuple(changes))


def _other_text(
    recorded: TokenIds, trainers: TokenIds, one: Sequence[bytes], other: Sequence[bytes], first: int
) -> Comparison:
    least = min(len(recorded), len(trainers)) - first
    unequal = np.flatnonzero(recorded[::-1][:least] != trainers[::-1][:least])
    last = int(unequal[0]) if len(unequal) else least
    partner = np.full(len(recorded), -1)
    partner[:first] = np.arange(first)
    if last:
        partner[-last:] = np.arange(len(trainers) - last, len(trainers))
    end = len(recorded) - last
    left, right = b"".join(one[first:end]), b"".join(other[first : len(other) - last])
    kind = "spacing" if b"".join(left.split()) == b"".join(right.split()) else "text"
    return Comparison("text drift", partner, first, (Change(first, end, kind),))


def _class(one: Sequence[bytes], other: Sequence[bytes]) -> str:
    """Where boundaries moved within the same text: the first that applies of what stands at a moved one."""
    ends = [set(np.cumsum([len(piece) for piece in side]).tolist()) for side in (one, other)]
    moved = sorted(ends[0] ^ ends[1])
    if not moved:
        return "word"  # two ids that spell the same bytes
    text = b"".join(one)
    kinds = set()
    for at in moved:
        try:
            before, behind = text[:at].decode()[-1:], text[at:].decode()[:1]
        except UnicodeDecodeError:
            kinds.add("bytes")
            continue
        if before.isspace() or behind.isspace():
            kinds.add("whitespace")
        elif before.isdigit() and behind.isdigit():
            kinds.add("digits")
        elif before.isalnum() and behind.isalnum():
            kinds.add("word")
        else:
            kinds.add("punctuation")
    return next(kind for kind in CLASSES if kind in kinds)


def _runs(which: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], which, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
