"""What a model did with the word it was to replace, read off its ids.

The place of the word is found in the bytes of the completion by the words around it, the last time they occur; then the
tokens that touch it are compared with those of the sentence as it was given. Two verdicts: *byte-strict*, where a
phantom edit spells exactly the same bytes, and *whitespace-normalised*, where white space may differ.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, TypeAlias

from tokentape.audit.probe.trials import Trial
from tokentape.audit.tokendiff import boundary_artifact, text_artifact
from tokentape.chat.tokenizer import Tokenizer

Kind: TypeAlias = Literal["replaced", "unchanged", "phantom", "spacing", "other"]

KINDS: dict[Kind, str] = {
    "replaced": "another word stands in its place",
    "unchanged": "the same word with the same ids",
    "phantom": "the same bytes with other ids: a phantom edit, byte-strict",
    "spacing": "the same word with other ids and other white space: a phantom edit only if white space is normalised",
    "other": "the sentence did not come back: refused, cut off, or other words changed too",
}
"""What each outcome means."""

_MOST_BETWEEN = 120
_MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the word."""

    kind: Kind
    artifact: str | None = None
    """With a phantom edit, strict or not, its class: one of `tokendiff.ARTIFACTS`."""
    source: tuple[int, ...] = ()
    """Ids of the word, and of what its tokens touch, as the prompt's text has them."""
    found: tuple[int, ...] = ()
    """Ids at its place in the completion."""
    at: int = -1
    """Position in the completion of the first id that differs; -1 if none does."""
    canonical: bool = True
    """Whether encoding what the completion says gives its ids again."""


def outcome(trial: Trial, completion: Sequence[int], tokenizer: Tokenizer) -> Outcome:
    """Read one completion, without what ended it.

    `completion` are the sampled ids. Raises `InvalidRequest` for an id outside of the vocabulary.
    """
    pieces = [tokenizer.token_bytes(token_id) for token_id in completion]
    spelled = b"".join(pieces)
    canonical = _canonical(completion, spelled, tokenizer)
    place = _place(trial, spelled)
    if place is None:
        return Outcome("other", canonical=canonical)
    start, end = place
    said = spelled[start:end]
    target = trial.target.encode()
    if said.strip() != target:
        return Outcome("replaced", canonical=canonical)
    source = tokenizer.encode_plain(trial.text)
    source_pieces = [tokenizer.token_bytes(token_id) for token_id in source]
    # A tokenizer may put a space in front of a text.
    text = b"".join(source_pieces)
    word = text.index(trial.before.encode() + target) + len(trial.before.encode())
    left = len(text[:word].rstrip())
    ours, theirs = _even(
        _Stretch.touching(source_pieces, left, word + len(target)),
        _Stretch.touching(pieces, start, start + said.index(target) + len(target)),
    )
    ids, found = tuple(source[ours.first : ours.end]), tuple(completion[theirs.first : theirs.end])
    at = theirs.first + next((n for n, (a, b) in enumerate(zip(ids, found, strict=False)) if a != b), len(ids))
    if ids == found:
        return Outcome("unchanged", None, ids, found, canonical=canonical)
    if ours.spelled == theirs.spelled:
        before, behind = b"".join(source_pieces[: ours.first]), b"".join(source_pieces[ours.end :])
        kind = boundary_artifact(
            source_pieces[ours.first : ours.end], pieces[theirs.first : theirs.end], before, behind
        )
        return Outcome("phantom", kind, ids, found, at, canonical)
    if ours.spelled.split() == theirs.spelled.split():
        return Outcome("spacing", text_artifact(ours.spelled, theirs.spelled), ids, found, at, canonical)
    return Outcome("other", None, ids, found, canonical=canonical)


def _canonical(ids: Sequence[int], spelled: bytes, tokenizer: Tokenizer) -> bool:
    try:
        return tokenizer.encode_plain(spelled.decode()) == list(ids)
    except UnicodeDecodeError:
        return False


def _place(trial: Trial, spelled: bytes) -> tuple[int, int] | None:
    """The bytes between the words around the target, the last time that they stand there."""
    before, after = (_spaced(side) for side in (trial.before, trial.after))
    between = rb"(.{0,%d}?)" % _MOST_BETWEEN
    pattern = re.compile((before or rb"(?:\A|\n)") + between + (after or rb"(?=\s*(?:\Z|\n))"), re.DOTALL)
    spans = [match.span(1) for match in pattern.finditer(spelled)]
    return spans[-1] if spans else None


def _spaced(text: str) -> bytes:
    """A pattern of a text with any white space between its words."""
    return rb"\s+".join(re.escape(word.encode()) for word in text.split())


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens of a word and the white space in front of it, and how far they reach over these on either side."""

    pieces: Sequence[bytes]
    first: int
    end: int
    reach_left: int
    """In bytes."""
    reach_right: int

    @classmethod
    def touching(cls, pieces: Sequence[bytes], left: int, end: int) -> _Stretch:
        """The tokens that bytes `left` to before `end` are part of."""
        starts = [0, *accumulate(map(len, pieces))]
        first = bisect_right(starts, left) - 1
        last = bisect_left(starts, end)
        return cls(pieces, first, last, left - starts[first], starts[last] - end)

    @property
    def spelled(self) -> bytes:
        return b"".join(self.pieces[self.first : self.end])

    def wider_left(self) -> _Stretch:
        return replace(self, first=self.first - 1, reach_left=self.reach_left + len(self.pieces[self.first - 1]))

    def wider_right(self) -> _Stretch:
        return replace(self, end=self.end + 1, reach_right=self.reach_right + len(self.pieces[self.end]))


def _even(one: _Stretch, other: _Stretch) -> tuple[_Stretch, _Stretch]:
    """Both widened until they reach equally far, or there are no more tokens."""
    for _ in range(_MOST_TOKENS):
        if one.reach_left < other.reach_left and one.first:
            one = one.wider_left()
        elif other.reach_left < one.reach_left and other.first:
            other = other.wider_left()
        elif one.reach_right < other.reach_right and one.end < len(one.pieces):
            one = one.wider_right()
        elif other.reach_right < one.reach_right and other.end < len(other.pieces):
            other = other.wider_right()
        else:
            break
    return one, other
